"""Rules between keys of several sections, and between degrees and a model's shape, which come as plain numbers."""

from dhp.base.errors import ConfigError
from dhp.config.kernels import FLASH_ATTENTION_2, ON_GPUS, read_kernels
from dhp.config.parts import parts
from dhp.config.recompute import read_choices
from dhp.config.resolved import resolved
from dhp.config.schema import Config, DataConfig, LimitsConfig, PartConfig


def check_schedule(config: Config) -> None:
    """DeepSpeed's ZeRO stage 3 counts micro-batches by forward passes, so the backward of each must precede the next
    forward.

    Otherwise it loses gradients silently. Raises ConfigError.
    """
    schedule = config.training.schedule
    for name, part in parts(config).items():
        if part.zero_stage == 3 and part.zero_engine == "deepspeed" and schedule != "sequential":
            raise ConfigError(
                f"{name}.zero_stage=3 with {name}.zero_engine=deepspeed and training.schedule={schedule}: with two "
                "micro-batches on their way, DeepSpeed loses gradients without a word. Set "
                f"training.schedule=sequential, {name}.zero_engine=fsdp, or {name}.zero_stage=2, which keeps whole "
                "weights on each actor."
            )


def check_pipeline_schedule(config: Config) -> None:
    """Interleaved schedules are for stages with several runs of layers, and these for interleaved schedules or
    sequential ones. Raises ConfigError."""
    schedule, virtual = config.training.schedule, config.text.virtual_stages
    if schedule == "interleaved" and virtual == 1:
        raise ConfigError(
            "training.schedule=interleaved with text.virtual_stages=1: it takes a stage's runs of layers in turn, and "
            "there is one. Set text.virtual_stages to 2 or more (and text.pipeline), or training.schedule=1f1b."
        )
    if virtual > 1 and schedule not in ("interleaved", "sequential"):
        raise ConfigError(
            f"text.virtual_stages={virtual} with training.schedule={schedule}, which knows one run of layers a stage. "
            "Set training.schedule=interleaved, or text.virtual_stages=1."
        )


def check_backends(config: Config) -> None:
    """flash-attn and bitsandbytes compute on GPUs, and what compiled or quantized layers keep is not counted. Raises
    ConfigError."""
    counted = [f"{name}.recompute=auto" for name, part in parts(config).items() if part.recompute == "auto"]
    counted += ["memory.accounting=true"] if config.memory.accounting else []
    for name, part in parts(config).items():
        if part.attention_backend == FLASH_ATTENTION_2 and config.cluster.device == "cpu":
            raise ConfigError(
                f"{name}.attention_backend=flash_attention_2 with cluster.device=cpu: its kernels run on GPUs. Set "
                f"{name}.attention_backend=auto, PyTorch's own kernels, or cluster.device=cuda."
            )
        for kind, kernel in read_kernels(name, part.kernels).items():
            if kernel in ON_GPUS and config.cluster.device == "cpu":
                raise ConfigError(
                    f"{name}.kernels={part.kernels} with cluster.device=cpu: {kind}:{kernel} runs on GPUs. Set "
                    f"{name}.kernels=auto, which takes what is proved on this device, or cluster.device=cuda."
                )
        quantized = f"{name}.lora.quantization={part.lora.quantization}"
        if part.lora.quantization is not None and config.cluster.device != "cuda":
            raise ConfigError(
                f"{quantized} with cluster.device={config.cluster.device}: bitsandbytes' kernels for it are made for "
                "GPUs, and on a CPU each product would unpack its whole matrix first. Set cluster.device=cuda, or "
                f"leave {name}.lora.quantization out."
            )
        if part.lora.quantization is not None and counted:
            raise ConfigError(
                f"{quantized} with {counted[0]}: what activations take is counted by the weights that operations read, "
                f"and bitsandbytes' are packed. Leave {name}.lora.quantization out, or change {counted[0]}."
            )
        if part.compile and counted:
            raise ConfigError(
                f"{name}.compile=true with {counted[0]}: what activations take is counted call by call, in all parts, "
                f"and a compiled layer has no such calls. Set {name}.compile=false, or change {counted[0]}."
            )


def check_cuts(cuts: list[int], layers: int) -> None:
    """Cuts of `layers` decoder layers: each run of layers has one at least. Raises ConfigError."""
    bounds = [0, *cuts, layers]
    if any(after <= before for before, after in zip(bounds, bounds[1:])):
        raise ConfigError(
            f"text.cuts={list(cuts)} cannot cut the text decoder's {layers} layers: 0 < "
            f"{' < '.join(map(str, cuts))} < layers({layers}) does not hold. Give layers from 1 to {layers - 1}, each "
            "larger than the one before."
        )


