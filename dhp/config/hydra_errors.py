"""Translates errors of Hydra and OmegaConf into the schema's words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from dhp.config.keys import Key, find_key, type_words, unknown_key
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
