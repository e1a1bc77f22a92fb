"""The schema of a run: keys, types, defaults, meanings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from dhp.config.data import DataConfig
from dhp.config.roles import BESIDE, FOLLOWS, SEARCHED, key
from dhp.config.training import TrainingConfig


@dataclass
class LoraConfig:
    """Low-rank adapters of a part's matrices, made by peft. They alone are trained of the part, with what
    training.trainable names."""

    rank: int = 0
    """Rows and columns of an adapter's two matrices. 0: no adapters."""

    alpha: Optional[float] = None
    """What an adapter adds is multiplied by alpha / rank. Null: twice the rank."""

    dropout: float = 0.0
    """Share of what enters an adapter that is left out: others in each step, the same ones in every layout."""

    targets: list[str] = field(default_factory=list)
    """Matrices that get one, by patterns as in training.trainable: q_proj or "layers.1?". Those of experts by patterns
    with that piece, as experts.down_proj, with replicas, sequence ranks and stages alone. Empty: all linear ones of the
    part's layers, without routers of experts."""

    dora: bool = False
    """true: train the norms of the matrices' rows too (DoRA)."""

    begin_from: Optional[str] = None
    """A directory of adapters, of another run (`python -m dhp export RUN DIR --adapter`) or of peft's, whose values
    they begin with; the optimizer is new. Rank, alpha, targets and model are those of the directory, or it is refused.
    A run that is resumed goes on from its checkpoint. Null: they begin as no change of the model."""

    rslora: bool = key(False, advanced=True)
    """true: alpha / √rank in the place of alpha / rank (rank-stabilized LoRA)."""

    quantization: Optional[str] = None
    """nf4: the linear matrices of the part's layers that are not trained are kept in four bits (QLoRA), by the optional
    package bitsandbytes. With cluster.device=cuda, tensor=1, expert=1, zero_stage=0, recompute=none or full. Null: in
    dtype."""


