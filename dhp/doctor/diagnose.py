"""Examines a model's configuration: trainable parts, possible layouts."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import logging

from dhp.config.layout import PARALLELISMS, resolve_part
from dhp.config.schema import PartConfig
from dhp.core.errors import DhpError, ModelError
from dhp.core.parameters import TrainingRules
from dhp.doctor.plain_model import read_plain
from dhp.doctor.trial import SampleMaker, TrialResult, run_parts, run_whole
from dhp.models.contract.find import small_twin
from dhp.models.contract.twin import exact_experts
from dhp.models.family import Family
from dhp.models.pretrained import name_accelerator, read_model_config
from dhp.models.registry import load_family
from dhp.plan.model_checks import check_part, check_plan

Function = Callable[..., Any]
# Functions to replace, by owner. Not a mode of torch's: backward, which runs layers again, would be outside of it.
_CASTS = ((Tensor, ("to", "type", "float")),)
_TAKE_DTYPE = ((F, ("softmax",)), (torch, ("softmax", "sum")), (Tensor, ("softmax", "sum")))
_PRODUCTS = ((torch, ("matmul", "bmm")), (Tensor, ("matmul", "__matmul__")), (F, ("linear", "grid_sample")))


@contextmanager
def staying_double() -> Iterator[None]:
    """Keep float64 where a model asks for float32, as norms, softmax and rotary positions do: rounding there jumps by
    1e-7 for a difference of 1e-16, and would hide what is compared."""
    kept: list[tuple[Any, str, Function]] = []
    groups = (
        (_CASTS, _stay),
        (_TAKE_DTYPE, _without_dtype),
        (_PRODUCTS, _widened),
        (((Tensor, ("__setitem__",)),), _fitted),
    )
    try:
        for owners, change in groups:
            for owner, names in owners:
                for name in names:
                    kept.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, change(getattr(owner, name)))
        yield
    finally:
        for owner, name, function in reversed(kept):
            setattr(owner, name, function)


def _stay(cast: Function) -> Function:
    @wraps(cast)
    def run(states: Tensor, *args: Any, **named: Any) -> Any:
        single = cast.__name__ == "float" or torch.float32 in args or named.get("dtype") == torch.float32
        return states if single and states.dtype == torch.float64 else cast(states, *args, **named)

    return run


def _without_dtype(function: Function) -> Function:
    @wraps(function)
    def run(states: Any, *args: Any, **named: Any) -> Any:
        if _is(torch.float64, states) and named.get("dtype") == torch.float32:
            named.pop("dtype")
        return function(states, *args, **named)

    return run


def _widened(product: Function) -> Function:
    @wraps(product)
    def run(*args: Any, **named: Any) -> Any:
        if any(_is(torch.float64, one) for one in args):
            args = tuple(one.double() if _is(torch.float32, one) else one for one in args)
        return product(*args, **named)

    return run


def _fitted(assign: Function) -> Function:
    @wraps(assign)
    def run(states: Tensor, index: Any, value: Any) -> None:
        narrow = _is(torch.float32, states) and _is(torch.float64, value)
        assign(states, index, torch.empty_like(value, dtype=torch.float32).copy_(value) if narrow else value)

    return run


def _is(dtype: torch.dtype, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype


EXACT = 1e-9  # the largest deviation, relative, at which parts and packed rows count as equal to the whole


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one configuration.

    split_error, packed_error: the largest relative deviation of a tiny model's loss and gradients, trained in its
    parts, from the whole model's: with rows padded, and with samples packed into one row. None: it could not be run.

    vision, text, audio: layouts that each part has; audio is empty for a model without such a part. refused: why not,
    by layout. replaced: classes of modules whose forward another one replaces in packed rows, and the file that does.
    """

    family: str
    trainable: bool
    split_error: float | None
    packed_error: float | None
    vision: tuple[str, ...]
    text: tuple[str, ...]
    refused: dict[str, str]
    audio: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    def as_json(self) -> str:
        """One object on one line; of a model without an audio part, without that key."""
        fields = asdict(self)
        return json.dumps(fields if self.audio else {key: value for key, value in fields.items() if key != "audio"})

    def as_table(self) -> str:
        """Aligned lines for the terminal."""
        rows = [
            ("family", self.family),
            ("trainable", "yes" if self.trainable else "no"),
            ("in 3 parts" if self.audio else "in two parts", _deviation(self.split_error)),
            ("packed rows", _deviation(self.packed_error)),
            ("vision", ", ".join(self.vision) or "none of the layouts"),
            *([("audio", ", ".join(self.audio))] if self.audio else []),
            ("text", ", ".join(self.text) or "none of the layouts"),
            *([("replaced", "; ".join(self.replaced))] if self.replaced else []),
        ]
        lines = [f"{name:14}{value}" for name, value in rows]
        if self.refused:
            lines.append("refused")
            lines += [f"  {layout}: {why}" for layout, why in self.refused.items()]
        return "\n".join(lines)


