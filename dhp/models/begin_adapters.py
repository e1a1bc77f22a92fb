"""Adapters in peft's files that a run begins with."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dhp.core.errors import ConfigError
from dhp.core.files import fingerprint
from dhp.core.parameters import ADAPTER, AdapterSettings, is_adapter, is_inside, plain_name
from dhp.models.base_files import find_directory
from dhp.models.lora import adapted_modules, add_adapters, find_targets, pattern_value, target_of
from dhp.models.pretrained import weight_files
from dhp.models.types import Part

FILE, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."  # peft's
_PIECES = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")  # ends of names in the file
# Settings of peft's by which an adapter is something else than W + scale × B A, or the matrices are no longer the
# model's.
_OTHERS = (
    "modules_to_save", "layer_replication", "trainable_token_indices", "alora_invocation_tokens", "use_qalora",
    "lora_bias", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config",
)  # fmt: skip
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")  # init_lora_weights that leave matrices alone


@dataclass(frozen=True)
class SavedAdapters:
    """An adapter's directory. settings: its adapter_config.json. shapes: by the name that a weight of it has here."""

    folder: Path
    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that it adapts."""
        return tuple(dict.fromkeys(name.partition(".lora_")[0] for name in self.shapes))


def saved_name(name: str) -> str:
    """The name of an adapter's weight, or of one trained beside it, in peft's file."""
    name = name if is_adapter(name) else plain_name(name)
    for piece in ("lora_A", "lora_B"):
        name = name.replace(f".{piece}.{ADAPTER}.weight", f".{piece}.weight")
    return PREFIX + name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")


def read_adapters(folder: Path, key: str) -> SavedAdapters:
    """Read what an adapter's directory says of itself. key: of the configuration, which names it. Raises ConfigError
    for what is no adapter that a run can begin with."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / FILE, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{key}={folder} is no directory of adapters with {CONFIG} and {FILE} ({error}). Of a run of dhp's, "
            f"`python -m dhp export RUN {folder} --adapter` writes one"
        ) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise ConfigError(f"{key}={folder}: {CONFIG} is not of LoRA's adapters. There are no others")
    others = [f"{one}={settings[one]!r:.60}" for one in _OTHERS if settings.get(one)]
    others += [] if settings.get("bias") in (None, "none") else [f"bias={settings['bias']}"]
    first = settings.get("init_lora_weights")
    others += [] if first in _PLAIN_BEGINNINGS else [f"init_lora_weights={first}"]
    strange = [name for name in shapes if not name.startswith(PREFIX) or not name.endswith(_PIECES)]
    if others or strange:
        raise ConfigError(
            f"{key}={folder} has more than low-rank adapters beside the model's matrices "
            f"({', '.join(others + strange[:2])}). Merge it into the model, by peft's merge_and_unload or `dhp export` "
            "without --adapter, and begin from that model"
        )
    return SavedAdapters(folder, settings, {_name_here(name): shape for name, shape in shapes.items()})


def check_begin(
    model: nn.Module, parts: Mapping[str, Part], adapters: Mapping[str, AdapterSettings], begin: Mapping[str, str],
    model_name: str,
) -> None:  # fmt: skip
    """Compare adapters that parts begin with, directories by part, with those that the configuration asks for. model:
    whole, gets adapters without values. Raises ConfigError with both values."""
    for part, folder in begin.items():
        key = f"{part}.lora.begin_from"
        saved = read_adapters(Path(folder), key)
        _check_base(saved, key, model_name)
        of_part = [name for name in saved.modules if is_inside(name, parts[part].modules)]
        rest = [name for name in saved.modules if name not in of_part]
        also = [other for other, where in begin.items() if other != part and where == folder]
        lost = [name for name in rest if not any(is_inside(name, parts[other].modules) for other in also)]
        if lost:
            raise ConfigError(
                f"{key}={folder} has adapters of {lost[0]} too ({len(lost)} modules), which is none of {part}'s: "
                f"set begin_from={folder} and the same rank in the lora section of the part that has it, or they "
                "would be lost"
            )
        with torch.device("meta"):
            add_adapters(model, find_targets(model, parts[part], adapters[part]), adapters[part], seed=0)
        wanted = {name: it for name, it in adapted_modules(model) if is_inside(name, parts[part].modules)}
        if set(wanted) != set(of_part):
            targets = f"{part}.lora.targets"
            raise ConfigError(
                f"{targets}={list(adapters[part].targets)} selects {len(wanted)} matrices, and {key}={folder} has "
                f"adapters of {len(of_part)}: {_difference(wanted, of_part)}. Set {targets} to those"
            )
        _check_sizes(saved, wanted, adapters[part], part)


