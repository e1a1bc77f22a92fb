"""A rank's device: name, peak speed, deterministic kernels, optional packages."""

import os
import re
import shutil
import socket
import time
from collections import deque
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from dhp.core.process import count_cores
from dhp.core.reports import DeviceInfo
from dhp.core.text import binary_size

LARGEST_ROWS = 2048  # rows of the matrices that are multiplied
LONG_ENOUGH_S, MEASURING_S = 0.005, 0.2  # one product; all of them
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for all containers of a machine, which share its CPUs


def describe_device(device: torch.device, dtype: torch.dtype, measure: bool = False) -> DeviceInfo:
    """The device of this rank, which computes in `dtype`. measure: find out the speed of a CPU."""
    own = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        tensor_cores = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        multiplies = "tfloat32" if tensor_cores else own
        return DeviceInfo("cuda", about.name, f"GPU {about.uuid}", multiplies, memory_bytes=about.total_memory)
    machine = _BOOT.read_text().strip() if _BOOT.is_file() else socket.gethostname()
    found = DeviceInfo("cpu", "cpu", f"CPUs of {machine}", own)
    return replace(found, measured=measure_speed(dtype)) if measure else found


def require_memory(nbytes: int, device: torch.device) -> None:
    """Raise torch.OutOfMemoryError where the GPU has no room for `nbytes` more of this process. Nothing is taken."""
    if device.type != "cuda":
        return
    counts = torch.cuda.memory_stats_as_nested_dict()
    cached = counts["reserved_bytes"]["all"]["current"] - counts["allocated_bytes"]["all"]["current"]
    if nbytes > cached and nbytes > cached + torch.cuda.mem_get_info()[0]:
        raise torch.OutOfMemoryError(f"the GPU has no room for the {binary_size(nbytes)} that backward takes")


def measure_speed(dtype: torch.dtype) -> float:
    """Operations a second of the fastest of several products of matrices with all CPUs of the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count_cores())
    try:
        size, best = LARGEST_ROWS // 8, 0.0
        while True:
            seconds = _fastest(size, dtype, 0.0)  # also takes memory and wakes threads
            best = max(best, 2 * size**3 / seconds)
            if seconds >= LONG_ENOUGH_S or size >= LARGEST_ROWS:
                return max(best, 2 * size**3 / _fastest(size, dtype, MEASURING_S))
            size *= 2
    finally:
        torch.set_num_threads(threads)


def _fastest(size: int, dtype: torch.dtype, budget_s: float) -> float:
    """Seconds of the fastest product of two square matrices; as many as fit the budget, at least two."""
    left, right = (torch.full((size, size), 0.5, dtype=dtype) for _ in range(2))
    end, times = time.perf_counter() + budget_s, []
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - start)
    return min(times)


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compute_alike() -> None:
    """From now on, this process computes by kernels alone that give the same bits each time. torch raises RuntimeError,
    with its name, at an operation that has none.

    Before the first product on a GPU: cuBLAS reads its workspace's size then. What the environment says of it stays."""
    os.environ.setdefault(WORKSPACE, ":4096:8")  # one of the two with which cuBLAS promises the same bits
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads uninitialized memory
    torch.use_deterministic_algorithms(True)


class CopyLead:
    """How far the host may run ahead of a side stream's copies.

    What a copy reads and writes stays taken until it is done, and the host launches copies faster than a bus carries
    them out: without a bound all of a step's lie in the GPU's memory at once."""

    def __init__(self, most: int):
        """most: copies that may be under way when another begins."""
        self._most = most
        self._events: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Before a copy begins: wait until there are fewer under way than the most."""
        while len(self._events) >= self._most:
            self._events.popleft().synchronize()

    def begun(self, stream: torch.cuda.Stream) -> None:
        """A copy began on `stream`."""
        self._events.append(stream.record_event())


def device_name() -> str:
    """Of this process's first GPU; cpu where it has none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


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

    use: what it is good for."""

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