def _deviation(error: float | None) -> str:
    if error is None:
        return "not tried"
    equal = "equal to" if error <= EXACT else "differ from"
    return f"{equal} the whole model: largest deviation of loss and gradients {error:.1e}"


ACTORS = 2  # of a layout that is tried


@dataclass(frozen=True)
class TriedLayouts:
    """Those that a part admits, and why not the others, by `part.parallelism`."""

    possible: tuple[str, ...]
    refused: dict[str, str]


def find_layouts(name: str, family: Family, source: str) -> TriedLayouts:
    """The layouts of the part ("vision" or "text")."""
    refused: dict[str, str] = {}
    for layout in PARALLELISMS[name]:
        try:
            _check(name, layout, family, source)
        except DhpError as error:
            refused[f"{name}.{layout}"] = str(error)
    return TriedLayouts(tuple(one for one in PARALLELISMS[name] if f"{name}.{one}" not in refused), refused)


def _check(name: str, layout: str, family: Family, source: str) -> None:
    actors = 1 if layout == "none" else ACTORS
    asked = PartConfig(source, layout, actors, zero_stage=1 if layout == "deepspeed" else 0)
    part = resolve_part(name, asked)
    check_part(name, part, family)
    check_plan(name, part, source, family)


def examine(source: str) -> Diagnosis:
    """The diagnosis of the model whose config.json is in `source`; weights, tokenizer and processor are not needed.

    Raises ModelError where there is no configuration that transformers can read."""
    config = read_model_config(source)
    name = config.model_type
    try:
        family = load_family(source)
    except ModelError as error:
        return Diagnosis(name, False, None, None, (), (), {"family": _without(source, error)})
    layouts = {part: find_layouts(part, family, source) for part in family.parts}
    refused = {layout: why for found in layouts.values() for layout, why in found.refused.items()}
    errors: dict[bool, float | None] = {False: None, True: None}
    replaced: tuple[str, ...] = ()
    try:
        errors, replaced = _try(config)
    except Exception as error:  # a tiny model may fail in any way, and whether it does is the question
        refused["family"] = f"its tiny model could not be trained: {type(error).__name__}: {_without(source, error)}"
    split, packed = errors[False], errors[True]
    for layout, found in (("padded rows", split), ("packing", packed)):
        if found is not None and found > EXACT:
            refused[layout] = f"loss or gradients differ from the whole model's by {found:.1e}, relative"
    if family.processor.video_token_id is None:
        refused["video"] = "the model's videos are not read here, images alone"
    if any("audio" in module for module in family.idle):
        refused["audio"] = "the model's audio tower stays as it is: it is not trained here, and no sound is read"
    trainable = split is not None and split <= EXACT
    vision, text, audio = (layouts[part].possible if part in layouts else () for part in ("vision", "text", "audio"))
    return Diagnosis(name, trainable, split, packed, vision, text, refused, audio, replaced)


def _try(config: PreTrainedConfig) -> tuple[dict[bool, float | None], tuple[str, ...]]:
    """Deviations of the parts' outcome from the whole model's, by whether rows are packed; and replaced forwards."""
    logging.disable_progress_bar()
    with (
        torch.random.fork_rng(devices=[]),
        staying_double(),
        tempfile.TemporaryDirectory(prefix="dhp_doctor_") as folder,
    ):
        twin = small_twin(config)
        name_accelerator()
        twin.model.save_pretrained(folder)
        family = load_family(folder)
        samples = SampleMaker(twin, family).samples()
        whole = exact_experts(read_plain(folder, torch.float64, "cpu", TrainingRules()))
        wanted: TrialResult = run_whole(whole, family, samples)
        results = {packing: run_parts(str(Path(folder)), family, samples, packing) for packing in (False, True)}
        replaced = sorted(f"{count} × {name} by {by}" for (name, by), count in results[True].wrapped.items())
        return {packing: found.deviation(wanted) for packing, found in results.items()}, tuple(replaced)


def _without(source: str, error: Exception) -> str:
    return str(error).strip().removeprefix(f"{source}: ")
