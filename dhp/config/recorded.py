"""Reads the config.yaml of a run, which is untrusted: plain values, and no addresses to join or folders to write to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from dhp.config.command_line import compose_config, to_config
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.errors import translated_errors
from dhp.config.parts import split_share
from dhp.config.schema import Config
from dhp.core.addresses import is_remote
from dhp.core.errors import ConfigError

# What the command line alone decides: where is written, and whether something is fetched. None is needed to read a run.
_OF_THE_CALLER = {
    **{"training.checkpoint_dir": "null", "data.cache_dir": "null", "data.cache_features": "null"},
    **{"data.cache_features_gib": "null", "memory.cache_dir": "null", "data.allow_http": "false"},
}
_ADDRESS = "cluster.address"
_HERE = ("local", "auto")
_PLUGINS = "plugins"


def compose_recorded(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a run's config.yaml, with `overrides` of the command line, which alone say what is written
    where and whether http addresses are fetched.

    Raises ConfigError for anything but plain values, and for the address of a cluster and for plugins that the command
    line does not name: a server at that address may run commands here, and a module's code is run as it is imported.
    """
    values = plain_values(file)
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    cluster = values.get("cluster")
    address = cluster.get("address", _HERE[0]) if isinstance(cluster, Mapping) else _HERE[0]
    if address not in _HERE and _ADDRESS not in given:
        raise ConfigError(
            f"{file} says {_ADDRESS}={address}, and who answers there may run commands here. If you know that cluster, "
            f"add {_ADDRESS}={address}; else add {_ADDRESS}=local"
        )
    plugins = values.get(_PLUGINS)
    if plugins and _PLUGINS not in given:
        named = f"{_PLUGINS}=[{','.join(map(str, plugins))}]" if isinstance(plugins, list) else f"{_PLUGINS}=[NAME]"
        raise ConfigError(
            f"{file} names modules whose code would run here, {_PLUGINS}={plugins}. If you know them, add {named}"
        )
    own = [f"{key}={value}" for key, value in _OF_THE_CALLER.items() if key not in given]
    return compose_config(file.stem, str(file.parent), [*own, *overrides])


def require_named_addresses(data: DataConfig, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise ConfigError for a dataset of these names that a record puts behind an address which the command line does
    not name: its author could make this machine ask any address that it can reach."""
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    for name, _ in map(split_share, names):
        entry = data.data_registry.get(name, DatasetEntry())
        for field, path in (("annotation_path", entry.annotation_path), ("data_path", entry.data_path)):
            key = f"data.data_registry.{name}.{field}"
            if is_remote(path) and key not in given:
                raise ConfigError(
                    f"{key}={path}: an address that a run's record names is not asked by itself. If you know it, add "
                    f"{key}={path}"
                )


def read_recorded(file: Path) -> Config:
    """The configuration in a run's config.yaml, to be looked at: nothing is to be written or joined as it says. Raises
    ConfigError for anything but plain values of the schema."""
    values = plain_values(file)
    with translated_errors():
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(values)))
        assert isinstance(merged, DictConfig)
        return to_config(merged)


def plain_values(file: Path) -> Mapping[Any, Any]:
    """The file's contents. Raises ConfigError for interpolations, which may name the reader's environment, and for
    other files and parts of Hydra that it asks for."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        texts = list(_texts(values, set()))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({' '.join(str(error).split())}). Name a FILE.yaml") from error
    wrong = next((text for text in texts if "${" in text), None)
    if wrong is None and isinstance(values, Mapping):
        wrong = next((key for key in ("defaults", "hydra") if key in values), None)
    if wrong is not None or not isinstance(values, Mapping):
        raise ConfigError(
            f"{file} is not the plain record that a run writes: it has {wrong or 'no keys'}. Name a FILE.yaml of your "
            "own for layout and data"
        )
    return values


def _texts(values: Any, seen: set[int]) -> Iterator[str]:
    """Every text, keys included. Raises ValueError for one value in several places (YAML's aliases), which may be in
    itself, or in exponentially many places; a run writes none."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, (dict, list)):
        if id(values) in seen:
            raise ValueError("one value stands in several places")
        seen.add(id(values))
        for one in [*values, *values.values()] if isinstance(values, dict) else values:
            yield from _texts(one, seen)
