"""Checks this machine's GPUs; chooses devices and transports of ranks."""

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dhp.cluster.host import require_single_gpu
from dhp.cluster.transport.shared_memory import available
from dhp.core.errors import ConfigError
from dhp.core.graph import CUDA_IPC, NCCL, OBJECT_STORE, SHARED_MEMORY
from dhp.core.text import binary_size

COLUMNS = ("index", "driver_version", "compute_mode", "memory.total", "memory.used")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader")
TIMEOUT_S = 30.0  # without a daemon that keeps the driver loaded, it loads it first
OLDEST_DRIVERS = {12: 525, 13: 580}  # by major version of CUDA, as NVIDIA's table of CUDA's compatibility has them
EXCLUSIVE = ("Exclusive_Process", "Exclusive_Thread")
PROHIBITED = "Prohibited"
HERE = "this machine"
MUCH_HELD = 1 / 20  # of a GPU's memory: more than what its driver, or a screen, takes
ON_CPUS = "set cluster.device=cpu"


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver knows. driver: its version. mode: its compute mode: how many processes it admits. memory:
    its bytes; held: those that processes have taken; None where the driver does not say."""

    index: int
    driver: str
    mode: str
    memory: int | None = None
    held: int | None = None


@dataclass(frozen=True)
class Build:
    """The torch of this process. cuda: version it was built for; None: for CPUs alone. available: it finds a GPU."""

    version: str
    cuda: str | None
    available: bool


def read_gpus(sizes: bool = True) -> tuple[Gpu, ...]:
    """The GPUs that this process may use; none where nvidia-smi is missing, fails, or does not answer.

    sizes: where CUDA_VISIBLE_DEVICES names them by UUID, or slices of them (MIG), another process asks each for its
    memory; nvidia-smi tells that of whole cards, and of all."""
    gpus, setting = parse_gpus(_output_of(QUERY)), os.environ.get("CUDA_VISIBLE_DEVICES")
    said = _output_of((sys.executable, "-c", _ASK)).split() if sizes and gpus and _names_devices(setting) else []
    if said and all(size.isdigit() for size in said):
        return tuple(replace(gpus[0], index=index, memory=int(size)) for index, size in enumerate(said))
    return visible_gpus(gpus, setting)


_ASK = (
    "import torch\nfor at in range(torch.cuda.device_count()): print(torch.cuda.get_device_properties(at).total_memory)"
)


def _output_of(command: Sequence[str]) -> str:
    """What a command prints; nothing where it fails or does not answer."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout if found.returncode == 0 else ""


def _names_devices(setting: str | None) -> bool:
    return setting is not None and any(name.strip() and not name.strip().isdigit() for name in setting.split(","))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's output for `QUERY`; lines that are none of its table are left out."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(COLUMNS) and row[0].isdigit()]
    return tuple(Gpu(int(index), driver, mode, *map(_bytes, sizes)) for index, driver, mode, *sizes in rows)


