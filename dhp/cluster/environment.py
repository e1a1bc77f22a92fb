"""Environment variables that a rank's process inherits and libraries read: what is set, and what is refused."""

from __future__ import annotations

import os
import re

import torch

from dhp.cluster.transport import CUDA_IPC, NIXL
from dhp.errors import ConfigError

LOCAL_RANK = "LOCAL_RANK"
KEEPS_ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def own_local_rank() -> None:
    """A process sees its own device alone, so it is always the first; what Slurm or torchrun set counts devices that it
    does not see."""
    os.environ[LOCAL_RANK] = "0"


def require_own_gpu(where: str) -> None:
    """Raise ConfigError where Ray was told not to show each process its own GPU alone."""
    value = os.environ.get(KEEPS_ALL_VISIBLE, "")
    if value.lower() in ("1", "true"):  # as Ray reads it
        raise ConfigError(
            f"{where}: {KEEPS_ALL_VISIBLE}={value}, so every rank would see all GPUs and use the first one. Unset it "
            "where the run or `ray start` gets its environment, and start again"
        )
