"""The structured configuration of a run: every key, its type, its default, and below each its meaning and unit.

OmegaConf checks types and key names against these classes; what a value must satisfy beyond its type is
checked in `dhp.config.resolve`. The string under a field is its documentation: `docs/configuration.md` is
made from it.
"""

from dataclasses import dataclass, field
from typing import Optional

from dhp.config.part import PartConfig as PartConfig


@dataclass
class TrainingConfig:
    """The objective, the optimizer and the length of the run."""

    batch_size: int = 8
    """Samples a step over all replicas; batch_size = text.data × micro_batch_size × micro-batches a step. With
    data.balance=isf or balanced it gives the rows of a step, and samples vary: 4 may give steps of 2, 2, 4, 4."""

    micro_batch_size: int = 1
    """Samples that one text replica holds in one forward pass."""

    schedule: str = "sequential"
    """Order of a step's micro-batches: sequential (one after the other) | vision_ahead (vision encodes the next one
    while text works on this one; one more micro-batch of vision activations in memory) | gpipe (all forward, then all
    back; all activations in memory) | 1f1b (a stage goes forward once for each stage after it, then in turn forward and
    back; with one text stage the same as vision_ahead) | interleaved (1f1b over text.virtual_stages runs of layers a
    stage, which wait less for one another; micro-batches a multiple of text.pipeline). All give the same gradients."""

    learning_rate: float = 1e-3
    """Peak step size of AdamW, for all that is trained."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two decay rates, of the mean and of the mean square of the gradients; each in [0, 1)."""

    eps: float = 1e-8
    """AdamW's term added to the denominator."""

    weight_decay: float = 0.01
    """AdamW's decoupled decay of every parameter: each step takes learning_rate × weight_decay of it away."""

    num_epochs: int = 1
    """Passes over the data (epochs); max_steps, where set, beats it."""

    max_steps: Optional[int] = None
    """Optimizer steps of the run. Null: as many as num_epochs make."""

    warmup_ratio: float = 0.0
    """Fraction of all steps over which the learning rate rises from 0; rounded up to whole steps."""

    warmup_steps: Optional[int] = None
    """Steps over which the learning rate rises from 0; beats warmup_ratio. Null: by warmup_ratio."""

    lr_scheduler_type: str = "constant"
    """Learning rate after the warm-up: constant | linear (down to 0 at the end) | cosine (half a wave down to 0)."""

    max_grad_norm: Optional[float] = None
    """Largest global gradient norm, over all stages; larger gradients are scaled to it. Null or 0: no clipping."""

    log_interval: int = 1
    """Steps between two printed lines; metrics.jsonl has every step all the same."""

    trace: bool = False
    """Write trace.json in run_dir: what every rank did when (forward, backward, transfer, collective, wait, data,
    optimizer), for https://ui.perfetto.dev or chrome://tracing. Costs little time, and some 100 KB a step and rank."""

    dry_run: bool = False
    """Check everything, print layout and memory by the model's shape, and end: no weights, GPUs, actors or run_dir."""

    checkpoint_dir: Optional[str] = None
    """Directory of the checkpoints. Null: `checkpoints` in run_dir."""

    save_steps: Optional[int] = None
    """Optimizer steps between two checkpoints; there is one at the end in any case. Null: only that one."""

    resume: str = "never"
    """Where the run begins: never (at step 1) | auto (after the newest complete checkpoint in checkpoint_dir, else at
    step 1; run_dir may hold the run that stopped) | PATH of a checkpoint or of a run: its newest one."""


@dataclass
class MemoryConfig:
    """What activations (what forward keeps for backward) may take."""

    budget_gib: Optional[float] = None
    """Activations on one device, of the ranks of both parts where they share it, GiB (2³⁰ bytes): its memory less
    weights, gradients and optimizer state, which a dry run (training.dry_run=true) counts. On GPUs all that forward and
    backward allocate, but gradients. To be set for recompute=auto."""

    cache_dir: Optional[str] = None
    """Directory where recompute=auto keeps what it measured, for later runs of the same shape. Null: run_dir."""

    accounting: bool = False
    """Measure activations in every run (activation_bytes in metrics.jsonl), not only with recompute=auto. On CPU this
    takes some time."""


@dataclass
class DatasetEntry:
    """Where one dataset lies, and how it is read."""

    annotation_path: str = ""
    """A .json file (a list of samples), a .jsonl file (a sample a line), a .parquet file, a WebDataset .tar shard; or a
    folder of .parquet or .tar files, or one that Hugging Face's `Dataset.save_to_disk` wrote."""

    data_path: str = ""
    """Directory that the paths of images and videos start from; none may leave it. Empty: no such files."""

    format: str = "auto"
    """How conversations are written: llava | sharegpt | openai | auto (told by the first samples)."""

    weight: float = 1.0
    """How often an epoch shows each sample, on average: 2 is twice, 0.5 each time another half."""


