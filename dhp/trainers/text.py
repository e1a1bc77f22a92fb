"""The text part on one rank: tokens and embeddings in, its share of the objective and their gradients out."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dhp.base.messages import Choices, DeviceInfo, PartReport, StepInfo, TextInput
from dhp.models.family import DecoderInputs
from dhp.models.registry import load_family
from dhp.models.split import load_part
from dhp.models.tower import EMBEDDINGS
from dhp.parallel.activation.checkpointing import ATTENTION as KEPT_ATTENTION
from dhp.parallel.activation.checkpointing import kept
from dhp.parallel.attention.kernels import has_varlen
from dhp.parallel.attention.sharded import packed_attention, plan_segments
from dhp.parallel.tensor.autotp import split_by_autotp
from dhp.parallel.tensor.local_shards import use_local_slices
from dhp.parallel.tensor.plan import local_plan
from dhp.parallel.tensor.styles import shared_heads_style
from dhp.trainers.moving import joined, move_with_plans, to_device
from dhp.trainers.objective import Targets, find_targets, share_of_objective
from dhp.trainers.part import Part
from dhp.trainers.settings import PartSettings

# Names that transformers has no mask functions for: no mask is built.
CPU = torch.device("cpu")
PACKED, PADDED = "dhp_packed", "dhp_padded"


class TextTrainer:
    """forward_step, backward_step, optimizer_step of the decoder."""

    def __init__(self, settings: PartSettings):
        self.part = Part(settings)
        self.family = load_family(settings.model_name)
        model = self._load()
        self.part.adopt(model, self.family.decoder.layers)
        self._flights: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._losses: list[Tensor] = []

    def _load(self) -> PreTrainedModel:
        model = self._split_by_deepspeed() if self.part.settings.autotp else self._split()
        packing = self.part.settings.packing
        name, attention = (PACKED, packed_attention) if packing else (PADDED, sdpa_attention_forward)
        AttentionInterface.register(name, kept(KEPT_ATTENTION, attention))
        self.family.decoder.use_attention(model, name)
        return model

    def _split(self) -> PreTrainedModel:
        name, family, ranks = self.part.settings.model_name, self.family, self.part.settings.degrees.tensor
        plan, shared = dict(family.decoder.tensor_plan), ranks > family.decoder.kv_heads
        if shared:
            plan |= dict.fromkeys(family.decoder.kv_projections, shared_heads_style(family.decoder.kv_heads))
        mesh = self.part.mesh["tensor"]
        model = load_part(name, family.tower.modules, self.part.master_dtype, mesh, plan, local_plan)
        use_local_slices(model)
        if shared:
            family.decoder.share_kv_heads(model, ranks)
        return model

    def _split_by_deepspeed(self) -> PreTrainedModel:
        model = load_part(self.part.settings.model_name, self.family.tower.modules, self.part.master_dtype)
        split_by_autotp(model, self.part.mesh["tensor"])
        return model

    def forward_step(self, micro_batch: int, work: TextInput, *embeddings: Tensor) -> None:
        """Run the decoder on one micro-batch; `embeddings` [rows, hidden] from each vision rank, in rank order."""
        device, dtype = self.part.device, self.part.dtype
        leaves = [to_device(rows, device).requires_grad_() for rows in embeddings]
        plans = []
        if work.lengths is not None:
            plans.append(plan_segments(work.lengths, CPU, causal=True, varlen=has_varlen(device, dtype)))
        named = work.tensors
        given = (named["input_ids"], named["position_ids"], *find_targets(named["labels"]), _image_rows(work))
        (input_ids, position_ids, *targets, image_rows), moved = move_with_plans(given, plans, device)
        images = {} if work.placement is None else {EMBEDDINGS: joined(leaves).to(dtype)}
        inputs = DecoderInputs(input_ids, position_ids, images, image_rows)
        extra = dict(zip(["segments"], moved))  # none where rows are padded

        def objective() -> Tensor:
            hidden = self.family.decoder.hidden_states(self.part.model, inputs, **extra)
            head = self.part.model.get_output_embeddings()
            return share_of_objective(head, hidden, Targets(*targets), work.target_tokens)

        with self.part.metered_forward(input_ids.numel()):
            self._flights[micro_batch] = (self.part.update.forward(objective), leaves)

    def backward_step(self, micro_batch: int, last: bool, hand_over: bool) -> tuple[Tensor, ...]:
        """Back through the decoder; gradient of each vision rank's embeddings, in rank order, with `hand_over`.

        Tensor ranks hold the same rows and so the same gradients: one of them hands over, they are not summed.
        """
        loss, leaves = self._flights.pop(micro_batch)
        with self.part.metered_backward():
            self.part.update.backward(loss, last)
        self._losses.append(loss.detach())
        return tuple(_gradient(leaf) for leaf in leaves) if hand_over else ()

    def grad_norm_sq(self, info: StepInfo) -> float:
        """Squared norm of this part's whole gradient, over its tensor ranks too."""
        return self.part.measure_norm(info.target_tokens > 0)

    def optimizer_step(self, info: StepInfo, *other_norms_sq: float) -> PartReport:
        """Clip by the joint norm of this part and the others, and update; reports this replica's share of the loss."""
        loss = float(torch.stack(self._losses).sum())
        self._losses.clear()
        return self.part.finish_step(info, other_norms_sq, loss, active=info.target_tokens > 0)

    def set_recompute(self, choices: Choices) -> None:
        """What each layer recomputes from the next micro-batch on."""
        self.part.set_recompute(choices)

    def describe_device(self, measure: bool) -> DeviceInfo:
        """What this rank computes on."""
        return self.part.describe_device(measure)

    def save(self, folder: str) -> tuple[str, ...]:
        """Write this rank's share of the weights below `folder`."""
        return self.part.save(folder)


def _image_rows(work: TextInput) -> Tensor:
    """Where each row of the embeddings, as they are received, belongs among the flattened rows × tokens."""
    if work.placement is None:
        return torch.empty(0, dtype=torch.long)
    rows = torch.empty_like(work.placement)
    rows[work.placement] = work.tensors["mm_token_type_ids"].flatten().nonzero()[:, 0]
    return rows


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
