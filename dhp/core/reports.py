"""Reports of ranks to the driver: losses, devices, kernels, layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EvaluatedShare:
    """One rank's share of an evaluated batch. loss: its share of the objective. targets: how many tokens it counts, and
    right: those of them with the highest logit. samples: these counts by sample, as `StageReport` has losses."""

    loss: float
    right: int
    targets: int
    samples: SampleSums | None = None


@dataclass(frozen=True)
class Spent:
    """Seconds of a step that a rank computed in methods of one kind, those in collectives left out. comm_s: those in
    collectives; None on GPUs, where own_s has them too."""

    own_s: float
    comm_s: float | None


@dataclass(frozen=True)
class SampleSums:
    """Sums over the samples in a rank's rows, by micro-batch, in the order of `dhp.core.batch.TextInput.samples`.

    sums: over those target tokens of each sample that this rank has: of losses, nats, or of the likeliest tokens, 1
    each. targets: how many these tokens are. tokens: in someone's own loop, (sample, place of the first token in it,
    float64 of these tokens) of each run of tokens."""

    sums: Mapping[int, tuple[float, ...]]
    targets: Mapping[int, tuple[int, ...]]
    tokens: Mapping[int, tuple[tuple[int, int, Any], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StageReport:
    """One rank's report after its optimizer step.

    loss: its share of the objective, a sum over N_global; None where the stage has no head.

    lr: the learning rate of the step, by group of parameters; empty where nothing is trained.

    memory_bytes: the most that the allocator had reserved in the step; None on a CPU.

    sent_bytes: by kind, see `dhp.core.tracing`.

    usage: of activations, where they are measured.

    notes: messages for the user, each shown once.

    short: whether a forward pass ran out of memory, and all of it was recomputed instead; no usage then.

    busy_s: seconds of the step in which it computed. The worker that runs the rank measures and adds them.

    comm_s: of these, seconds in collectives, waiting for other ranks among them; None on GPUs, which the host does not
    wait for.

    spent: of busy_s, by kind of method: forward, backward, optimizer. Added by the worker too.

    finite: whether the step's loss and gradient are. If not, no rank has updated anything.

    stage_norm: of this stage's gradient alone, the same on all its ranks; a weight that two stages hold counts in one.
    None where nothing of it is trained, or the step had no data for it. grad_norm is of all stages together.

    samples: losses of single samples, on the first tensor rank of each shard where the head is; None elsewhere, and for
    an objective in which they have no meaning.

    graphs: that torch.compile has made on this rank since it began, and how often it gave a function up.

    expert_rows: since the report before that has some, of its tokens the rows of each expert, by layer; on first tensor
    ranks, every training.log_interval steps."""

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
    comm_s: float | None = None
    spent: Mapping[str, Spent] = field(default_factory=dict)
    finite: bool = True
    stage_norm: float | None = None
    samples: SampleSums | None = None
    graphs: tuple[int, int] = (0, 0)
    expert_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint. name: its path in the checkpoint, or in a folder of it. crc32: of all its bytes."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class SavedShare:
    """What one rank has written of a checkpoint. done: false while it is being written. files: by their names in the
    folder that the rank was given. error: why it could not be written; None: it is on the disk."""

    done: bool
    files: tuple[WrittenFile, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank.

    device_id: the same for ranks that share the device. format: of the numbers that it multiplies. measured: operations
    a second, where this rank has measured them. memory_bytes: of a GPU, all of it."""

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
    that would be faster there, and what it needs."""

    kind: str
    kernel: str
    count: int = 0
    faster: str | None = None


RecomputePolicies = tuple[str, ...]  # what each layer of a stage recomputes, in order: see `dhp.config.layout`


@dataclass(frozen=True)
class LayerUsage:
    """Memory and time of one layer in the step's largest micro-batch.

    kind: layers of one kind do the same work.

    held_bytes: saved from forward to backward. replay_bytes: added by recomputing, until the layer's backward is done.

    replay_s: seconds of recomputing in the whole step; forward_s: of its forwards, 0 where layers are not timed. Both
    by the clock of `StageUsage`."""

    kind: str
    choice: str
    held_bytes: int
    replay_bytes: int
    replay_s: float
    forward_s: float = 0.0


@dataclass(frozen=True)
class StageUsage:
    """Memory of activations on one rank of a stage in one step.

    peak_bytes: the most at any moment.

    before_bytes, after_bytes: saved for backward by what comes before and after the layers.

    rows: patches or tokens of the largest micro-batch. all_rows: those of the step. forward_s, backward_s: of all of
    its micro-batches; of a CPU with one thread the seconds that it computed, which other processes do not lengthen."""

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
