"""Environment variables that a rank's process inherits and libraries read: what is set, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from dhp.base.errors import ConfigError
from dhp.cluster.transport.shared_memory import CUDA_IPC

LOCAL_RANK = "LOCAL_RANK"
KEEPS_ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ALLOCATOR, OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch reads the second one too
EXPANDABLE = "expandable_segments:True"


def own_local_rank() -> None:
    """A process sees its own device alone, so it is always the first; what Slurm or torchrun set counts devices that it
    does not see."""
    os.environ[LOCAL_RANK] = "0"


def require_own_gpu(where: str) -> None:
    """Raise ConfigError where Ray is set to show each process more than its own GPU."""
    value = os.environ.get(KEEPS_ALL_VISIBLE, "")
    if value.lower() in ("1", "true"):  # as Ray reads it
        raise ConfigError(
            f"{where}: {KEEPS_ALL_VISIBLE}={value}, so every rank would see all GPUs and use the first one. Unset it "
            "where the run or `ray start` gets its environment, and start again"
        )


def expand_segments(transport: str) -> bool:
    """Let CUDA's allocator here grow what it has in place of fragmenting it: two processes on a GPU have no memory to
    leave unused.

    False, and nothing changed, where the environment has settings of the allocator, and where `transport` hands memory
    of the device itself to other processes, which then could not map it.
    """
    if transport == CUDA_IPC or ALLOCATOR in os.environ or OLD_ALLOCATOR in os.environ:
        return False
    os.environ[ALLOCATOR] = EXPANDABLE
    torch._C._accelerator_setAllocatorSettings(EXPANDABLE)  # torch may have read the environment when it was imported
    return True


def record_nccl(log_dir: str | None, name: str) -> None:
    """Let torch write what NCCL was doing next to the log of the rank `name` when a collective waits too long
    (`name-nccl-RANK`, its flight recorder's own format), and NCCL begin collectives of several groups in the order of
    the program. What the environment says already stays."""
    for variable, value in (_NCCL if log_dir is None else _NCCL | _dump_to(Path(log_dir), name)).items():
        os.environ.setdefault(variable, value)


_NCCL = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


def _dump_to(log_dir: Path, name: str) -> dict[str, str]:
    prefix = str(log_dir / f"{name}-nccl-")  # torch adds the rank
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the second is the older one
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # collectives that are kept
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"} | dict.fromkeys(names, prefix) | dict.fromkeys(sizes, "2000")


def require_fixed_segments(transport: str, where: str) -> None:
    """Raise ConfigError for CUDA IPC with expandable segments: torch opens those in another process by a right that
    containers and hardened kernels refuse."""
    for name in (OLD_ALLOCATOR, ALLOCATOR):
        value = os.environ.get(name, "")
        if transport == CUDA_IPC and re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            raise ConfigError(
                f"{where}: cluster.transport={CUDA_IPC} with {name}={value}: memory in expandable segments is shared "
                "by a system call that containers and hardened kernels refuse (pidfd_getfd). Take expandable_segments "
                f"out of {name}, or set cluster.transport=auto"
            )
