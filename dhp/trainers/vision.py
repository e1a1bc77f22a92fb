"""The vision part on one rank: its windows in, merged embeddings out; gradients in, an optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from dhp.base.messages import Choices, DeviceInfo, PartReport, StepInfo, VisionInput
from dhp.models.registry import load_family
from dhp.models.split import load_part
from dhp.models.tower import EMBEDDINGS
from dhp.parallel.activation.checkpointing import ATTENTION as KEPT_ATTENTION
from dhp.parallel.activation.checkpointing import kept
from dhp.parallel.attention.kernels import has_varlen
from dhp.parallel.attention.shard_plan import ShardPlan, Span
from dhp.parallel.attention.sharded import (
    GATHER_TOKENS,
    Place,
    SegmentPlan,
    plan_segments,
    plan_shard,
    segment_attention,
)
from dhp.parallel.tensor.local_shards import use_local_slices
from dhp.parallel.tensor.plan import local_plan
from dhp.parallel.tensor.styles import with_fused
from dhp.trainers.moving import joined, move_with_plans, to_device
from dhp.trainers.part import Part
from dhp.trainers.settings import PartSettings

# "flash" in the name: the tower then calls once a layer with all segments instead of once per window.
ATTENTION = "flash_dhp_segments"
CPU = torch.device("cpu")


class VisionTrainer:
    """forward_step, backward_step, optimizer_step of the vision tower and projector."""

    def __init__(self, settings: PartSettings):
        self.part = Part(settings)
        self.family = load_family(settings.model_name)
        AttentionInterface.register(ATTENTION, kept(KEPT_ATTENTION, segment_attention))
        model = self._load()
        self.family.tower.use_attention(model, ATTENTION)
        self.part.adopt(model, self.family.tower.layers)
        ring, ulysses = self.part.mesh["ring"], self.part.mesh["ulysses"]
        self._place = Place(ring.get_local_rank(), ring.get_group(), ulysses.get_local_rank(), ulysses.get_group())
        self._outputs: dict[int, Tensor] = {}

    def _load(self) -> PreTrainedModel:
        part, family = self.part, self.family
        plan = with_fused(family.tower.tensor_plan, family.tower.fused)
        name, mesh = part.settings.model_name, part.mesh["tensor"]
        model = load_part(name, family.decoder.modules, part.master_dtype, mesh, plan, local_plan)
        use_local_slices(model)
        family.tower.freeze_unused(model)
        family.tower.split_heads(model, part.settings.degrees.tensor)
        return model

    def forward_step(self, micro_batch: int, work: VisionInput, hand_over: bool) -> tuple[Tensor, ...]:
        """Encode; with `hand_over`, embeddings for each text replica, [rows, hidden] each."""
        if not work.active:
            return tuple(torch.empty(0, dtype=self.part.dtype) for _ in work.rows) if hand_over else ()
        device = self.part.device
        varlen = has_varlen(device, self.part.dtype)
        plans = [plan_segments(work.window_lengths, CPU, varlen=varlen), self._plan_frames(work, varlen)]
        pixels = to_device(work.pixels, device)
        (positions,), (windows, frames) = move_with_plans((work.positions,), plans, device)
        with self.part.metered_forward(len(pixels)):
            embeddings = self.part.update.forward(
                lambda: self.family.tower.encode(self.part.model, pixels, positions, windows, frames)[EMBEDDINGS]
            )
        self._outputs[micro_batch] = embeddings
        given = embeddings.detach()[: sum(work.rows)].split(work.rows)
        return given if hand_over else ()

    def backward_step(self, micro_batch: int, work: VisionInput, *gradients: Tensor) -> None:
        """Back through the tower with the gradient of each text replica's embeddings."""
        if not work.active:
            return
        output = self._outputs.pop(micro_batch)
        given = joined([to_device(g, self.part.device) for g in gradients])
        # Rows of a dummy window get no gradient, but the rank still walks its backward: others wait for it in the
        # collectives. Gradients from elsewhere enter as a scalar, the only thing DeepSpeed's engine takes.
        surrogate = (output[: len(given)] * given).sum() + output[len(given) :].sum() * 0.0
        with self.part.metered_backward():
            self.part.update.backward(surrogate, work.last)

    def grad_norm_sq(self, info: StepInfo) -> float:
        """Squared norm of this part's whole gradient; 0 in a step without any image."""
        return self.part.measure_norm(self._active(info))

    def optimizer_step(self, info: StepInfo, *other_norms_sq: float) -> PartReport:
        """Clip by the joint norm of this part and the others, and update."""
        return self.part.finish_step(info, other_norms_sq, None, self._active(info))

    def set_recompute(self, choices: Choices) -> None:
        """What each layer recomputes from the next micro-batch on."""
        self.part.set_recompute(choices)

    def describe_device(self, measure: bool) -> DeviceInfo:
        """What this rank computes on."""
        return self.part.describe_device(measure)

    def save(self, folder: str) -> tuple[str, ...]:
        """Write this rank's share of the weights below `folder`."""
        return self.part.save(folder)

    def _active(self, info: StepInfo) -> bool:
        return info.images > 0 and info.target_tokens > 0

    def _plan_frames(self, work: VisionInput, varlen: bool) -> SegmentPlan:
        ulysses = self.part.settings.degrees.ulysses
        spans = [tuple(Span(*span) for span in shard) for shard in work.shards]
        by_ring_rank = tuple(tuple(spans[first : first + ulysses]) for first in range(0, len(spans), ulysses))
        shards = ShardPlan(work.segment_lengths, by_ring_rank)
        few = shards.without_whole_segments().count_tokens() <= GATHER_TOKENS
        return plan_shard(shards, self._place, CPU, gather=few, varlen=varlen)
