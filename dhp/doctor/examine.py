"""Examine a model's configuration: what of it can be trained, and in which layouts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig
from transformers.utils import logging

from dhp.base.errors import ModelError
from dhp.doctor.diagnosis import EXACT, Diagnosis
from dhp.doctor.doubles import staying_double
from dhp.doctor.layouts import find_layouts
from dhp.doctor.samples import SampleMaker
from dhp.doctor.trial import Outcome, run_parts, run_whole
from dhp.models.accelerator import name_accelerator
from dhp.models.generic.twin import shrink
from dhp.models.generic.twin_model import ProbeModel, exact_experts
from dhp.models.registry import load_family


def examine(source: str) -> Diagnosis:
    """The diagnosis of the model whose config.json is in `source`; weights, tokenizer and processor are not needed.

    Raises ModelError where there is no configuration that transformers can read.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source}: no usable model configuration: {error}") from error
    name = config.model_type
    try:
        family = load_family(source)
    except ModelError as error:
        return Diagnosis(name, False, None, None, (), (), {"family": _without(source, error)})
    layouts = {part: find_layouts(part, family, source) for part in family.parts}
    refused = {layout: why for found in layouts.values() for layout, why in found.refused.items()}
    errors: dict[bool, float | None] = {False: None, True: None}
    try:
        errors = _try(config)
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
    return Diagnosis(name, trainable, split, packed, vision, text, refused, audio)


def _try(config: PreTrainedConfig) -> dict[bool, float | None]:
    """Deviations of the parts' outcome from the whole model's, by whether rows are packed."""
    logging.disable_progress_bar()
    with (
        torch.random.fork_rng(devices=[]),
        staying_double(),
        tempfile.TemporaryDirectory(prefix="dhp_doctor_") as folder,
    ):
        twin = _twin(config)
        name_accelerator()
        twin.model.save_pretrained(folder)
        family = load_family(folder)
        samples = SampleMaker(twin, family).samples()
        whole = exact_experts(
            AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, trust_remote_code=False).train()
        )
        for parameter in whole.parameters():  # some of which the library keeps in float32
            parameter.data = parameter.data.double()
        wanted: Outcome = run_whole(whole, family, samples)
        return {
            packing: run_parts(str(Path(folder)), family, samples, packing).deviation(wanted)
            for packing in (False, True)
        }


def _twin(config: PreTrainedConfig) -> ProbeModel:
    try:
        return ProbeModel(shrink(config, towers=True))
    except Exception:  # a tower whose layers cannot be cut anyhow is run with all of them
        return ProbeModel(shrink(config))


def _without(source: str, error: Exception) -> str:
    return str(error).strip().removeprefix(f"{source}: ")
