"""Rules between settings of several sections: which exclude each other, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dhp.config.data import DataConfig, LimitsConfig
from dhp.config.part import LoraConfig, PartConfig
from dhp.config.parts import HEARING, parts
from dhp.config.ranges import require, require_choice, require_positive
from dhp.config.schema import Config
from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import ConfigError
from dhp.core.parameters import NF4


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


def check_lora(name: str, part: PartConfig) -> None:
    """Raises ConfigError for values out of range, and for layouts in which adapters would not be exact. part: with
    degrees."""
    lora, key = part.lora, f"{name}.lora"
    require(lora.rank >= 0, f"{key}.rank", lora.rank, "rank >= 0; 0 is none")
    if not lora.rank:
        if lora != LoraConfig():
            raise ConfigError(f"{key} has settings, but {key}.rank=0: there are no adapters. Set {key}.rank, as 16")
        return
    require_positive(f"{key}.alpha", float(lora.alpha or 0.0))
    require(0.0 <= lora.dropout < 1.0, f"{key}.dropout", lora.dropout, "0 <= dropout < 1")
    if part.parallelism == "autotp":
        raise ConfigError(
            f"{key}.rank={lora.rank} with {name}.parallelism=autotp: DeepSpeed puts layers of its own in the place of "
            f"those that adapters stand beside. Set {name}.parallelism=tensor."
        )
    _check_quantization(name, part)
    if lora.dora and ((part.tensor or 1) > 1 or part.zero_stage):
        raise ConfigError(
            f"{key}.dora=true with {name}.tensor={part.tensor} and {name}.zero_stage={part.zero_stage}: it takes the "
            "norms of whole rows of a matrix, of which each actor has a part. Set "
            f"{name}.tensor=1 and {name}.zero_stage=0, or {key}.dora=false."
        )


def _check_quantization(name: str, part: PartConfig) -> None:
    """Check what matrices in four bits can be combined with. Raises ConfigError."""
    key, found = f"{name}.lora.quantization", part.lora.quantization
    if found is None:
        return
    require_choice(key, found, (NF4,))
    if name == HEARING:
        raise ConfigError(f"{key}={found}: layers of audio towers were never tested in four bits. Leave {key} out.")
    whole = "bitsandbytes rounds blocks of whole matrices, of which each actor would have a part"
    rules = {
        "tensor": (part.tensor == 1, "1", whole),
        "expert": (part.expert == 1, "1", whole),
        "zero_stage": (part.zero_stage == 0, "0", "ZeRO copies, casts and cuts weights as numbers, not as packed bits"),
        "dtype": (part.dtype != "float64", "bfloat16", "there is no way back from four bits to float64"),
        "compile": (not part.compile, "false", "bitsandbytes' products in compiled layers were never tested here"),
        "recompute": (
            part.recompute in ("none", "full"),
            "none or full",
            "what a layer keeps is chosen by kinds of products, and bitsandbytes' is none of the known ones",
        ),
        "lora.dora": (
            not part.lora.dora,
            "false",
            "its norms would be those of the weights before they were rounded",
        ),
    }
    for other, (goes, needed, why) in rules.items():
        if not goes:
            value = part.lora.dora if other == "lora.dora" else getattr(part, other)
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{key}={found} with {name}.{other}={shown}: {why}. Set {name}.{other}={needed}, or leave {key} out."
            )


FLASH_ATTENTION_2 = "flash_attention_2"
_DTYPES = ("bfloat16", "float32", "float64")
_BACKENDS = ("auto", "sdpa", FLASH_ATTENTION_2)
AUTO, PLAIN = "auto", "plain"
TORCH, COMPILED, WRITTEN = "torch", "compiled", "written"
# Kinds of elementwise work of a layer, and the kernels for it, the fastest first; and plain: the module's own
# code. torch: a kernel of PyTorch's. compiled: ours, by torch.compile. written: ours, operation by operation.
KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"norm": (TORCH, COMPILED, WRITTEN), "rotary": (COMPILED, WRITTEN), "gate": (COMPILED,)}
)
ON_GPUS = (TORCH, COMPILED)  # on CPUs PyTorch's norm is made of pieces, and compiling takes longer than it saves


def read_kernels(name: str, text: str) -> dict[str, str]:
    """The kernel of each kind of elementwise work, from `norm:written,gate:plain` or `auto`. Raises ConfigError."""
    found = dict.fromkeys(KERNELS, AUTO)
    for item in () if text == AUTO else text.split(","):
        kind, _, kernel = (word.strip() for word in item.partition(":"))
        if kind not in KERNELS or kernel not in (AUTO, PLAIN, *KERNELS[kind]):
            known = [f"{k}:{one}" for k, own in KERNELS.items() for one in (*own, PLAIN)]
            raise ConfigError(
                f"{name}.kernels={text}: {item!r} names no kernel. Give auto, or some of {', '.join(known)}, with "
                f"commas between them{did_you_mean([nearest(item.strip(), known)])}"
            )
        found[kind] = kernel
    return found


def check_formats(name: str, part: PartConfig) -> None:
    """Check the part's number format and attention backend. Raises ConfigError."""
    if part.dtype in ("bf16", "float16", "fp16"):
        raise ConfigError(
            f"{name}.dtype={part.dtype} does not exist: of the 16-bit formats there is bfloat16, whose range is that "
            f"of float32, so that no loss has to be scaled. Set {name}.dtype=bfloat16."
        )
    require_choice(f"{name}.dtype", part.dtype, _DTYPES)
    require_choice(f"{name}.attention_backend", part.attention_backend, _BACKENDS)
    read_kernels(name, part.kernels)
    if part.attention_backend == FLASH_ATTENTION_2 and part.dtype != "bfloat16":
        raise ConfigError(
            f"{name}.attention_backend=flash_attention_2 with {name}.dtype={part.dtype}: its kernels have 16-bit "
            f"formats alone. Set {name}.dtype=bfloat16, or {name}.attention_backend=auto, PyTorch's own kernels."
        )


def check_compile(name: str, part: PartConfig) -> None:
    """Check what compiled layers can be combined with, of a resolved part. Raises ConfigError."""
    if not part.compile:
        return
    others = {"recompute": part.recompute, "tensor": part.tensor, "expert": part.expert, "zero_stage": part.zero_stage}
    needed = {"recompute": "none", "tensor": 1, "expert": 1, "zero_stage": 0}
    why = {
        "recompute": "what a layer keeps is chosen call by call, and a compiled layer has no such calls",
        "tensor": "collectives between the slices of a layer are not compiled here",
        "expert": "the exchange of rows between experts is not compiled here",
        "zero_stage": "weights and gradients that come and go inside a layer are not compiled here",
    }
    for key, value in others.items():
        if value != needed[key]:
            raise ConfigError(
                f"{name}.compile=true with {name}.{key}={value}: {why[key]}. Set {name}.{key}={needed[key]}, or "
                f"{name}.compile=false."
            )
