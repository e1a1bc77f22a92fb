"""Checks overrides of the command line against the schema and translates them for Hydra."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from dhp.config.errors import unknown_key, unknown_keys
from dhp.config.keys import ANY_NAME, Key, find_key
from dhp.config.suggestions import did_you_mean, nearest
from dhp.config.vocabulary import has_alias, names_here, translated
from dhp.config.yaml_files import ConfigSource, say, wrong_keys
from dhp.core.errors import ConfigError, raise_all


@dataclass(frozen=True)
class _Entry:
    """`section.NAME.field=value`, which is merged into the section: Hydra alone cannot add an entry of a declared type.
    path: below the section. value: in Hydra's words."""

    section: str
    path: tuple[str, ...]
    value: str


def checked_overrides(arguments: Sequence[str], source: ConfigSource, others: Sequence[ConfigError] = ()) -> list[str]:
    """The overrides to hand to Hydra. Raises ConfigError, one for all, for text that is no override and for
    unknown keys, those in the named YAML included. others: what else is wrong with the command line.

    `key=value` and `+key=value` set a key of the schema alike (all of them exist, and entries of a
    dictionary need not); `~key` returns it to its default. Overrides of Hydra itself, of config groups and
    deletions of dictionary entries go through as they are.
    """
    parsed, errors = [], list(others)
    for argument in arguments:
        try:
            parsed.append((argument, _parse(argument)))
        except ConfigError as error:
            errors.append(error)
    of_others = [override for _, override in parsed if _is_alias(override)]
    own: list[str | _Entry] = []
    for argument, override in parsed:
        try:
            own += [] if override in of_others else [_checked(argument, override, source)]
        except ConfigError as error:
            errors.append(error)
    file = source.file()
    raise_all(([] if file is None else wrong_keys(file)) + errors)
    return _joined(own) + _translated(parsed, of_others)


def _is_alias(override: Override) -> bool:
    plain = override.package is None and not (override.is_delete() or override.is_sweep_override())
    return plain and has_alias(override.key_or_group, _value(override))


def _translated(parsed: Sequence[tuple[str, Override]], of_others: Sequence[Override]) -> list[str]:
    """Overrides in the vocabulary of `dhp.config.vocabulary`, translated to ours; each is named on stderr."""
    if not of_others:
        return []
    plain = [override for _, override in parsed if not (override.is_delete() or override.is_sweep_override())]
    values, notices = translated({override.key_or_group: _value(override) for override in plain})
    say(notices)
    own = {override.key_or_group: _value(override) for override in plain if override not in of_others}
    changed = {key: value for key, value in values.items() if key not in own or value != own[key]}
    return [f"++{key}={_hydra_literal(value)}" for key, value in changed.items()]


def _value(override: Override) -> Any:
    value = override.value()
    return value.text if isinstance(value, QuotedString) else value


def wrong_flags(arguments: Sequence[str], known: Collection[str]) -> list[ConfigError]:
    """An error for each flag `--key` that is none of Hydra's: other trainers' command lines have settings so."""
    errors = []
    for argument, following in zip(arguments, [*arguments[1:], "-"]):
        flag, _, value = argument.partition("=")
        # Hydra's flag of this name has no value; LLaVA's names a template.
        versioned = flag == "--version" and bool(value or not following.startswith("-"))
        if not flag.startswith("--") or (any(one.startswith(flag) for one in known) and not versioned):
            continue
        key = flag[2:].replace("-", "_")
        hint = f"write {key}={value or 'VALUE'}" if find_key(key) else str(unknown_key(key)).partition("; ")[2]
        errors.append(ConfigError(f"{flag} is no flag: settings are key=value; {hint}"))
    return errors


def _checked(argument: str, override: Override, source: ConfigSource) -> str | _Entry:
    name = override.key_or_group
    is_hydras = name == "hydra" or name.startswith(("hydra.", "hydra/"))
    is_choice = source.has_group(name) and not isinstance(override.value(), dict)
    if is_choice and not is_hydras:
        _check_choice(name, override.value(), source)
        if not argument.startswith(("+", "~")) and not source.composes(name):
            return f"+{argument}"
    if is_hydras or override.package is not None or is_choice:
        return argument
    key = find_key(name)
    if key is None and names_here(name):
        raise ConfigError(
            f"{name} can be set to one value only; to sweep or unset it, use {', '.join(names_here(name))}"
        )
    if key is None:
        raise unknown_key(name)
    value = override.value()
    if key.is_section and isinstance(value, dict):
        raise_all(unknown_keys(value, name))
    in_entry = ANY_NAME in key.path
    if override.is_delete():
        return argument if in_entry or key.is_section else f"++{name}={_hydra_literal(key.default)}"
    if in_entry and not override.is_sweep_override():
        return _merged_entry(key, override)
    return f"++{argument.lstrip('+')}"


def _check_choice(group: str, value: Any, source: ConfigSource) -> None:
    """`group=value` takes one of the configurations in a folder. Raises ConfigError, with all of them, for another."""
    choices = source.choices(group)
    if isinstance(value, str) and value.removesuffix(".yaml") not in choices:
        suggestion = did_you_mean([nearest(value, choices)])
        raise ConfigError(f"{group}={value} does not exist; choose from {', '.join(choices)}{suggestion}")


def _merged_entry(key: Key, override: Override) -> _Entry:
    section, _, below = key.path.partition(f".{ANY_NAME}")
    name = override.key_or_group.removeprefix(f"{section}.").removesuffix(below)
    path = (name, *(below[1:].split(".") if below else ()))
    return _Entry(section, path, override.get_value_element_as_str())


def _joined(overrides: Sequence[str | _Entry]) -> list[str]:
    """Overrides as Hydra takes them. Entries of one section are one override: a sweep would keep the last
    of several for the same section alone."""
    texts: list[str] = []
    section, place, tree = "", 0, dict[str, Any]()
    for one in overrides:
        if isinstance(one, str):
            section = "" if section and section in one else section  # what is set later stays later
            texts.append(one)
            continue
        if one.section != section or not _put(tree, one):
            section, place, tree = one.section, len(texts), {}
            _put(tree, one)
            texts.append("")
        texts[place] = f"++{section}={_braces(tree)}"
    return texts


def _put(tree: dict[str, Any], entry: _Entry) -> bool:
    """Whether the entry has a place in the tree, where it is then: a value that is written whole has none inside."""
    *names, last = entry.path
    for name in names:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return False
    if isinstance(tree.get(last), dict):
        return False
    tree[last] = entry.value
    return True


def _braces(tree: Any) -> str:
    if isinstance(tree, str):
        return tree
    return "{" + ",".join(f"{name}:{_braces(inner)}" for name, inner in tree.items()) + "}"


def _parse(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{argument!r} is not an override ({reason}); write key=value, and quote a value with special "
            "characters twice: 'key=\"a, b\"'"
        ) from error


def is_swept(argument: str) -> bool:
    """Whether the override has several values, one for each job. Raises ConfigError for what is none."""
    return _parse(argument).is_sweep_override()


def _hydra_literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"'{value}'" if isinstance(value, str) else str(value).replace("'", "")
