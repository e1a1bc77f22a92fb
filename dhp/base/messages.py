"""What crosses a process: frozen values, named tensors inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepInfo:
    """What everyone must know of a step: global counts over all replicas and micro-batches.

    images: and videos.
    done: epochs after the step, with a fraction. tokens: of the decoder, without padding. target_tokens: N_global of
    the objective. vision_tokens: patches. skipped: one line for each sample left out. places: tokens with padding.
    dist_ratio: of vision's patches and text's places over their ranks. flops: useful operations of each part, forward
    and backward. data_s: seconds spent reading and decoding; measure_s: on which samples the step has, lengths of
    samples among it.
    """

    step: int
    epoch: int
    done: float
    samples: int
    images: int
    tokens: int
    target_tokens: int
    vision_tokens: int
    skipped: tuple[str, ...]
    places: int
    dist_ratio: Mapping[str, float]
    flops: Mapping[str, int]
    data_s: float
    measure_s: float


@dataclass(frozen=True)
class VisionInput:
    """One vision rank's work in a micro-batch; patches in tower order.

    pixels: [patches, values]; positions: [patches, columns]. window_lengths: patches of this rank's windows.
    segment_lengths: patches of the full-attention segments of all ranks that share the sequence. shards: for each of
    these ranks (Ulysses innermost), what it holds of them, in the order of its rows: (segment, first patch, patches).
    rows: merged rows for each text replica, in order; rows beyond
    their sum come from a dummy window and are dropped. active: some rank of the part has an image.
    last: no later micro-batch of the step has one, so gradients are summed after this one's backward.
    """

    active: bool
    last: bool
    pixels: Tensor
    positions: Tensor
    window_lengths: tuple[int, ...]
    segment_lengths: tuple[int, ...]
    shards: tuple[tuple[tuple[int, int, int], ...], ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TextInput:
    """One text replica's rows in a micro-batch.

    tensors: the model's own arguments (input_ids, labels, position_ids, …), rows right-padded or packed into one.
    lengths: tokens of each sample of the packed row; None where rows are padded.
    placement: for each image token of the rows, in order, its row among the embeddings received from the vision
    ranks in rank order; None when the rows hold no image. received: rows from each vision rank.
    """

    tensors: dict[str, Tensor]
    lengths: tuple[int, ...] | None
    placement: Tensor | None
    received: tuple[int, ...]
    target_tokens: int  # N_global of the step, not of these rows


@dataclass(frozen=True)
class PartReport:
    """What one rank of a part tells after its optimizer step. loss: its share of the objective, a sum over N_global.

    memory_bytes: the most that the allocator had reserved in the step; None on a CPU. sent_bytes: by kind,
    see `dhp.base.byte_counter`. usage: where activations are measured.
    """

    rank: int
    loss: float | None
    grad_norm: float
    lr: float
    memory_bytes: int | None
    sent_bytes: Mapping[str, int]
    usage: PartUsage | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """What one rank computes on. place: the same for ranks that share it. format: of the numbers that it multiplies.
    measured: operations a second, where this rank has measured them."""

    kind: str  # cpu | cuda
    name: str
    place: str
    format: str
    measured: float | None = None


@dataclass(frozen=True)
class StepData:
    """One step, dealt out: vision[micro-batch][vision rank], text[micro-batch][text replica]."""

    info: StepInfo
    vision: tuple[tuple[VisionInput, ...], ...]
    text: tuple[tuple[TextInput, ...], ...]


Choices = tuple[str, ...]  # what each layer of a part recomputes, in order: see `dhp.config.recompute`


@dataclass(frozen=True)
class LayerUsage:
    """What one layer took in the step's largest micro-batch.

    kind: layers of one kind do the same work. held_bytes: kept from forward to backward. replay_bytes: what recomputing
    adds to that, until the layer's backward is done. replay_s: seconds of recomputing in the whole step.
    """

    kind: str
    choice: str
    held_bytes: int
    replay_bytes: int
    replay_s: float


@dataclass(frozen=True)
class PartUsage:
    """What activations took on one rank of a part in one step.

    peak_bytes: the most at any moment. before_bytes, after_bytes: kept for backward outside the layers, by what comes
    before and after them. rows: patches or tokens of the largest micro-batch, and all_rows of the step.
    """

    peak_bytes: int
    before_bytes: int
    after_bytes: int
    rows: int
    all_rows: int
    forward_s: float
    backward_s: float
    layers: tuple[LayerUsage, ...]

    @property
    def choices(self) -> Choices:
        return tuple(layer.choice for layer in self.layers)
