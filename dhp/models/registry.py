"""Registers model families by `model_type`, users' modules included."""

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
from typing import TYPE_CHECKING, Any

from dhp.core.errors import ConfigError, ModelError
from dhp.core.kinds import registered
from dhp.core.text import did_you_mean, nearest, one_line
from dhp.core.transformers_private import registered_classes
from dhp.models.pretrained import read_model_config

if TYPE_CHECKING:
    from dhp.models.family import Family

# Model type → the module of dhp.models.families that has its adapter, and its name there. Imported when asked for, as
# modeling code takes a second.
FAMILIES: dict[str, tuple[str, str]] = {
    "glm46v": ("glm4v", "glm4v"),
    "glm4v": ("glm4v", "glm4v"),
    "glm4v_moe": ("glm4v", "glm4v"),
    "kimi_k25": ("kimi_k25", "kimi_k25"),
    "llava": ("llava", "llava"),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl"),
    "qwen2_vl": ("qwen2_vl", "qwen2_vl"),
    "qwen3_omni_moe_thinker": ("qwen3_omni", "qwen3_omni"),
    "qwen3_5": ("qwen3_5", "qwen3_5"),
    "qwen3_5_moe": ("qwen3_5", "qwen3_5"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl"),
    "qwen3_vl_moe": ("qwen3_vl", "qwen3_vl_moe"),
}

# Names of rates in configurations: of dropout and drop path, of layers that are left out, of a router's noise; but for
# those of heads that are not built.
_CHANCE = re.compile("drop|jitter")
_HEADS = re.compile("classif|summary")


def load_family(model_name: str) -> Family:
    """The family of a Hugging Face directory or hub id.

    A family without an adapter of its own is run by transformers' contract (dhp/models/contract). Raises ModelError
    when there is no readable config.json, and for a family that cannot be run so."""
    config = read_model_config(model_name)
    try:
        _refuse_quantized(config)
        if config.model_type in FAMILIES and not _is_unusual(config):
            _refuse_dropout(config)
            _refuse_chance(config)
            module, name = FAMILIES[config.model_type]
            family: Family = getattr(import_module(f"dhp.models.families.{module}"), name)(config)
            return family
        from dhp.models.contract.contract import family_class
        from dhp.models.contract.find import generic

        family_class(config)  # first, as nothing helps a family without the contract
        _refuse_dropout(config)
        return generic(config, model_name)
    except ModelError as error:
        raise ModelError(f"{model_name}: {error}") from error


def _is_unusual(config: Any) -> bool:
    """A LLaVA with a tower or a choice of features that its own adapter does not know."""
    if config.model_type != "llava":
        return False
    known = config.vision_config.model_type in ("clip_vision_model", "siglip_vision_model")
    return not known or config.vision_feature_select_strategy != "default"


def _refuse_dropout(config: Any) -> None:
    """Attention here drops nothing. Raises ModelError for a model that asks for it: it would train as another one."""
    for part in (getattr(config, "vision_config", None), config.get_text_config()):
        dropout = getattr(part, "attention_dropout", 0.0)
        if dropout:
            raise ModelError(
                f"attention_dropout={dropout} of {type(part).__name__} is not supported. Set it to 0 in "
                "the model's config.json"
            )


def _refuse_quantized(config: Any) -> None:
    """Raises ModelError for weights that are numbers with scales beside them: the library computes with them as they
    are on some devices, as others on others, and exports would be named what they are not."""
    asked = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if asked:
        method = asked.get("quant_method") if isinstance(asked, dict) else asked.quant_method
        raise ModelError(
            f"quantization_config of its config.json: its weights are quantized ({method}), and real numbers are "
            "trained here. Take the publisher's model in bfloat16, or load this one with transformers, call "
            "model.dequantize() and save_pretrained(DIR), and name DIR; text.lora.quantization=nf4 rounds a frozen "
            "decoder here"
        )


def _refuse_chance(config: Any) -> None:
    """Raises ModelError for a configuration whose layers draw random numbers in training: of a family with an adapter
    of its own. Another's layers are run, and their generator looked at (`dhp.models.contract.twin`)."""
    parts = [getattr(config, name, None) for name in ("vision_config", "text_config", "audio_config")]
    for part in (one for one in parts if one is not None):
        for name, rate in vars(part).items():
            named = _CHANCE.search(name) and not _HEADS.search(name)
            if named and isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
                raise ModelError(
                    f"{name}={rate} of {type(part).__name__}: its layers would draw random numbers in training, and "
                    "what one rank drew no other can draw again, nor a layer that is recomputed. Set it to 0 in the "
                    "model's config.json"
                )


_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def import_plugins(names: Sequence[str], said: str = "plugins") -> None:
    """Import modules, each of which registers a vision-language model with transformers, or adds to a table of dhp.
    said: the key or the option that names them.

    Raises ConfigError for what is no module's name, ModelError for one that cannot be imported, and for one that
    registers nothing."""
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
    kinds = [*registered_classes(AutoModelForImageTextToText), *registered()]
    package = module.__name__.partition(".")[0]
    return any(id(kind) in own or kind.__module__.partition(".")[0] == package for kind in kinds)
