"""Messages between processes: frozen values with named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dhp.base.geometry import ProcessorOutput
from dhp.base.routes import Route


@dataclass(frozen=True)
class Bundle:
    """Named tensors that cross an edge together."""

    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepInfo:
    """Global counts of a step, over all replicas and micro-batches.

    epoch: the one that the step begins in. done: epochs after the step, with a fraction.

    images: how many images and videos.

    tokens: of the decoder, without padding; padded_tokens: with it. target_tokens: those that have a target.

    total_weight: N of the objective, the sum of all samples' weights.

    vision_tokens: patches.

    skipped: one line for each sample left out.

    dist_ratio: DistRatio of vision's patches and of text's padded tokens over their ranks, by part.

    flops: useful operations of each part, forward, and backward as far as it is trained.

    data_s: seconds spent reading and decoding. measure_s: seconds spent on choosing its samples, which includes
    measuring their lengths.

    clips: how many clips of sound.

    cached_images: of the images and videos, those that no tower encoded, because their features were on disk.
    vision_tokens has their patches too, flops does not.

    sp_ratio: where ranks share rows, of all tokens the share that is divided over several ranks though its samples are
    no longer than a rank's even share of their row; None where none do.
    """

    step: int
    epoch: int
    done: float
    samples: int
    images: int
    tokens: int
    target_tokens: int
    total_weight: float
    vision_tokens: int
    skipped: tuple[str, ...]
    padded_tokens: int
    dist_ratio: Mapping[str, float]
    flops: Mapping[str, int]
    data_s: float
    measure_s: float
    clips: int = 0
    cached_images: int = 0
    sp_ratio: float | None = None


@dataclass(frozen=True)
class RowRun:
    """Rows of a picture's features that one rank has, from row `first` of its output on. places: of each of them
    among the picture's, int64 [rows]."""

    rank: int  # of those that share the sequence
    first: int
    places: Tensor


@dataclass(frozen=True)
class PictureRows:
    """A picture whose features are to be cached: see `dhp.base.features.Features`. runs: all of its rows."""

    key: str
    about: str
    runs: tuple[RowRun, ...]


@dataclass(frozen=True)
class UnreadPatches:
    """Patches that are still in a video's file: rows of them, int64, in the image processor's order.

    video: what the reader of the data knows it by (`dhp.data.long_video.LongVideo`).
    """

    video: Any
    rows: Tensor


@dataclass(frozen=True)
class VisionInput:
    """One shard's input of an encoder in a micro-batch; patches in tower order. Of audio, a frame is a patch.

    pixels: [patches, values]; positions: of each patch, as the tower takes them, [patches, …].

    window_lengths: patches of this shard's windows.

    segment_lengths: patches of the full-attention segments of all shards that share the sequence.

    shards: for each of these (Ulysses innermost), what it holds of the segments, in the order of its rows: (segment,
    first patch, patches).

    rows: merged rows for each text shard that gets any, in order. Rows beyond their sum come from a dummy window and
    are dropped. order: the merged rows in the order in which they are handed over, int64; None: as they come.

    forms: of its pictures, in order, where the tower takes pictures whole. calls: which of them, by number, each call
    of the tower takes; one without any takes a dummy picture. Ranks that gather weights for each call have equally many
    calls, whatever pictures they have.

    to_keep: of all shards that share the sequence, pictures whose features are to be written to disk.

    unread: where some pixels are still to be read, all of them, piece by piece; `pixels` has no columns then. Ranks
    never see that.
    """

    pixels: Tensor
    positions: Tensor
    window_lengths: tuple[int, ...]
    segment_lengths: tuple[int, ...]
    shards: tuple[tuple[tuple[int, int, int], ...], ...]
    rows: tuple[int, ...]
    order: Tensor | None = None
    forms: tuple[ProcessorOutput, ...] = ()
    calls: tuple[tuple[int, ...], ...] = ()
    to_keep: tuple[PictureRows, ...] = ()
    unread: tuple[Tensor | UnreadPatches, ...] = ()


