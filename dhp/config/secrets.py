"""Secrets that a configuration names: they would be written into config.yaml and sent to loggers with it."""

from __future__ import annotations

import re

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from dhp.core.errors import ConfigError

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_MISSING = object()


def guard_environment() -> None:
    """Make `${oc.env:NAME}` refuse variables that are secrets by their name."""
    OmegaConf.register_new_resolver("oc.env", _value_of, replace=True)


def _value_of(name: str, default: object = _MISSING) -> object:
    if _SECRET.search(name):
        raise ConfigError(
            f"${{oc.env:{name}}} is a secret by its name, and would be written into run_dir/config.yaml and sent to "
            "loggers. Leave it out: libraries read theirs from the environment themselves"
        )
    return oc.env(name) if default is _MISSING else oc.env(name, default)