def _bytes(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    return int(number) << 20 if number.isdigit() and unit == "MiB" else None


def least_memory(gpus: Sequence[Gpu]) -> int | None:
    """Bytes of the smallest of them; None where one does not say, or there is none."""
    sizes = [gpu.memory for gpu in gpus]
    return None if None in sizes or not sizes else min(size for size in sizes if size is not None)


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`setting` leaves; all of them where it has anything but numbers."""
    if setting is None or _names_devices(setting):
        return tuple(gpus)
    names = [name.strip() for name in setting.split(",") if name.strip()]
    return tuple(gpu for gpu in gpus if gpu.index in map(int, names))


def read_build() -> Build:
    """The torch of this process. With a driver that is too old, or missing, no GPU is available."""
    return Build(torch.__version__, torch.version.cuda, torch.cuda.is_available())


def check_build(build: Build, gpus: Sequence[Gpu], where: str) -> None:
    """Raise ConfigError where this torch cannot use GPUs, with the reason, from `gpus` of the same machine.

    A driver that torch can use is new enough, whatever its version: NVIDIA's package for forward compatibility lets
    older ones of data centres run newer CUDA."""
    if build.cuda is None:
        raise ConfigError(
            f"{where}: there are GPUs, but torch {build.version} is built for CPUs alone (torch.version.cuda is "
            f"None). Install torch {build.version.partition('+')[0]} from PyPI, without the index of CPU wheels, or "
            f"{ON_CPUS}"
        )
    if build.available:
        return
    needed = OLDEST_DRIVERS.get(_major(build.cuda), 0)
    for gpu in gpus[:1]:  # one driver has them all
        if 0 <= _major(gpu.driver) < needed:
            raise ConfigError(
                f"{where}: the NVIDIA driver {gpu.driver} is too old for torch {build.version}, which is built for "
                f"CUDA {build.cuda} and needs driver {needed} or newer. Install such a driver{_older(gpu)}, or "
                f"{ON_CPUS}"
            )
    raise ConfigError(
        f"{where}: there are GPUs, but torch {build.version}, built for CUDA {build.cuda}, cannot use any "
        f"(torch.cuda.is_available() is false; NVIDIA driver {gpus[0].driver if gpus else 'unknown'}, "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). There, see what `nvidia-smi` and "
        f"`python -c 'import torch; torch.cuda.init()'` say; a container must be given its GPUs. Or {ON_CPUS}"
    )


def check_modes(gpus: Sequence[Gpu], shared: bool, where: str) -> None:
    """Raise ConfigError where the GPUs admit fewer processes than the run has on each. shared: more than one.

    Of several GPUs it is not known which one will be used, so it is an error only where none of them would do."""
    refusing = (PROHIBITED, *EXCLUSIVE) if shared else (PROHIBITED,)
    if not gpus or any(gpu.mode not in refusing for gpu in gpus):
        return
    modes = ", ".join(f"GPU {gpu.index} {gpu.mode}" for gpu in gpus)
    indices = ",".join(str(gpu.index) for gpu in gpus)
    why = "processes of this run share a GPU, since the parts are collocated or there are fewer GPUs than ranks"
    apart = ", or give each rank of both parts a GPU of its own (cluster.collocate=false)" if shared else ""
    raise ConfigError(
        f"{where}: the compute mode does not admit the run's processes: {modes}, and "
        f"{why if shared else 'no process may use it'}. Set it to Default (as root: `nvidia-smi -i {indices} -c "
        f"DEFAULT`){apart}"
    )


def warn_of_others(gpus: Sequence[Gpu], where: str) -> None:
    """Warn where other processes hold memory of GPUs before the run has taken any, which plan and budget count on."""
    for gpu in gpus:
        if gpu.memory is not None and gpu.held is not None and gpu.held > MUCH_HELD * gpu.memory:
            warnings.warn(
                f"{where}: other processes hold {binary_size(gpu.held)} of the {binary_size(gpu.memory)} of GPU "
                f"{gpu.index}, and the run counts on all of it. `nvidia-smi` names them: end them, leave the GPU "
                "out by CUDA_VISIBLE_DEVICES, or set memory.budget_gib for what is left",
                stacklevel=2,
            )


def check_gpus(gpus: Sequence[Gpu], shared: bool, where: str) -> None:
    """Both checks for this machine. shared: the run has several processes on a GPU. Raises ConfigError."""
    check_build(read_build(), gpus, where)
    check_modes(gpus, shared and not mps_runs(), where)


def tell_memory(beside: Sequence[str]) -> str:
    """Who holds this process's GPU, for an error that says that its memory is short. beside: ranks of other parts whose
    processes are on it."""
    free, whole = torch.cuda.mem_get_info()
    taken, tensors = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    others = f"{' and '.join(beside)} on the same GPU, other processes" if beside else "other processes"
    return (
        f"Of the GPU's {binary_size(whole)} this process has taken {binary_size(taken)}, of which "
        f"{binary_size(taken - tensors)} lie between its tensors; {others} and contexts have taken "
        f"{binary_size(max(0, whole - free - taken))}, and {binary_size(free)} are free."
    )


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs here: it is the one process, and others use the GPU through it."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def _older(gpu: Gpu) -> str:
    majors = [major for major, oldest in OLDEST_DRIVERS.items() if oldest <= _major(gpu.driver)]
    return f", or a build of torch for CUDA {max(majors)}, which this driver runs" if majors else ""


def _major(version: str) -> int:
    """580 of 580.65.06; -1 where it does not begin with a number."""
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else -1


def check_devices_here(asked: str, bundles: int, collocate: bool) -> None:
    """Checks for a Ray of our own on this machine, without starting it: may `bundles` devices be GPUs?

    Raises ConfigError. On the nodes of a running cluster, each rank looks for itself when it joins."""
    if asked == "cpu":
        return
    gpus = read_gpus()
    if asked == "cuda":
        choose_device(asked, len(gpus) or torch.cuda.device_count())
    if gpus:
        require_single_gpu(HERE)
        check_gpus(gpus, collocate or len(gpus) < bundles, HERE)
        warn_of_others(gpus, HERE)


def choose_device(asked: str, gpus: float) -> str:
    """cpu or cuda. Raises ConfigError when cuda is asked for and there is no GPU."""
    if asked == "auto":
        return "cuda" if gpus else "cpu"
    if asked == "cuda" and not gpus:
        raise ConfigError("cluster.device=cuda, but there is no GPU; set cluster.device=cpu or auto")
    return asked


def choose_transport(asked: str, nodes: str, count: int, gpus: float, per_gpu: int, passes: bool = False) -> str:
    """The transport of tensors between actors on `count` nodes, described by `nodes`, that use `gpus`, each of at most
    `per_gpu` ranks of one group. passes: an encoder that is trained takes several micro-batches at a time, so that one
    rank receives several tensors of another at once: NCCL, which begins what a GPU sends and receives one by one in
    the order of the host, could wait for itself.

    auto: CUDA IPC where all share one GPU, NCCL where each rank of a group has a GPU to itself and there are no passes;
    without GPUs, and where these do not do, shared memory on one host and Ray's object store between several.

    Raises ConfigError when shared memory is asked for and the actors are on several nodes, CUDA IPC and they do not
    share one GPU, or NCCL and ranks of one group share one, or there are passes on GPUs."""
    if asked == NCCL and gpus and passes:
        raise ConfigError(
            f"cluster.transport={NCCL} with training.vision_batch above 1: what goes back for several micro-batches "
            "could wait for itself there. Set cluster.transport=auto, which goes through the host then, or "
            "training.vision_batch=1"
        )
    if asked == NCCL and per_gpu > 1:
        raise ConfigError(
            f"cluster.transport={NCCL}, but {per_gpu} ranks of one group share a GPU, and NCCL does not connect these; "
            "use as many GPUs as ranks, or set cluster.transport=auto"
        )
    if asked == CUDA_IPC and (count > 1 or gpus != 1):
        raise ConfigError(
            f"cluster.transport=cuda_ipc, but the actors use {gpus:g} GPUs on {count} nodes, and it goes between "
            "actors that share one GPU; set cluster.transport=auto"
        )
    if asked == "auto" and gpus:
        if count == gpus == 1:
            return CUDA_IPC
        if per_gpu == 1 and not passes:
            return NCCL
    if asked == "auto":
        return SHARED_MEMORY if count == 1 and available() else OBJECT_STORE
    if asked == SHARED_MEMORY and count > 1:
        raise ConfigError(
            f"cluster.transport={SHARED_MEMORY}, but the actors lie on {count} nodes, {nodes}; set "
            "cluster.transport=auto"
        )
    return asked


def choose_backend(bundles_per_gpu: int) -> str:
    """nccl where every rank of a group has a GPU to itself, as `PlacementPlan.bundles_per_gpu` tells; gloo otherwise,
    with a warning on GPUs. Ranks of several parts on one GPU are in groups apart."""
    if bundles_per_gpu > 1:
        warnings.warn(
            f"{bundles_per_gpu} ranks of one group share a GPU, which NCCL refuses: collectives go through gloo and "
            "host memory. Correct, but slow; use as many GPUs as ranks for real runs",
            stacklevel=2,
        )
    return "nccl" if bundles_per_gpu == 1 else "gloo"