@dataclass
class PartConfig:
    """One part of the model (vision, audio or text): its weights, its actors and how they share the work."""

    model_name: str = ""
    """Hugging Face directory or hub id. Empty: the other part's."""

    parallelism: str = key("none", layout=FOLLOWS)
    """How the actors share the work. vision: none | data | sequence | tensor | pipeline | deepspeed; audio: the same
    without tensor; text: none | data | sequence | tensor | pipeline | deepspeed | autotp. deepspeed:
    replicas, as data, with a zero_stage from 1 on by DeepSpeed; autotp: as tensor, with DeepSpeed's layers."""

    num_actors: int = key(1, layout=FOLLOWS)
    """Actors of this part (processes, one device each); num_actors = pipeline × data × ulysses × ring × tensor. audio
    has 0 unless it is set: the run has no audio part then, and reads no sound."""

    pipeline: Optional[int] = key(None, layout=SEARCHED)
    """Stages that the layers are cut into, each with actors of its own that are split by the other degrees. Of text,
    the first has the embedding, the last norm, head and loss; of vision, the first embeds patches, the last merges
    them; of audio, the first has the convolutions, the last the projector. Null: what the others leave with
    parallelism=pipeline, else 1."""

    cuts: Optional[list[int]] = key(None, layout=FOLLOWS)
    """Layers at which the stages after the first begin, in order: [10, 19] cuts 28 layers into 0-9, 10-18, 19-27. With
    virtual_stages, pipeline × virtual_stages - 1 of them, in the order in which a micro-batch comes by. Null: as
    text.partition says."""

    partition: Optional[str] = None
    """How layers are cut into stages: exact (the shortest step, by operations and the schedule simulated; with
    recompute=auto and memory.budget_gib, together with what is recomputed) | bmp (OmniBal's balanced model partition,
    by forward) | parameters (embedding and head counted), or one that a module of plugins registers. Of text, without
    cuts; a tower's stages follow it too: with cluster.chain=true, and cuts in neither part, both parts are cut together
    as one chain, else each by itself; an audio tower's have like numbers of layers. Null: exact; like
    numbers of layers with virtual_stages; parameters with training.schedule=sequential, under which every cut takes as
    long."""

    partition_radius: int = key(1, advanced=True)
    """Of partition=bmp: each cut lies at most so many layers beside that of equal forward times. text only."""

    partition_candidates: int = key(15, advanced=True)
    """Of partition=bmp: so many cuts, those of the least VAR(fwd_time) + SUM(comm), are tried. text only."""

    partition_trials: bool = False
    """Of partition=exact and bmp: take steps of the run before it begins. Five give the seconds of each layer, which
    are then cut by these; with bmp each candidate takes three as well, and the fastest is taken. text only."""

    virtual_stages: int = key(1, layout=FOLLOWS)
    """Runs of layers that each stage holds, for training.schedule=interleaved: stage 0 of 2 has the first and the third
    quarter with 2 of them. text only."""

    data: Optional[int] = key(None, layout=SEARCHED)
    """Replicas that work on different samples. Null: what the other degrees leave with parallelism=data, else 1."""

    ulysses: Optional[int] = key(None, layout=SEARCHED)
    """Actors that split a sequence by all-to-all on heads: of vision a large image's, of text a row's; of audio, that
    share out the clips. Null: what the others leave with sequence, else 1."""

    ring: Optional[int] = key(None, layout=SEARCHED)
    """Actors that split a sequence by passing keys and values around a ring, outside Ulysses: for more actors than
    heads, or over several nodes. Not of audio. Null: 1."""

    sequence_groups: str = "auto"
    """Over how many of the ulysses × ring actors of a row a sample is divided: auto (long ones over all, short ones
    stay on one of them, or with the ulysses actors of one ring place, as far as all get even work) | one (every sample
    over all). Losses and gradients are the same. text only: an encoder's items stay whole as far as that is even."""

    tensor: Optional[int] = key(None, layout=SEARCHED)
    """Actors that split each weight matrix. Null: what the others leave with parallelism=tensor or autotp, else 1."""

    expert: int = key(1, layout=SEARCHED)
    """Of the replicas (data), so many neighbours share out a decoder's experts: each holds 1/expert of them, and tokens
    go to the replica that has theirs, from each actor of a row those it has. Divides data and the experts; with tensor
    each of its actors has slices of these experts. text only; a zero_stage is by zero_engine=fsdp."""

    expert_load: float = key(1.0, resume=BESIDE, advanced=True)
    """For plans: rows of the busiest actor of `expert` over the mean one's, as an earlier run has them in its report
    and in metrics.jsonl, expert_load.busiest. A layer's exchange and its experts take that much longer."""

    dtype: str = "float32"
    """Number format in which the part computes: bfloat16 | float32 | float64. With bfloat16 the optimizer keeps the
    weights in float32, and gradients are summed in float32 over micro-batches and actors, as far as state_bytes says
    nothing else."""

    attention_backend: str = "auto"
    """Attention kernel: sdpa, PyTorch's own, with flash attention in them | auto, the same, by flash-attn-4 or flash
    attention 3 where one is installed and proved on the device | flash_attention_2, the package flash-attn (2.7 or
    newer, installed on each node; GPUs from Ampere on, bfloat16)."""

    kernels: str = "auto"
    """Who computes what a layer does elementwise: auto, the fastest that is proved on the device at start to give what
    the library's own code gives | by kind, as norm:written,gate:plain. Norms: torch (PyTorch's, on GPUs) | compiled |
    written | plain; rotary positions: compiled | written | plain; gates of MLPs: compiled | plain; widths of gated
    MLPs (mlp): padded | plain. compiled: by torch.compile, on GPUs; written: operation by operation, in few passes;
    padded: with zeros up to a multiple of 64, by itself on GPUs where rows are no multiple of 16 bytes; plain: the
    library's own code."""

    compile: bool = False
    """true: each layer's forward goes through torch.compile, which fuses its small operations; attention stays as it
    is. With recompute=none, tensor=1, expert=1 and zero_stage=0, and without memory.accounting."""

    recompute: Optional[str] = None
    """What backward recomputes instead of keeping it: none | full (each layer whole) | auto (as little as
    memory.budget_gib allows) | layers, as 0-3,7 | what which layers recompute, as mlp:0-15,all:16-31, or one for all of
    them, as light. light: norms, rotary positions, activation functions, which costs next to nothing; mlp: also the
    products before the activation function; linear: all but attention; all: the layer; offload: the layer, with what
    enters it in host memory meanwhile. Null: by activation_checkpointing."""

    activation_checkpointing: bool = key(False, layout=FOLLOWS)
    """true: the same as recompute=full. Where recompute says something else, the run is refused."""

    mlp_chunks: int = 1
    """Chunks of tokens that each layer's MLP computes one after another, and again in backward, so that memory holds
    the inside of one: for long rows. With recompute=light it is as mlp, for what an MLP has inside is not kept. With
    compile=false and expert=1."""

    zero_stage: int = key(0, layout=SEARCHED)
    """ZeRO stage, what is cut over the actors that hold the same slices and experts: 0 nothing | 1 the optimizer's
    state | 2 gradients too | 3 weights too, gathered module by module."""

    zero_engine: str = key("auto", layout=SEARCHED)
    """Who does the ZeRO stage: deepspeed (stages 1 to 3 with tensor=1 and expert=1; 3 only with
    training.schedule=sequential) | fsdp (torch's FSDP2: stages 2 and 3 with any of both) | auto (fsdp where tensor or
    expert > 1, else deepspeed)."""

    sequence_sharded_norms: bool = key(False, layout=SEARCHED)
    """true: between the blocks of a layer each tensor actor holds the states of its own tokens, so that what norms and
    residuals keep is divided as well (Megatron-LM's sequence parallelism); an all-gather and a reduce-scatter take the
    place of each all-reduce. With tensor > 1, and parallelism other than autotp."""

    state_bytes: int = 18
    """Bytes that a trained parameter costs with dtype=bfloat16, its gradient included: 18, the weight, and in float32 a
    master weight, the sum of gradients and AdamW's two moments | 16, with sums in bfloat16 | 12, with moments in
    bfloat16, rounded stochastically, and in the place of the master weight the 16 bits that the weight lacks of it |
    10, as 12 with sums in bfloat16. Those below 18 with zero_stage=0 or zero_engine=fsdp."""

    host_moments: bool = False
    """true: AdamW's two moments of each parameter lie in host memory, and some rows at a time come to the device while
    others are updated. With zero_stage=0 or zero_engine=fsdp, and dtype=bfloat16 or float32."""

    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class MemoryConfig:
    """What activations (what forward keeps for backward) may take."""

    budget_gib: Optional[float] = None
    """Activations on one device, of the ranks of both parts where they share it, GiB (2³⁰ bytes): its memory less
    weights, gradients and optimizer state, which a dry run (training.dry_run=true) counts. On GPUs all that forward and
    backward allocate, but gradients. Null: recompute=auto reads from its first steps what GPUs have left, less a tenth
    of their memory; on CPUs it must be set."""

    cache_dir: Optional[str] = None
    """Directory where runs keep what they measured, for later runs of the same shape: recompute=auto its costs,
    plans that measure this machine its rates. Null: costs lie in run_dir, rates in data.cache_dir."""

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
    between hosts) | cuda_ipc (no copy; all actors on one GPU) | nccl (from GPU to GPU, also between hosts; by gloo on
    CPUs; not yet run on GPUs) | auto (on GPUs cuda_ipc where all actors share one, nccl where each rank of a group has
    one to itself and training.vision_batch is 1; else shared_memory where all actors are on one host, else
    object_store)."""

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

    check_collectives: bool = key(False, advanced=True)
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
