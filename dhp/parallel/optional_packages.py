"""Optional packages that make some of dhp faster: whether installed, and whether usable."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

FLASH_ATTENTION, BITSANDBYTES, LIGER, COMPILE = "flash-attn", "bitsandbytes", "liger-kernel", "torch.compile"
LOGGERS = ("wandb", "mlflow", "swanlab")
FLASH_ATTENTION_FROM, FLASH_ATTENTION_UP_TO = (2, 7), (3, 0)  # the signatures that the adapter knows
TURING = (7, 5)  # and of bitsandbytes
AMPERE = (8, 0)  # compute capability from which flash-attn's kernels run
VOLTA = (7, 0)  # and triton's
COMPILERS = ("g++", "c++", "clang++")  # of which torch.compile takes the first for CPUs

_USES = {
    FLASH_ATTENTION: "attention by its kernels: vision/text.attention_backend=flash_attention_2",
    BITSANDBYTES: "frozen matrices in four bits beside adapters: vision/text.lora.quantization=nf4",
    LIGER: "nothing here: dhp has fused norms and gates of its own, and a loss that never makes full logits",
    COMPILE: "fewer and larger kernels in each layer: vision/text.compile=true",
    **{logger: f"a logger of runs: training.loggers=[{logger}]" for logger in LOGGERS},
}


@dataclass(frozen=True)
class Extra:
    """An optional package. version: None where it is not installed. obstacle: why it cannot be used; None: it can.

    use: what it is good for.
    """

    name: str
    version: str | None
    obstacle: str | None
    use: str

    def __str__(self) -> str:
        if self.version is None:
            return f"not found ({self.use})"
        return f"{self.version}, {'usable' if self.obstacle is None else f'not usable: {self.obstacle}'} ({self.use})"


def find_extras() -> tuple[Extra, ...]:
    """All optional packages, as they are on this machine. None of them is imported."""
    found = (
        (FLASH_ATTENTION, _flash_attention()),
        (BITSANDBYTES, _bitsandbytes()),
        (LIGER, _liger()),
        (COMPILE, _compile()),
    )
    found += tuple((logger, _logger(logger)) for logger in LOGGERS)
    return tuple(Extra(name, *state, _USES[name]) for name, state in found)


def find_extra(name: str) -> Extra:
    """The optional package of that name."""
    return next(extra for extra in find_extras() if extra.name == name)


def flash_attention_package() -> tuple[str | None, str | None]:
    """Version of flash-attn, and what is wrong with the package on whatever device; no GPU is touched."""
    installed = _installed(FLASH_ATTENTION, "flash_attn")
    if installed is None:
        return None, "flash-attn is not installed"
    if not FLASH_ATTENTION_FROM <= _numbers(installed) < FLASH_ATTENTION_UP_TO:
        wanted, below = (".".join(map(str, bound)) for bound in (FLASH_ATTENTION_FROM, FLASH_ATTENTION_UP_TO))
        return installed, f"flash-attn {installed} is here, and its functions are known from {wanted} on, below {below}"
    return installed, None


def _flash_attention() -> tuple[str | None, str | None]:
    installed, obstacle = flash_attention_package()
    return installed, obstacle or _without_gpu(AMPERE)


def _bitsandbytes() -> tuple[str | None, str | None]:
    installed = _installed(BITSANDBYTES, "bitsandbytes")
    return installed, "bitsandbytes is not installed" if installed is None else _without_gpu(TURING)


def _liger() -> tuple[str | None, str | None]:
    installed = _installed(LIGER, "liger_kernel")
    return installed, "liger-kernel is not installed" if installed is None else _without_gpu(VOLTA)


def _compile() -> tuple[str | None, str | None]:
    if torch.cuda.is_available():
        return torch.__version__, _without_gpu(VOLTA) or ("triton is not installed" if _missing("triton") else None)
    if any(map(shutil.which, COMPILERS)):
        return torch.__version__, None
    return torch.__version__, f"there is no C++ compiler ({', '.join(COMPILERS)}), which it needs on a CPU"


def _logger(package: str) -> tuple[str | None, str | None]:
    installed = _installed(package, package)
    return installed, f"{package} is not installed" if installed is None else None


def _without_gpu(capability: tuple[int, int]) -> str | None:
    """Why kernels from `capability` on cannot run here; None: they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    own = torch.cuda.get_device_capability()
    if own < capability:
        found, wanted = (".".join(map(str, numbers)) for numbers in (own, capability))
        return f"the GPU has compute capability {found}, its kernels need {wanted}"
    return None


def _missing(module: str) -> bool:
    return find_spec(module) is None


def _installed(package: str, module: str) -> str | None:
    """The version; None where the module is not there."""
    if _missing(module):
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # a folder of the module's name, or a build without metadata
        return "unknown version"


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version; (0, 0) where it has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
