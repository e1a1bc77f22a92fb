"""Checks this machine's GPUs; chooses devices and transports of ranks."""

import os
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dhp.cluster.host import require_single_gpu
from dhp.cluster.transport.shared_memory import CUDA_IPC, OBJECT_STORE, SHARED_MEMORY, available
from dhp.core.errors import ConfigError

QUERY = ("nvidia-smi", "--query-gpu=index,driver_version,compute_mode,memory.total", "--format=csv,noheader")
TIMEOUT_S = 30.0  # without a daemon that keeps the driver loaded, it loads it first
OLDEST_DRIVERS = {12: 525, 13: 580}  # by major version of CUDA, as NVIDIA's table of CUDA's compatibility has them
EXCLUSIVE = ("Exclusive_Process", "Exclusive_Thread")
PROHIBITED = "Prohibited"
HERE = "this machine"
ON_CPUS = "set cluster.device=cpu"


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver knows. driver: its version. mode: its compute mode: how many processes it admits. memory:
    its bytes; None where the driver does not say."""

    index: int
    driver: str
    mode: str
    memory: int | None = None


@dataclass(frozen=True)
class Build:
    """The torch of this process. cuda: version it was built for; None: for CPUs alone. available: it finds a GPU."""

    version: str
    cuda: str | None
    available: bool


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use; none where nvidia-smi is missing, fails, or does not answer."""
    try:
        found = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    gpus = parse_gpus(found.stdout) if found.returncode == 0 else ()
    return visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's output for `QUERY`; lines that are none of its table are left out."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return tuple(Gpu(int(row[0]), row[1], row[2], _bytes(row[3])) for row in rows if len(row) == 4 and row[0].isdigit())


def _bytes(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    return int(number) << 20 if number.isdigit() and unit == "MiB" else None


def least_memory(gpus: Sequence[Gpu]) -> int | None:
    """Bytes of the smallest of them; None where one does not say, or there is none."""
    sizes = [gpu.memory for gpu in gpus]
    return None if None in sizes or not sizes else min(size for size in sizes if size is not None)


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`setting` leaves; all of them where it has anything but numbers."""
    if setting is None:
        return tuple(gpus)
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if not all(name.isdigit() for name in names):
        return tuple(gpus)
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


def check_gpus(gpus: Sequence[Gpu], shared: bool, where: str) -> None:
    """Both checks for this machine. shared: the run has several processes on a GPU. Raises ConfigError."""
    check_build(read_build(), gpus, where)
    check_modes(gpus, shared and not mps_runs(), where)


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


def choose_device(asked: str, gpus: float) -> str:
    """cpu or cuda. Raises ConfigError when cuda is asked for and there is no GPU."""
    if asked == "auto":
        return "cuda" if gpus else "cpu"
    if asked == "cuda" and not gpus:
        raise ConfigError("cluster.device=cuda, but there is no GPU; set cluster.device=cpu or auto")
    return asked


def choose_transport(asked: str, nodes: str, count: int, gpus: float) -> str:
    """The transport of tensors between actors on `count` nodes, described by `nodes`, that use `gpus`.

    Raises ConfigError when shared memory is asked for and the actors are on several nodes, or CUDA IPC and they do not
    share one GPU."""
    if asked == CUDA_IPC and (count > 1 or gpus != 1):
        raise ConfigError(
            f"cluster.transport=cuda_ipc, but the actors use {gpus:g} GPUs on {count} nodes, and it goes between "
            "actors that share one GPU; set cluster.transport=auto"
        )
    if asked == "auto":
        return SHARED_MEMORY if count == 1 and available() else OBJECT_STORE
    if asked == SHARED_MEMORY and count > 1:
        raise ConfigError(
            f"cluster.transport={SHARED_MEMORY}, but the actors lie on {count} nodes, {nodes}; set "
            "cluster.transport=auto"
        )
    return asked


def choose_backend(device: str, gpus_per_bundle: float) -> str:
    """nccl where every rank of a group has a GPU of its own; gloo otherwise, with a warning on GPUs."""
    if device == "cpu":
        return "gloo"
    if gpus_per_bundle >= 1.0:
        return "nccl"
    warnings.warn(
        f"ranks of one group share a GPU ({gpus_per_bundle:g} GPU each), which NCCL refuses: collectives go through "
        "gloo and host memory. Correct, but slow; use as many GPUs as ranks for real runs",
        stacklevel=2,
    )
    return "gloo"
