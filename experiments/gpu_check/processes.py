"""Rows: a tensor from one rank's process to another's on the one device, each way that a run has."""

from __future__ import annotations

import mmap
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor

import experiments.gpu_check.stand_ins  # noqa: F401
from dhp.cluster.transport.shared_memory import pin, unpin
from dhp.core.batch import Bundle
from dhp.core.graph import CUDA_IPC
from dhp.core.tracing import TRANSFER
from dhp.engine.device_transfer import to_device
from experiments.gpu_check.ranks import Ranks
from experiments.gpu_check.setting import Setting
from experiments.pair import TEXT, VISION

TIMES = 8  # hand-overs that are timed


def check_hand_over(setting: Setting, transport: str) -> dict[str, Any]:
    """The embeddings of "8" samples from one process's device memory to another's: ms, GB/s, and whether the driver
    locks memory that both have mapped."""
    if transport == CUDA_IPC:
        setting.require_cuda("CUDA IPC")
    shape = (9792, 2048) if setting.cuda else (96, 64)
    ms: dict[str, list[float]] = {"send": [], "receive": [], "take": []}
    with ExitStack() as stack:
        told = {"backend": _backend(setting), "transport": transport}
        sender, taker = (
            stack.enter_context(Ranks(name, 1, setting.device, Courier, setting.device, shape, **told))
            for name in (VISION, TEXT)
        )
        locks = sender.first("locks")
        for number in range(TIMES + 2):
            bundle = sender.first("give", number)
            ok, took = taker.first("take", number, bundle)
            sender.execute_all_async("optimizer_step")
            found = {"take": took, "send": _span_ms(sender, "send"), "receive": _span_ms(taker, "receive")}
            for name, value in found.items():
                ms[name].append(value)
            if not ok:
                return {"ok": False, "told": "the values that came are not those that were sent"}
    medians = {name: median(values[2:]) for name, values in ms.items()}
    nbytes = shape[0] * shape[1] * setting.dtype.itemsize
    speeds = {f"{name}_gb_s": round(nbytes / 1e6 / medians[name], 3) for name in ("send", "take")}
    times = {f"{name}_ms": round(value, 4) for name, value in medians.items()}
    return {"ok": True, "bytes": nbytes, "host_register": locks, **times, **speeds}


class Courier:
    """Hands over a tensor again and again, or takes it."""

    def __init__(self, device: str, shape: tuple[int, int]):
        self._device, self._shape = torch.device(device), shape
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def locks(self) -> bool | None:
        """Whether the driver locks mapped memory for the GPU; None without one."""
        if self._device.type != "cuda":
            return None
        memory = mmap.mmap(-1, 1 << 21)
        locked = pin(memory)
        if locked:
            unpin(memory)
        return locked

    def give(self, number: int) -> tuple[Bundle]:
        """A tensor of that number, which is there when it is sent."""
        tensor = torch.full(self._shape, float(number), dtype=self._dtype, device=self._device)
        self._wait()
        return (Bundle({"embeddings": tensor}),)

    def take(self, number: int, bundle: Bundle) -> tuple[tuple[bool, float]]:
        """Whether it is what was sent, and the milliseconds until it was on the device."""
        self._wait()
        begin = time.perf_counter()
        tensor: Tensor = to_device(bundle.tensors["embeddings"], self._device)
        self._wait()
        took = (time.perf_counter() - begin) * 1e3
        return ((bool((tensor == number).all()), took),)

    def optimizer_step(self) -> None:
        """Ends a step: what was sent may be written over."""

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _backend(setting: Setting) -> str:
    return "nccl" if setting.cuda else "gloo"


def _span_ms(ranks: Ranks, name: str) -> float:
    (spans,) = ranks.spans()
    return max((one.end_ns - one.start_ns) / 1e6 for one in spans if (one.name, one.kind) == (name, TRANSFER))
