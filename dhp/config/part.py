"""The section of a configuration about one part of the model: see `dhp.config.schema`."""

from dataclasses import dataclass, field
from typing import Optional


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
    """Matrices that get one, by patterns as in training.trainable: q_proj or "layers.1?". Empty: all linear ones of the
    part's layers, without routers of experts."""

    dora: bool = False
    """true: train the norms of the matrices' rows too (DoRA). With tensor=1 and zero_stage=0."""

    rslora: bool = False
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

    parallelism: str = "none"
    """How the actors share the work. vision: none | data | sequence | tensor | pipeline | deepspeed; audio: the same
    without tensor; text: none | data | sequence | tensor | pipeline | deepspeed | autotp. deepspeed:
    replicas, as data, with a zero_stage from 1 on by DeepSpeed; autotp: as tensor, with DeepSpeed's layers."""

    num_actors: int = 1
    """Actors of this part (processes, one device each); num_actors = pipeline × data × ulysses × ring × tensor. audio
    has 0 unless it is set: the run has no audio part then, and reads no sound."""

    pipeline: Optional[int] = None
    """Stages that the layers are cut into, each with actors of its own that are split by the other degrees. Of text,
    the first has the embedding, the last norm, head and loss; of vision, the first embeds patches, the last merges
    them; of audio, the first has the convolutions, the last the projector. Null: what the others leave with
    parallelism=pipeline, else 1."""

    cuts: Optional[list[int]] = None
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

    virtual_stages: int = 1
    """Runs of layers that each stage holds, for training.schedule=interleaved: stage 0 of 2 has the first and the third
    quarter with 2 of them. text only."""

    data: Optional[int] = None
    """Replicas that work on different samples. Null: what the other degrees leave with parallelism=data, else 1."""

    ulysses: Optional[int] = None
    """Actors that split a sequence by all-to-all on heads: of vision a large image's, of text a row's; of audio, that
    share out the clips. Null: what the others leave with sequence, else 1."""

    ring: Optional[int] = None
    """Actors that split a sequence by passing keys and values around a ring, outside Ulysses: for more actors than
    heads, or over several nodes. Not of audio. Null: 1."""

    sequence_groups: str = "auto"
    """Over how many of the ulysses × ring actors of a row a sample is divided: auto (long ones over all, short ones
    stay on one of them, or with the ulysses actors of one ring place, as far as all get even work) | one (every sample
    over all). Losses and gradients are the same. text only: an encoder's items stay whole as far as that is even."""

    tensor: Optional[int] = None
    """Actors that split each weight matrix. Null: what the others leave with parallelism=tensor or autotp, else 1."""

    expert: int = 1
    """Of the replicas (data), so many neighbours share out a decoder's experts: each holds 1/expert of them, and tokens
    go to the replica that has theirs. Divides data and the experts. text only, with tensor=1 and zero_stage=0."""

    dtype: str = "float32"
    """Number format in which the part computes: bfloat16 | float32 | float64. With bfloat16 the optimizer keeps the
    weights in float32, and gradients are summed in float32 over micro-batches and actors, as far as state_bytes says
    nothing else."""

    attention_backend: str = "auto"
    """Attention kernel: auto | sdpa, both PyTorch's own, with flash attention in them | flash_attention_2, the package
    flash-attn (2.7 or newer, installed on each node; GPUs from Ampere on, bfloat16)."""

    kernels: str = "auto"
    """Who computes what a layer does elementwise: auto, the fastest that is proved on the device at start to give what
    the library's own code gives | by kind, as norm:written,gate:plain. Norms: torch (PyTorch's, on GPUs) | compiled |
    written | plain; rotary positions: compiled | written | plain; gates of MLPs: compiled | plain. compiled: by
    torch.compile, on GPUs; written: operation by operation, in few passes; plain: the library's own code."""

    compile: bool = False
    """true: each layer's forward goes through torch.compile, which fuses its small operations; attention stays as it
    is. With recompute=none, tensor=1, expert=1 and zero_stage=0, and without memory.accounting."""

    recompute: Optional[str] = None
    """What backward recomputes instead of keeping it: none | full (each layer whole) | auto (as little as
    memory.budget_gib allows) | layers, as 0-3,7 | what which layers recompute, as mlp:0-15,all:16-31, or one for all of
    them, as light. light: norms, rotary positions, activation functions, which costs next to nothing; mlp: also the
    products before the activation function; linear: all but attention; all: the layer; offload: the layer, with what
    enters it in host memory meanwhile. Null: by activation_checkpointing."""

    activation_checkpointing: bool = False
    """true: the same as recompute=full. Where recompute says something else, the run is refused."""

    mlp_chunks: int = 1
    """Chunks of tokens that each layer's MLP computes one after another, and again in backward, so that memory holds
    the inside of one: for long rows. With recompute=light it is as mlp, for what an MLP has inside is not kept. With
    compile=false and expert=1."""

    zero_stage: int = 0
    """ZeRO stage, what is cut over the actors that hold the same slices: 0 nothing | 1 the optimizer's state | 2
    gradients too | 3 weights too, gathered module by module."""

    zero_engine: str = "auto"
    """Who does the ZeRO stage: deepspeed (stages 1 to 3 with tensor=1; 3 only with training.schedule=sequential) | fsdp
    (torch's FSDP2: stages 2 and 3 with any tensor) | auto (fsdp where tensor > 1, else deepspeed)."""

    sequence_sharded_norms: bool = False
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
