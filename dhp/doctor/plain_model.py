"""Runs the plain model on samples as the trainers have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dhp.batch.collate import Collator, sounds_by_argument, whole_by_argument
from dhp.core.batch import IGNORED, ProcessorOutput
from dhp.core.parameters import TrainingRules
from dhp.data.sample.sample import Sample
from dhp.models.contract.random_rows import kinds_for, token_types
from dhp.models.family import Family


@dataclass(frozen=True)
class PlainStep:
    """loss: Σ token losses / target tokens. norm: of the gradients of all that is trained, before clipping."""

    loss: float
    norm: float


def read_plain(model_name: str, dtype: torch.dtype, device: str, rules: TrainingRules) -> PreTrainedModel:
    """The unmodified model, in training, all of it in one format. Raises OSError where it cannot be read."""
    model = (
        AutoModelForImageTextToText.from_pretrained(model_name, dtype=dtype, trust_remote_code=False).train().to(device)
    )
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the library's product in groups takes no float64
        for parameter in model.parameters():  # some of which the library keeps in float32
            parameter.data = parameter.data.double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(rules.trains(name))
    return model


def plain_gradients(
    model: PreTrainedModel, family: Family, samples: Sequence[Sample]
) -> tuple[float, dict[str, Tensor]]:
    """Σ token losses / target tokens, and gradients by name, each sample by itself; they are summed in float32 or
    more."""
    total, loss = sum(sample.target_tokens for sample in samples) or 1, 0.0
    sums: dict[str, Tensor] = {}
    for sample in samples:
        share = _loss_sum(sample, family, model, str(model.device)) / total
        if share.requires_grad:
            share.backward()
        _collect(model, sums)
        loss += float(share.detach())
    return loss, sums


def plain_step(
    model: PreTrainedModel, family: Family, samples: Sequence[Sample], optimizer: torch.optim.Optimizer | None = None
) -> PlainStep:
    """optimizer: takes the step; None: none does."""
    loss, sums = plain_gradients(model, family, samples)
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].to(parameter.dtype) if name in sums else None
        optimizer.step()
        optimizer.zero_grad()
    norms = [gradient.double().norm() for gradient in sums.values()]
    return PlainStep(loss, float(torch.stack(norms).norm()) if norms else 0.0)


def _collect(model: PreTrainedModel, sums: dict[str, Tensor]) -> None:
    """Add what a sample's backward has left, and take it away."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            own = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
            sums[name] = own if name not in sums else sums[name] + own
            parameter.grad = None


def _loss_sum(sample: Sample, family: Family, model: Any, device: str) -> Tensor:
    inputs = {name: tensor.to(device) for name, tensor in model_inputs(sample, family, model).items()}
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    labels = torch.from_numpy(sample.labels)[1:].to(device)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="sum")


def model_inputs(sample: Sample, family: Family, model: PreTrainedModel) -> dict[str, Tensor]:
    """A sample as the arguments of the plain model; with videos also its positions, which the installed library may
    have otherwise than the model's makers (`dhp.models.processor.Processor.published_positions`)."""
    inputs = {"input_ids": torch.from_numpy(sample.input_ids)[None]}
    kinds = torch.from_numpy(sample.mm_token_type_ids)[None]
    kinds = token_types(family.config, kinds, torch.from_numpy(sample.labels)[None])
    if sample.pixels and isinstance(sample.grids[0], ProcessorOutput):
        inputs |= {"attention_mask": torch.ones_like(kinds), **_whole_pictures(sample, model.dtype)}
    elif sample.pixels:
        inputs |= _pictures(sample, model.dtype)
        inputs["mm_token_type_ids"] = kinds
    if family.processor.published_positions and any(seconds is not None for seconds in sample.video_seconds):
        inputs["position_ids"] = Collator(family, 0, packing=False).padded((sample,))["position_ids"]
    if sample.clips:
        inputs |= {"attention_mask": torch.ones_like(kinds), **sound_inputs(sample, model.dtype)}
    return family.processor.plain_inputs(inputs) | kinds_for(type(model).forward, kinds)


def _whole_pictures(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """Pictures as arguments of one call, as their image processor would give them."""
    shown = zip(sample.grids, map(torch.from_numpy, sample.pixels), strict=True)
    return whole_by_argument([one for one in shown if isinstance(one[0], ProcessorOutput)], dtype)


def _pictures(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """Images and videos as the plain model's own arguments."""
    found = {}
    for kind, still in (("image", True), ("video", False)):
        numbers = [n for n, seconds in enumerate(sample.video_seconds) if (seconds is None) == still]
        if numbers:
            name = "pixel_values" if still else "pixel_values_videos"
            found[name] = torch.cat([torch.from_numpy(sample.pixels[n]) for n in numbers]).to(dtype)
            found[f"{kind}_grid_thw"] = torch.tensor([sample.grids[n] for n in numbers])
    moving = [seconds for seconds in sample.video_seconds if seconds is not None]
    return found | ({"second_per_grid_ts": torch.tensor(moving)} if moving else {})


def sound_inputs(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """A sample's clips as the plain model's own arguments."""
    found = sounds_by_argument((sample,))
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in found.items()}
