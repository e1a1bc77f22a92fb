"""The structured configuration of a run: every key, its type, its default, and below each its meaning and unit.

OmegaConf checks types and key names against these classes; what a value must satisfy beyond its type is
checked in `dhp.config.resolve`. The string under a field is its documentation: `docs/reference/configuration.md` is
made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from dhp.config.data import DataConfig
from dhp.config.part import PartConfig
from dhp.config.training import TrainingConfig


@dataclass
class MemoryConfig:
    """What activations (what forward keeps for backward) may take."""

    budget_gib: Optional[float] = None
    """Activations on one device, of the ranks of both parts where they share it, GiB (2³⁰ bytes): its memory less
    weights, gradients and optimizer state, which a dry run (training.dry_run=true) counts. On GPUs all that forward and
    backward allocate, but gradients. Null: recompute=auto reads from its first steps what GPUs have left, less a tenth
    of their memory; on CPUs it must be set."""

    cache_dir: Optional[str] = None
    """Directory where runs keep what they measured, for later runs of the same shape: recompute=auto its costs, and
    with it or accounting the seconds of each part, by which text.partition cuts. Null: costs lie in run_dir, and
    seconds are not kept."""

    accounting: bool = False
    """Measure activations in every run (activation_bytes in metrics.jsonl), not only with recompute=auto. On CPU this
    takes some time."""


@dataclass
class ClusterConfig:
    """The Ray cluster that the actors run on."""

    address: str = "local"
    """local (a Ray of this run's own; in a submitted Ray job, the job's cluster) | auto (the running cluster) |
    ray://host:port | host:port."""

    collocate: bool = True
    """Vision and text actors share devices, the stages of a pipeline one after another: with 4 vision actors and
    text.pipeline=2 of 2 actors each, the first two share with text stage 0. false gives each actor one of its own."""

    chain: bool = False
    """true: one chain of stages over the tower and the decoder. The decoder's first stage shares the devices of the
    tower's last one, so that these hold the tower's last and the decoder's first layers: with vision.pipeline=2 and
    text.pipeline=3, vision is on devices 0 and 1, text on 1, 2 and 3. Stages of both parts have as many actors.
    Without vision.cuts and text.cuts both parts are cut together, as text.partition says."""

    devices: Optional[int] = None
    """Devices that layout=auto plans for. Null: all GPUs of this machine or of the cluster at `address`; on CPUs its
    cores, by threads_per_actor where it is set."""

    transport: str = "auto"
    """How tensors go between stages: shared_memory (one copy; all actors on one host) | object_store (Ray's, also
    between hosts) | cuda_ipc (no copy; all actors on one GPU; not yet run on one) | auto (shared_memory where all
    actors are on one host, else object_store)."""

    device: str = "auto"
    """Device of the actors: auto (CUDA where Ray sees a GPU, else CPU) | cpu | cuda."""

    start_timeout_s: float = 300.0
    """Longest wait for the cluster's resources and for the actors to be ready, seconds. The parts get longer by what
    their weights take at 100 MB/s, of a resumed run the checkpoint too (72B: 24 minutes)."""

    step_timeout_s: float = 1800.0
    """A step without any progress for this long has failed, seconds."""

    collective_timeout_s: Optional[float] = None
    """The longest that a rank may wait inside one collective for others to enter it, seconds: then the run fails, and
    the message names those that did not. What a rank computes between collectives is not limited by it, but its peers
    wait for that: raise it where one may compile, or read, for longer than the others. Not beyond step_timeout_s. While
    the parts are loaded their own limit holds (start_timeout_s). Null: 600, or step_timeout_s where that is shorter."""

    check_collectives: bool = False
    """Ranks agree on each collective (operation, shapes, type, the layer that it is about) before it begins, so that
    one that differs between ranks ends the run with its name. Slow: a round over the network for each. For layouts that
    stand still."""

    threads_per_actor: Optional[int] = None
    """CPU threads of one actor's PyTorch. Null: a node's cores divided by its actors of the larger part
    (parts take turns); the smallest such number of all nodes. No actor takes more than its node has cores."""


@dataclass
class Config:
    """A run: the parts of a model, a training recipe, data, and the cluster to run on."""

    name: str = "run"
    """The run's name; part of the default run_dir."""

    run_dir: str = "runs/${name}-${now:%Y%m%d-%H%M%S}"
    """Directory of everything the run leaves behind; created. `${now:...}` is the start's local time."""

    overwrite: bool = False
    """Replace the run that run_dir already holds, instead of refusing."""

    seed: int = 0
    """Seed of the data order and of every random number in training; non-negative."""

    layout: str = "given"
    """given (as the parts' degrees say) | auto (degrees, ZeRO, recompute, training.schedule and cluster.collocate that
    are not set are planned at the start, as `python -m dhp plan` would; one with its default counts as set on the
    command line alone, and so does training.micro_batch_size) | free (as auto, and those that files set are planned
    too: degrees, ZeRO and recompute that the command line sets stay). parallelism and num_actors follow. A resumed run
    keeps the layout that it had."""

    plugins: list[str] = field(default_factory=list)
    """Python modules of your own that register a model family with transformers, or add to dhp.OBJECTIVES,
    dhp.BALANCE_METHODS or dhp.PARTITION_METHODS, by their names as in an import. Each must be importable here and on
    every node: installed, or in a folder of PYTHONPATH. Nothing that lies in a model's directory or in a checkpoint is
    run, and what a run recorded, evaluate, generate and plan --from import only if the command names it; a
    configuration that you start from is trusted. Empty: none."""

    tiny_assets: Optional[str] = None
    """Directory in which the tiny model and dataset are made when absent. Null: nothing is made."""

    stages: dict[str, StageEntry] = field(default_factory=dict)
    """Training stages by a name of your choice, run one after another, each from the weights of the one before it, in a
    directory of its own below run_dir. The same command goes on where it stopped. Empty: the run is one."""

    vision: PartConfig = field(default_factory=PartConfig)
    audio: PartConfig = field(default_factory=lambda: PartConfig(num_actors=0))
    text: PartConfig = field(default_factory=PartConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class StageEntry:
    """One of several training stages."""

    recipe: Optional[str] = None
    """Settings to begin with: a file of configs/stage. Null: the one of the stage's own name, where there is one."""

    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from them, by section, as {training: {max_steps: 40}}."""

    rope_theta: Optional[float] = None
    """Base of the decoder's rotary positions from this stage on. Null: as the model has it."""

    max_positions: Optional[int] = None
    """Longest row that the decoder knows from this stage on, in positions. Null: as the model has it."""