@dataclass(frozen=True)
class TextInput:
    """One text shard's tokens in a micro-batch: a replica's rows, or a sequence rank's share of its one row.

    tensors: the model's own arguments (input_ids, position_ids, …), rows right-padded or packed into one; and the
    objective's columns, an element a token (`dhp.objectives.objective.Objective.columns`).

    lengths: tokens of each sample of the packed row, all ranks' together; None where rows are padded.

    shards: where ranks share the row, for each of them (Ulysses innermost), what it holds of the samples, in the order
    of its tokens: (sample, first token, tokens).

    placement: for each image token of the rows, in order, its row among those received from the vision shards, one
    shard after another, and then those of `cached`; None where the rows hold no image. audio_placement: the
    same of sound and the audio shards.

    total_weight: N of the step's objective, not of these rows.

    samples: tokens of each sample of the rows, in order, without padding. weights: of each of them in N.

    cached: rows of pictures whose features were on disk, by the name of the vision part's tensor.

    blocks: tokens with the same number see each other both ways, -1: none; int64, of the rows, or of all samples that
    ranks share. None where the family has no blocks.

    segment_calls: how often layers that take each sample by itself are called at least, the same on all ranks.
    """

    tensors: dict[str, Tensor]
    lengths: tuple[int, ...] | None
    placement: Tensor | None
    total_weight: float
    samples: tuple[int, ...] = ()
    audio_placement: Tensor | None = None
    cached: Mapping[str, Tensor] = field(default_factory=dict)
    shards: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    blocks: Tensor | None = None
    segment_calls: int = 0
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class EvaluatedShare:
    """One rank's share of an evaluated batch. loss: its share of the objective. targets: how many tokens it counts, and
    right: those of them with the highest logit."""

    loss: float
    right: int
    targets: int


@dataclass(frozen=True)
class StageReport:
    """One rank's report after its optimizer step.

    loss: its share of the objective, a sum over N_global; None where the stage has no head.

    lr: the learning rate of the step, by group of parameters; empty where nothing is trained.

    memory_bytes: the most that the allocator had reserved in the step; None on a CPU.

    sent_bytes: by kind, see `dhp.base.byte_counter`.

    usage: of activations, where they are measured.

    notes: messages for the user, each shown once.

    short: whether a forward pass ran out of memory, and all of it was recomputed instead; no usage then.

    busy_s: seconds of the step in which it computed. The worker that runs the rank measures and adds them.
    """

    rank: int
    loss: float | None
    grad_norm: float
    lr: Mapping[str, float]
    memory_bytes: int | None
    sent_bytes: Mapping[str, int]
    usage: StageUsage | None = None
    notes: tuple[str, ...] = ()
    short: bool = False
    busy_s: float | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank.

    device_id: the same for ranks that share the device. format: of the numbers that it multiplies. measured: operations
    a second, where this rank has measured them. memory_bytes: of a GPU, all of it.
    """

    kind: str  # cpu | cuda
    name: str
    device_id: str
    format: str
    measured: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class KernelUse:
    """The kernel that a kind of layer uses in a stage.

    kind: attention, norm, rotary, gate, loss or patches. count: of modules; 0 where none are counted. faster: a kernel
    that would be faster there, and what it needs.
    """

    kind: str
    kernel: str
    count: int = 0
    faster: str | None = None


@dataclass(frozen=True)
class StepData:
    """One step, sharded over the ranks.

    work: for each part, [micro-batch][shard]. routes: for each part whose rows go where the data say, one for each
    micro-batch.
    """

    info: StepInfo
    work: Mapping[str, tuple[tuple[Any, ...], ...]]
    routes: Mapping[str, tuple[Route, ...]]


RecomputePolicies = tuple[str, ...]  # what each layer of a stage recomputes, in order: see `dhp.config.recompute`


@dataclass(frozen=True)
class LayerUsage:
    """Memory and time of one layer in the step's largest micro-batch.

    kind: layers of one kind do the same work.

    held_bytes: saved from forward to backward. replay_bytes: added by recomputing, until the layer's backward is done.

    replay_s: seconds of recomputing in the whole step.
    """

    kind: str
    choice: str
    held_bytes: int
    replay_bytes: int
    replay_s: float


@dataclass(frozen=True)
class StageUsage:
    """Memory of activations on one rank of a stage in one step.

    peak_bytes: the most at any moment.

    before_bytes, after_bytes: saved for backward by what comes before and after the layers.

    rows: patches or tokens of the largest micro-batch. all_rows: those of the step.
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
    def choices(self) -> RecomputePolicies:
        return tuple(layer.choice for layer in self.layers)
