"""Translates errors of Hydra and OmegaConf into the user's terms: which key, which value, what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from dhp.config.keys import Key, find_key, known_paths, type_words
from dhp.config.suggestions import did_you_mean, nearest_key
from dhp.config.vocabulary import foreign_hint, mistyped_hint
from dhp.core.errors import ConfigError


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise ConfigError in place of whatever Hydra or OmegaConf raises within."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error) from error
    except YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error


def unknown_key(path: str, where: str = "") -> ConfigError:
    """The error for a dotted key that the schema does not have: what another trainer's key is called here, else the
    nearest one that it has."""
    ours = did_you_mean(nearest_key(path, known_paths(path)))
    hint = foreign_hint(path) or ours or mistyped_hint(path) or _keys_beside(path)
    return ConfigError(f"{where}{path} is not a key{hint}")


def unknown_keys(values: Mapping[Any, Any], section: str = "", where: str = "") -> list[ConfigError]:
    """An error for each key of `values`, the contents of `section`, that the schema does not have."""
    errors = []
    for name, value in values.items():
        path = f"{section}.{name}" if section else str(name)
        key = find_key(path)
        if key is None:
            errors.append(unknown_key(path, where))
        elif key.is_section and isinstance(value, Mapping):
            errors += unknown_keys(value, path, where)
    return errors


def _keys_beside(path: str) -> str:
    section = path.rpartition(".")[0]
    while section and not find_key(section):
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    beside = [known for known in known_paths(path) if known.startswith(prefix) and "." not in known[len(prefix) :]]
    return f"; {section or 'the top level'} has {', '.join(known[len(prefix) :] for known in beside)}"


def _translate(error: Exception) -> ConfigError:
    cause = _innermost(error)
    if cause is None:
        message = str(error).partition("\nConfig search path:")[0]
        return ConfigError(message.strip().replace("'++", "'"))  # the prefix that dhp put before the user's key
    where, path = _where(error), cause.full_key or ""
    refusal = next((one for one in _chain(cause) if isinstance(one, ConfigError)), None)
    if refusal is not None:  # by a resolver of ours
        return ConfigError(f"{where}{path}: {refusal}")
    key = find_key(path.partition("[")[0])
    if isinstance(cause, ValidationError) and key:
        return _wrong_type(path, key, cause, where)
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and not (key or _is_hydras(path)):
        return unknown_key(path, where)
    message = f"{where}{path}: {_first_line(cause)}" if path else f"{where}{_first_line(cause)}"
    if isinstance(cause, InterpolationResolutionError):
        return ConfigError(f"{message}; check the name inside ${{...}}")
    return ConfigError(message)


def _wrong_type(path: str, key: Key, cause: ValidationError, where: str) -> ConfigError:
    given = re.search(r"Value '(.*?)' ", str(cause), re.DOTALL)
    shown = f"{path}={given[1]}" if given else path
    return ConfigError(f"{where}{shown} is of the wrong type; expected {type_words(key.type)}")


def _innermost(error: BaseException | None) -> OmegaConfBaseException | None:
    """The deepest OmegaConf error that knows its key (deeper ones are unfinished), else the deepest at all."""
    chain = [one for one in _chain(error) if isinstance(one, OmegaConfBaseException)]
    return next((found for found in reversed(chain) if found.full_key), chain[-1] if chain else None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _where(error: BaseException) -> str:
    """Which file Hydra was at, as a prefix of the message; an override is recognised by its key alone."""
    file = re.match(r"In '([^']+)'", str(error))
    return f"in {file[1].partition('@')[0]}.yaml: " if file else ""


def _is_hydras(path: str) -> bool:
    return not path or path.partition(".")[0] == "hydra"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
