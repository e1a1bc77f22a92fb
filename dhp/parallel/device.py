"""A rank's device: its name, its peak speed, deterministic kernels."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import torch

from dhp.core.process import count_cores
from dhp.core.reports import DeviceInfo

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

    Before the first product on a GPU: cuBLAS reads its workspace's size then. What the environment says of it stays.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")  # one of the two with which cuBLAS promises the same bits
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads uninitialized memory
    torch.use_deterministic_algorithms(True)


def device_name() -> str:
    """Of this process's first GPU; cpu where it has none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
