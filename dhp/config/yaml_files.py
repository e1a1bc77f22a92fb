"""YAML files as Hydra reads them: a run's own may be written in the vocabulary of `dhp.config.aliases`.

Hydra's own reader of files is not among its public names; what is imported of it here is pinned with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dhp.base.errors import ConfigError
from dhp.config.aliases import has_alias, translated
from dhp.config.inert import HYDRA, check_inert
from dhp.config.secrets import guard_environment
from dhp.config.translate import unknown_keys


class YamlFiles(FileConfigSource):
    """A directory of YAML files, given to Hydra as `dhp:///directory`. Files of groups are left as they are."""

    said: set[str] = set()  # Hydra reads a file several times; a notice is printed once

    @staticmethod
    def scheme() -> str:
        return "dhp"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        values = OmegaConf.to_container(result.config, resolve=False)
        check_inert(self._normalize_file_name(config_path), values, result.header.get("package"))
        if "/" not in config_path and isinstance(result.config, DictConfig):
            result.config, notices = _in_our_words(result.config, self._normalize_file_name(config_path))
            say([notice for notice in notices if notice not in self.said])
            self.said.update(notices)
        return result

    @classmethod
    def register(cls) -> None:
        """Make Hydra know the scheme, and begin a new configuration."""
        guard_environment()
        cls.said.clear()
        Plugins.instance()  # Hydra's own schemes first
        SourcesRegistry.instance().register(cls)


def wrong_keys(file: Path) -> list[ConfigError]:
    """An error for each key of a run's own YAML that neither vocabulary has. None for a file that cannot be read as a
    configuration: Hydra will say why."""
    try:
        text = file.read_text(encoding="utf-8")
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return []
    if not isinstance(values, dict) or "@package" in text.partition("\n")[0]:
        return []
    flat = {key: value for key, value in _flat(values).items() if key.partition(".")[0] not in ("defaults", HYDRA)}
    own = {key: value for key, value in flat.items() if not has_alias(key, value)}
    return unknown_keys(_nested(own), where=f"in {file.name}: ")


def say(notices: list[str]) -> None:
    """One line each on stderr."""
    for notice in notices:
        print(notice, file=sys.stderr, flush=True)


def _in_our_words(config: DictConfig, file: str) -> tuple[DictConfig, list[str]]:
    """The translated configuration and its notices; unchanged without notices when no key is of the other
    vocabulary."""
    flat = _flat(OmegaConf.to_container(config, resolve=False))
    if not any(has_alias(key, value) for key, value in flat.items()):
        return config, []
    try:
        values, notices = translated(flat)
    except ConfigError as error:
        raise ConfigError(f"in {file}: {error}") from error
    return OmegaConf.create(_nested(values)), [f"in {file}: {notice}" for notice in notices]


def _flat(config: Any) -> dict[str, Any]:
    """Keys of sections as `section.key`, one level deep: anything deeper is a value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        section = value if isinstance(value, dict) and value else None
        flat |= {f"{name}.{key}": below for key, below in section.items()} if section else {str(name): value}
    return flat


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        if key:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    return nested
