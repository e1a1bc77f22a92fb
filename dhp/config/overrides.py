"""Overrides as typed on the command line, checked against the schema and put into Hydra's terms."""

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dhp.config.keys import ANY_NAME, Key, find_key
from dhp.config.source import Source
from dhp.config.translate import unknown_key
from dhp.errors import ConfigError


def checked_overrides(arguments: Sequence[str], source: Source) -> list[str]:
    """The overrides to hand to Hydra. Raises ConfigError for text that is no override and for unknown keys.

    `key=value` and `+key=value` set a key of the schema alike (all of them exist, and entries of a
    dictionary need not); `~key` returns it to its default. Overrides of Hydra itself, of config groups and
    deletions of dictionary entries go through as they are.
    """
    return [_checked(argument, source) for argument in arguments]


def _checked(argument: str, source: Source) -> str:
    override = _parse(argument)
    name = override.key_or_group
    is_hydras = name == "hydra" or name.startswith(("hydra.", "hydra/"))
    if is_hydras or override.package is not None or source.has_group(name):
        return argument
    key = find_key(name)
    if key is None:
        raise unknown_key(name)
    in_entry = ANY_NAME in key.path
    if override.is_delete():
        return argument if in_entry or key.is_section else f"++{name}={_hydra_literal(key.default)}"
    if in_entry and not override.is_sweep_override():
        return _merged_entry(key, override)
    return f"++{argument.lstrip('+')}"


def _merged_entry(key: Key, override: Override) -> str:
    """`section.NAME.field=value` as a merge into the section: Hydra alone cannot add an entry of a declared type."""
    section, _, below = key.path.partition(f".{ANY_NAME}")
    name = override.key_or_group.removeprefix(f"{section}.").removesuffix(below)
    value = override.get_value_element_as_str()
    entry = f"{{{below[1:]}:{value}}}" if below else value
    return f"++{section}={{{name}:{entry}}}"


def _parse(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{argument!r} is not an override ({reason}); write key=value, and quote a value with special "
            "characters twice: 'key=\"a, b\"'"
        ) from error


def _hydra_literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"'{value}'" if isinstance(value, str) else str(value).replace("'", "")
