"""Examines a model's configuration: trainable parts, possible layouts."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from dhp.config.layout import PARALLELISMS, resolve_part
from dhp.config.schema import PartConfig
from dhp.core.errors import DhpError, ModelError
from dhp.core.parameters import TrainingRules
from dhp.doctor.plain_model import read_plain
from dhp.doctor.trial import SampleMaker, TrialResult, run_parts, run_whole
from dhp.models.contract.double import staying_double
from dhp.models.contract.find import small_twin
from dhp.models.contract.twin import exact_experts
from dhp.models.family import Family
from dhp.models.pretrained import name_accelerator, read_model_config
from dhp.models.registry import load_family
from dhp.plan.model_checks import check_part, check_plan

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
    except WrittenOtherwise as error:
        refused["family"] = str(error)
    except Exception as error:  # a tiny model may fail in any way, and whether it does is the question
        refused["family"] = f"its tiny model could not be trained: {type(error).__name__}: {_without(source, error)}"
    split, packed = errors[False], errors[True]
    for layout, found in (("padded rows", split), ("packing", packed)):
        if found is not None and found > EXACT:
            refused[layout] = f"loss or gradients differ from the whole model's by {found:.1e}, relative"
    if not family.processor.sees_videos:
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
        _check_names(config, twin.model, folder)
        family = load_family(folder)
        samples = SampleMaker(twin, family).samples()
        whole = exact_experts(read_plain(folder, torch.float64, "cpu", TrainingRules()))
        wanted: TrialResult = run_whole(whole, family, samples)
        results = {packing: run_parts(str(Path(folder)), family, samples, packing) for packing in (False, True)}
        replaced = sorted(f"{count} × {name} by {by}" for (name, by), count in results[True].wrapped.items())
        return {packing: found.deviation(wanted) for packing, found in results.items()}, tuple(replaced)


class WrittenOtherwise(ModelError):
    """The library writes a model under names that it does not read."""


def _check_names(config: PreTrainedConfig, model: PreTrainedModel, folder: str) -> None:
    _, found = type(model).from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    if lost := sorted(found["missing_keys"]):
        raise WrittenOtherwise(
            f"model_type {config.model_type!r}: {type(model).__name__}, which transformers takes for it, writes "
            f"weights under names that it does not read back ({len(lost)} of them, among them {lost[0]}), so that what "
            "was trained would be lost"
        )


def _without(source: str, error: Exception) -> str:
    return str(error).strip().removeprefix(f"{source}: ")
