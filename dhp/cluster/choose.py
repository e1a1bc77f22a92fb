"""What a run computes on and how its ranks reach each other, by what was asked for and what is there."""

from __future__ import annotations

import warnings

import torch

from dhp.cluster.gpus import HERE, check_gpus, read_gpus
from dhp.cluster.host import require_own_gpu
from dhp.cluster.transport.shared_memory import CUDA_IPC, OBJECT_STORE, SHARED_MEMORY, available
from dhp.core.errors import ConfigError


def check_devices_here(asked: str, bundles: int, collocate: bool) -> None:
    """Checks for a Ray of our own on this machine, without starting it: may `bundles` devices be GPUs?

    Raises ConfigError. On the nodes of a running cluster, each rank looks for itself when it joins.
    """
    if asked == "cpu":
        return
    gpus = read_gpus()
    if asked == "cuda":
        choose_device(asked, len(gpus) or torch.cuda.device_count())
    if gpus:
        require_own_gpu(HERE)
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
    share one GPU.
    """
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
