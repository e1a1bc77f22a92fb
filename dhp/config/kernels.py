"""Checks a part's number format, attention_backend, kernels and compile."""

from collections.abc import Mapping
from types import MappingProxyType

from dhp.base.errors import ConfigError
from dhp.config.nearest import did_you_mean, nearest
from dhp.config.ranges import require_choice
from dhp.config.schema import PartConfig

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