def _check_base(saved: SavedAdapters, key: str, model_name: str) -> None:
    """Both models are one by what their files hold; where one of them is not here, by the last piece of its name."""
    named = str(saved.settings.get("base_model_name_or_path") or model_name)
    one, other = find_directory(named), find_directory(model_name)
    if one is None or other is None:
        alike = Path(named).name == Path(model_name).name
    else:
        alike = named == model_name or fingerprint(weight_files(one)) == fingerprint(weight_files(other))
    if alike:
        return
    raise ConfigError(
        f"{key}={saved.folder} was trained beside {named}, and the model is {model_name}. Set model_name to that; or, "
        f"where they are one model, base_model_name_or_path in {CONFIG} to {model_name}"
    )


def _check_sizes(saved: SavedAdapters, layers: Mapping[str, Any], asked: AdapterSettings, part: str) -> None:
    settings, key = saved.settings, f"{part}.lora"
    alphas = settings.get("alpha_pattern") or {}
    for name, layer in layers.items():
        shapes = {f"{name}.{own}": tuple(one.shape) for own, one in layer.named_parameters() if own.startswith("lora_")}
        rank = saved.shapes.get(f"{name}.lora_A.{ADAPTER}.weight", (0,))[0] // getattr(layer, "num_experts", 1)
        alpha = float(pattern_value(alphas, target_of(name, layer), settings.get("lora_alpha", 8)))
        pairs = {"rank": (asked.rank, rank), "alpha": (asked.alpha, alpha)}
        pairs |= {"dora": (asked.dora, bool(settings.get("use_dora")))}
        pairs |= {"rslora": (asked.rslora, bool(settings.get("use_rslora")))}
        for field, (here, there) in pairs.items():
            if here != there:
                raise ConfigError(
                    f"{key}.{field}={here}, and the adapter of {name} in {key}.begin_from={saved.folder} has {there}. "
                    f"Set {key}.{field}={there}"
                )
        unlike = next((own for own, shape in shapes.items() if saved.shapes.get(own) != shape), None)
        if unlike is not None:
            raise ConfigError(
                f"{key}.begin_from={saved.folder} has {unlike} in the shape {saved.shapes.get(unlike)}, and it has "
                f"{shapes[unlike]} here: the adapter is of another model, or its file is not whole"
            )


def weight_reader(folder: Path) -> Callable[[str], Tensor]:
    """A function that returns an adapter's weight by the name that it has here."""

    def read(name: str) -> Tensor:
        with safe_open(folder / FILE, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(saved_name(name))
            return found

    return read


def _name_here(name: str) -> str:
    name = name.removeprefix(PREFIX)
    for piece in ("lora_A", "lora_B"):
        name = name.replace(f".{piece}.weight", f".{piece}.{ADAPTER}.weight")
    return name.replace(".lora_magnitude_vector", f".lora_magnitude_vector.{ADAPTER}.weight")


def _difference(wanted: Collection[str], there: Collection[str]) -> str:
    lacking, more = set(wanted) - set(there), set(there) - set(wanted)
    words = [f"it lacks {min(lacking)}"] if lacking else []
    return " and ".join(words + ([f"it has {min(more)}"] if more else []))
