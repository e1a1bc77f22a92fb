"""Deterministic kernels: the same bits each time."""

from __future__ import annotations

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compute_alike() -> None:
    """From now on, this process computes by kernels alone that give the same bits each time. torch raises RuntimeError,
    with its name, at an operation that has none.

    Before the first product on a GPU: cuBLAS reads its workspace's size then. What the environment says of it stays.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")  # one of the two with which cuBLAS promises the same bits
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads uninitialized memory
    torch.use_deterministic_algorithms(True)
