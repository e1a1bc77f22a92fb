"""Modules of the user's own that register a family with transformers, or something with dhp: importable ones, which a
configuration or a command names. What lies in a model's directory, in a checkpoint or in data is never run."""

from __future__ import annotations

import os
import pkgutil
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType

from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import ConfigError, ModelError
from dhp.core.plugins import registered
from dhp.core.text import one_line

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def import_plugins(names: Sequence[str], said: str = "plugins") -> None:
    """Import modules, each of which registers a vision-language model with transformers, or adds to a table of dhp.
    said: the key or the option that names them.

    Raises ConfigError for what is no module's name, ModelError for one that cannot be imported, and for one that
    registers nothing.
    """
    for name in names:
        if _DOTTED.fullmatch(name) is None or name.endswith(".py"):
            raise ConfigError(
                f"{said}={name} is no name of a Python module. Write it as in an import, as my_family for "
                "my_family.py, and start with PYTHONPATH=FOLDER, its folder"
            )
        if not _registers(_imported(name, said)):
            raise ModelError(
                f"{said}={name}: the module registers no vision-language model and nothing with dhp. When it is "
                "imported it should call AutoConfig.register(model_type, Config) and "
                "AutoModelForImageTextToText.register(Config, Model), as examples/new_family/mixer_vl.py does, or add "
                "to dhp.OBJECTIVES, dhp.BALANCE_METHODS or dhp.PARTITION_METHODS"
            )


def import_on_rank(names: Sequence[str]) -> None:
    """The same in an actor, whose node may lack what the driver's has. Errors name the node."""
    import_plugins(names, f"on the node {socket.gethostname()}, plugins")


def _imported(name: str, said: str) -> ModuleType:
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no part of a command's answer
            return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ModelError(f"{said}={name}: {_not_found(error.name)}") from error
        raise ModelError(f"{said}={name}: it imports {error.name}, which is not installed here") from error
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        why = one_line(f"{type(error).__name__}: {error}")
        raise ModelError(f"{said}={name}: the module fails when it is imported ({why}). Correct it") from error


def _not_found(missing: str) -> str:
    """What to do about a module that Python does not find."""
    if Path(f"{missing.replace('.', os.sep)}.py").is_file():
        return f"{missing}.py lies in this folder, where Python does not look. Start with PYTHONPATH={os.getcwd()}"
    near = did_you_mean([nearest(missing, (module.name for module in pkgutil.iter_modules()))])
    return (
        f"there is no module {missing} here. Install it on every node, or start with PYTHONPATH=FOLDER, where it lies"
        f"{near}"
    )


def _registers(module: ModuleType) -> bool:
    """Whether something registered is the module's, or of another module of its package."""
    from transformers import AutoModelForImageTextToText

    own = {id(value) for value in vars(module).values()}
    kinds = [*AutoModelForImageTextToText._model_mapping._extra_content.values(), *registered()]
    package = module.__name__.partition(".")[0]
    return any(id(kind) in own or kind.__module__.partition(".")[0] == package for kind in kinds)
