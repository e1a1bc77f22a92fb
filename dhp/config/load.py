"""A configuration read in-process: YAML files and overrides in, a typed `Config` out, and back to YAML."""

from collections.abc import Sequence

from hydra import compose, initialize
from omegaconf import DictConfig, OmegaConf

from dhp.base.errors import ConfigError
from dhp.config.overrides import checked_overrides
from dhp.config.schema import Config
from dhp.config.search_path import ENTRY, ConfigSource
from dhp.config.translate import translated_errors


def compose_config(config_name: str | None, config_path: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration that `--config-name=… --config-path=… overrides…` means, not yet resolved.

    None as the name gives the schema's defaults. Raises ConfigError for an unknown name, directory or key
    and for a value of the wrong type.
    """
    source = ConfigSource.find(config_name, config_path)
    source.register()
    arguments = checked_overrides(overrides, source)
    with translated_errors(), initialize(None, version_base="1.3"):
        return to_config(compose(ENTRY, arguments))


def to_config(composed: DictConfig) -> Config:
    """Hydra's composed configuration as plain dataclasses, interpolations replaced. Raises ConfigError."""
    with translated_errors():
        config = OmegaConf.to_object(composed)
    if not isinstance(config, Config):
        raise ConfigError(f"the composed configuration is a {type(config).__name__}, not one of dhp's schema")
    return config


def to_yaml(config: Config) -> str:
    """The configuration as YAML text that `compose_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