def check_stages(layers: int, pipeline: int, virtual: int) -> None:
    """Every run of layers has one at least, and runs of virtual stages have as many each. Raises ConfigError."""
    runs = pipeline * virtual
    if runs > layers:
        fewer = (
            f"text.virtual_stages to {layers // pipeline} at most, or " if virtual > 1 and layers >= pipeline else ""
        )
        raise ConfigError(
            f"text.pipeline={pipeline} with text.virtual_stages={virtual} needs a layer for each run of layers, but "
            f"the text decoder has {layers}: pipeline({pipeline}) × virtual_stages({virtual}) = {runs} > "
            f"layers({layers}). Set {fewer}text.pipeline to {layers // virtual} at most."
        )
    if virtual > 1 and layers % runs:
        possible = [n for n in _divisors(layers // pipeline)] if layers % pipeline == 0 else []
        remedy = f"text.virtual_stages to one of {possible}, " if possible else ""
        raise ConfigError(
            f"text.virtual_stages={virtual} cannot interleave the text decoder's {layers} layers: layers({layers}) % "
            f"(pipeline({pipeline}) × virtual_stages({virtual}) = {runs}) = {layers % runs} != 0. Set {remedy}"
            f"text.pipeline to one of {_divisors(layers)}, or give text.cuts."
        )


def check_budget(config: Config) -> None:
    """A plan needs a budget in bytes. Raises ConfigError where a part is to have a plan and there is no budget, and no
    GPU to read it from."""
    for name, part in parts(config).items():
        if part.recompute == "auto" and config.memory.budget_gib is None and config.cluster.device == "cpu":
            raise no_budget(f"{name}.recompute")


def no_budget(key: str) -> ConfigError:
    """The error for `key`=auto on devices whose memory cannot be read."""
    return ConfigError(
        f"{key}=auto without memory.budget_gib: how much may be kept? What is left is read from GPUs alone. Set "
        "memory.budget_gib to what activations may take on one device, GiB: its memory less what a dry run "
        f"(training.dry_run=true) counts, or {key}=full"
    )


def check_balance(config: Config) -> None:
    """Requirements of balanced rows on other keys. Raises ConfigError."""
    data, method = config.data, config.data.balance
    packs = method in ("isf", "balanced")
    if packs and not data.packing:
        raise ConfigError(
            f"data.balance={method} with data.packing=false: it fills rows with samples of any length, which padding "
            "would undo. Set data.packing=true, or data.balance=length_group"
        )
    if method != "random" and not data.shuffle:
        raise ConfigError(
            f"data.balance={method} with data.shuffle=false: which samples share a step is the method's to say. Set "
            "data.shuffle=true, or data.balance=random"
        )
    if data.long_tokens is not None and method == "random":
        raise ConfigError(
            f"data.long_tokens={data.long_tokens} with data.balance=random, which knows no lengths. Set "
            "data.balance=balanced, or leave it out"
        )
    _check_limits(data.limits, method, packs)
    for key, methods in (("isf_passes", ("isf",)), ("group_window", ("length_group", "device_group"))):
        value = getattr(data, key)
        if method not in methods and value != getattr(DataConfig, key):
            raise ConfigError(f"data.{key}={value} with data.balance={method}: that is for {' and '.join(methods)}")
    if data.balance_window is not None:
        _check_window(config, data.balance_window)
        if config.training.save_epochs is not None:
            raise ConfigError(
                f"training.save_epochs={config.training.save_epochs} with data.balance_window={data.balance_window}: "
                "with which step an epoch ends is known only when it is measured. Set training.save_steps"
            )


def _check_limits(limits: LimitsConfig, method: str, packs: bool) -> None:
    for name, value in vars(limits).items():
        if value not in (None, LimitsConfig.rule) and not packs:
            raise ConfigError(f"data.limits.{name}={value} with data.balance={method}, which fills no rows to it")
        if value is not None and method != "isf" and name.startswith("full_"):
            raise ConfigError(f"data.limits.{name}={value} with data.balance={method}: only isf asks what is full")
    for name in ("text", "vision"):
        most, full = getattr(limits, name), getattr(limits, f"full_{name}")
        if most is not None and full is not None and full > most:
            raise ConfigError(f"data.limits.full_{name}={full} > data.limits.{name}={most}: no row would ever be full")


def _check_window(config: Config, window: int) -> None:
    if config.data.balance == "random":
        raise ConfigError(f"data.balance_window={window} with data.balance=random, which balances nothing")
    batch = config.training.batch_size
    if window < batch:
        raise ConfigError(
            f"data.balance_window={window} is less than a step: balance_window({window}) < "
            f"training.batch_size({batch}). The larger it is, the more even steps are; some hundred steps are enough"
        )
    if config.training.max_steps is None:
        raise ConfigError(
            f"data.balance_window={window} without training.max_steps: how many steps an epoch has is known only once "
            "all its samples are measured, and the learning rate needs the number before. Set training.max_steps"
        )


def check_layers(key: str, text: str, layers: int) -> None:
    """`text`, as in `dhp.config.recompute`, must name none but the part's `layers` layers. Raises ConfigError."""
    read_choices(text, layers, key)


def check_tower(heads: int, ulysses: int, tensor: int) -> None:
    """Tensor parallelism and Ulysses give each actor whole heads: `heads` (of the vision tower) is a multiple of both
    together. A ring needs nothing. Raises ConfigError.
    """
    if heads % tensor:
        raise ConfigError(
            f"vision.tensor={tensor} cannot split the vision tower's {heads} attention heads evenly: "
            f"heads({heads}) % tensor({tensor}) = {heads % tensor} != 0. "
            f"Set vision.tensor to one of {_divisors(heads)} and vision.num_actors to match."
        )
    left = heads // tensor
    if left % ulysses:
        each = f"{left} attention heads of each tensor actor" if tensor > 1 else f"{heads} attention heads"
        raise ConfigError(
            f"vision.ulysses={ulysses} cannot split the vision tower's {each} evenly: "
            f"heads({left}) % ulysses({ulysses}) = {left % ulysses} != 0. "
            f"Set vision.ulysses to one of {_divisors(left)} and vision.num_actors to match, or divide the sequence "
            "further by vision.ring, which needs no heads."
        )


def check_tensor(heads: int, kv_heads: int, tensor: int) -> None:
    """Tensor parallelism gives each actor whole query heads, and whole key/value heads or a share in one.

    `heads` must be a multiple of `tensor`; of `kv_heads` and `tensor` one must be a multiple of the other.
    Raises ConfigError.
    """
    possible = [n for n in _divisors(heads) if not max(kv_heads, n) % min(kv_heads, n)]
    remedy = f"Set text.tensor to one of {possible} and text.num_actors to match."
    if heads % tensor:
        raise ConfigError(
            f"text.tensor={tensor} cannot split the text decoder's {heads} attention heads evenly: "
            f"heads({heads}) % tensor({tensor}) = {heads % tensor} != 0. {remedy}"
        )
    if max(kv_heads, tensor) % min(kv_heads, tensor):
        raise ConfigError(
            f"text.tensor={tensor} neither splits nor shares the text decoder's {kv_heads} key/value heads evenly: "
            f"kv_heads({kv_heads}) % tensor({tensor}) = {kv_heads % tensor} != 0 and "
            f"tensor({tensor}) % kv_heads({kv_heads}) = {tensor % kv_heads} != 0. {remedy}"
        )


def check_experts(experts: int, text: PartConfig) -> None:
    """Sharing experts out gives each replica as many: `expert` divides `experts` (of each layer; 0: there are none) and
    the replicas. Raises ConfigError."""
    expert, data = text.expert, resolved(text.data)
    if expert == 1:
        return
    if not experts:
        raise ConfigError(f"text.expert={expert}: the text decoder has no experts to share out. Set text.expert=1.")
    if experts % expert or data % expert:
        possible = [n for n in _divisors(experts) if data % n == 0]
        near = min(possible, key=lambda n: (abs(n - expert), -n))
        raise ConfigError(
            f"text.expert={expert} cannot share out the text decoder's {experts} experts among neighbours of "
            f"text.data={data} replicas: experts({experts}) % expert({expert}) = {experts % expert} and "
            f"data({data}) % expert({expert}) = {data % expert}, and both must be 0. Set text.expert={near}, the "
            "nearest that divides both, or change text.data."
        )


def check_expert_width(width: int, tensor: int) -> None:
    """Tensor parallelism cuts the inner width of each expert. Raises ConfigError."""
    if width % tensor:
        raise ConfigError(
            f"text.tensor={tensor} cannot cut the text decoder's experts, which are {width} wide inside: "
            f"width({width}) % tensor({tensor}) = {width % tensor} != 0. Set text.tensor to one of {_divisors(width)} "
            "and text.num_actors to match, or share whole experts out with text.expert."
        )


def check_autotp(kv_heads: int, tensor: int) -> None:
    """DeepSpeed's tensor parallelism gives each actor whole key/value heads: `kv_heads` a multiple of `tensor`.

    Raises ConfigError.
    """
    if kv_heads % tensor:
        raise ConfigError(
            f"text.parallelism=autotp with text.tensor={tensor} cannot split the text decoder's {kv_heads} key/value "
            f"heads: kv_heads({kv_heads}) % tensor({tensor}) = {kv_heads % tensor} != 0, and DeepSpeed would leave "
            f"actors without any. Set text.parallelism=tensor, where actors share heads, or text.tensor to one of "
            f"{_divisors(kv_heads)} and text.num_actors to match."
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
