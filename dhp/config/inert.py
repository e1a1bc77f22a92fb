"""Refuses keys of a YAML file that would make Hydra start, import or write something: a file is data.

Hydra merges a file's `hydra` section into its own, which names classes to construct, files to log to and variables of
the environment. Hydra's own list of classes that it does not construct is no security boundary, by its own words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dhp.core.errors import ConfigError

HYDRA = "hydra"
_CONSTRUCTED = ("_target_", "()")  # keys by which Hydra, and logging's configuration, name what they call
_OF_A_SWEEP = ("mode", "sweep.dir", "sweep.subdir", "sweeper.params")
_ADVICE = "A YAML file is data here. Give what is Hydra's on the command line"


def check_inert(file: str, values: Any, package: str | None) -> None:
    """Raise ConfigError for what is Hydra's own in a file, but `hydra.mode`, `hydra.sweep` and `hydra.sweeper.params`,
    and for names of something to construct.

    file: as Hydra has it, relative to its directory. values: what is in it. package: from its header.
    """
    if HYDRA in file.removesuffix(".yaml").split("/"):
        raise ConfigError(f"{file} configures Hydra itself. {_ADVICE}")
    if package is not None and HYDRA in package:
        raise ConfigError(f"in {file}: `@package {package}` puts the file into Hydra's own configuration. {_ADVICE}")
    if not isinstance(values, Mapping):
        return
    for key in _keys_below(values):
        if key in _CONSTRUCTED:
            raise ConfigError(f"in {file}: {key} names something to be constructed. {_ADVICE}")
    for entry in values.get("defaults") or ():
        if HYDRA in str(entry) or any("${" in str(group) for group in (entry if isinstance(entry, Mapping) else ())):
            raise ConfigError(f"in {file}: defaults has {entry}, which may choose a part of Hydra itself. {_ADVICE}")
    for key, value in values.items():
        if str(key).partition(".")[0] == HYDRA:
            _check_section(file, value if key == HYDRA else {str(key): value})


def _check_section(file: str, section: Any) -> None:
    """Of a sweep a file may say whether, where and over what."""
    settings = [str(section)]
    if isinstance(section, Mapping):
        settings = [f"{name}.{key}" for name, own in section.items() if isinstance(own, Mapping) for key in own]
        settings += [str(name) for name, own in section.items() if not isinstance(own, Mapping)]
        sweeper = section.get("sweeper")
        swept = sweeper.get("params") if isinstance(sweeper, Mapping) else None
        settings += [f"sweeper.params.{key}" for key in swept or () if HYDRA in str(key)]
    for setting in settings:
        if setting not in _OF_A_SWEEP:
            raise ConfigError(
                f"in {file}: {HYDRA}.{setting} is Hydra's own; a file may set "
                f"{', '.join(f'{HYDRA}.{one}' for one in _OF_A_SWEEP)}. {_ADVICE}"
            )


def _keys_below(values: Any) -> Iterator[str]:
    """Every key, however deep, of what YAML can hold."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key)
            yield from _keys_below(value)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from _keys_below(value)