@dataclass
class LimitsConfig:
    """How much a row may hold where data.balance makes packs; a sample beyond it has a row of its own."""

    text: Optional[int] = None
    """Tokens, those of images included (Q_t of ISF). Null: training.micro_batch_size × the mean sample's."""

    vision: Optional[int] = None
    """Tokens of images and videos (Q_v); with balanced the mean of a step's rows. Null: as text, with isf twice that,
    since images go to any vision rank and it is text that must be even."""

    full_text: Optional[int] = None
    """isf: tokens from which on a row is kept (Q'_t). Null: text less 1/32 of it, 128 at most."""

    full_vision: Optional[int] = None
    """isf: image tokens from which on a row is kept (Q'_v). Null: vision less 1/32 of it."""


@dataclass
class DataConfig:
    """Which samples are read, and how."""

    datasets: list[str] = field(default_factory=list)
    """Names from data_registry, read as one dataset in this order. `name%50`: the same random half in each epoch."""

    data_registry: dict[str, DatasetEntry] = field(default_factory=dict)
    """Known datasets, by a name of your choice."""

    min_pixels: Optional[int] = None
    """Smallest area of an image, pixels; smaller ones are enlarged. Null: the model's own setting."""

    max_pixels: Optional[int] = None
    """Largest area of an image, pixels; larger ones are reduced. Null: the model's own setting."""

    packing: bool = True
    """Lay the samples of a micro-batch one behind another in one row, without padding, each seeing itself only. False:
    a row a sample, padded to the longest."""

    balance: str = "random"
    """Which samples share a row and which rows a step, so that devices do not wait for one another: random |
    length_group (samples of like length in a row) | device_group (on the devices of a step), all three of
    training.micro_batch_size samples a row; isf (iterative sampling and filtering: packs of constant vision and text) |
    balanced (packs of constant text, steps of constant vision), of so many samples in the mean. All but random need
    every sample's length, measured once from file headers and kept in cache_dir."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)

    locality_slack: float = 0.01
    """Images are encoded on the device, or else the node, of the text replica that needs them, as far as the busiest
    vision replica gets no more than this fraction of work beyond the most even way. 0: only where evenness costs
    nothing."""

    balance_window: Optional[int] = None
    """Samples of a random order that are balanced together, each window measured while the one before it is trained on:
    for datasets too large to be measured before the first step; needs training.max_steps. Null: an epoch."""

    cache_dir: Optional[str] = None
    """Directory of measured lengths, for all runs. Null: dhp in $XDG_CACHE_HOME or ~/.cache."""

    num_workers: int = 0
    """Processes that read, decode and preprocess, each a step at a time. 0: the dataset actor does it. The run says how
    many would keep up when training waits for data."""

    prefetch: Optional[int] = None
    """Steps that are read ahead of the one submitted last. Null: one for each worker."""

    shuffle: bool = True
    """New order of the samples in each epoch, by seed. False: the annotation file's order."""

    max_tokens: Optional[int] = None
    """Longest sample, tokens with those of its images; a longer one is defective (on_bad_sample). Null: any length."""

    video_fps: float = 2.0
    """Frames a second that are taken of a video; at least 4 of each, where it has as many."""

    video_max_frames: int = 768
    """Most frames that are taken of a video, spread evenly."""

    video_max_pixels: Optional[int] = None
    """Largest area of a video's frame, pixels; larger ones are reduced. Null: as max_pixels."""

    allow_http: bool = False
    """Fetch images and videos whose path is an http or https address, each time they are needed. False: refused."""

    on_bad_sample: str = "error"
    """What a missing or broken image or a malformed sample does: error (the run ends) | skip (named and counted)."""


@dataclass
class ClusterConfig:
    """The Ray cluster that the actors run on."""

    address: str = "local"
    """local (a Ray of this run's own; in a submitted Ray job, the job's cluster) | auto (the running cluster) |
    ray://host:port | host:port."""

    collocate: bool = True
    """Vision and text actors share devices, the stages of a pipeline one after another: with 4 vision actors and
    text.pipeline=2 of 2 actors each, the first two share with text stage 0. false gives each actor one of its own."""

    transport: str = "auto"
    """How tensors go between stages: shared_memory (one copy; all actors on one host) | object_store (Ray's, also
    between hosts) | nixl (straight from memory to memory, between hosts too, over RDMA where there is any; `pip install
    nixl` on every node; not yet run with GPUs) | cuda_ipc (no copy; all actors on one GPU; not yet run on one) | auto
    (shared_memory where all actors are on one host, else object_store)."""

    device: str = "auto"
    """Device of the actors: auto (CUDA where Ray sees a GPU, else CPU) | cpu | cuda."""

    start_timeout_s: float = 300.0
    """Longest wait for the cluster's resources and for the actors to be ready, seconds. The parts get longer by what
    their weights take at 100 MB/s, of a resumed run the checkpoint too (72B: 24 minutes)."""

    step_timeout_s: float = 1800.0
    """A step without any progress for this long has failed, seconds."""

    threads_per_actor: Optional[int] = None
    """CPU threads of one actor's PyTorch. Null: a node's cores divided by its actors of the larger part
    (parts take turns); the smallest such number of all nodes."""


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

    tiny_assets: Optional[str] = None
    """Directory in which the tiny model and dataset are made when absent. Null: nothing is made."""

    vision: PartConfig = field(default_factory=PartConfig)
    audio: PartConfig = field(default_factory=lambda: PartConfig(num_actors=0))
    text: PartConfig = field(default_factory=PartConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
