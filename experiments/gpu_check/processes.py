"""Rows: both parts as ranks in processes of their own on the one device, as a run has them: NCCL, each way between
them, and what they take together."""

from __future__ import annotations

import mmap
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import experiments.gpu_check.stand_ins  # noqa: F401
from dhp.cluster.transport.shared_memory import CUDA_IPC, RemoteValue, pin, unpin
from dhp.core.batch import Bundle
from dhp.core.tracing import TRANSFER
from dhp.engine.device_transfer import to_device
from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import StageSettings
from dhp.models.registry import load_family
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from experiments.gpu_check.pair import (
    UPDATE,
    agree,
    built_on,
    deal,
    free,
    make_samples,
    make_shape,
    sizes,
    start_pair,
    states_of,
)
from experiments.gpu_check.ranks import Ranks
from experiments.gpu_check.setting import Setting
from experiments.pair import TEXT, VISION, as_batch, pair_of, settings_of

LAYERS, STEPS = 2, 3
ALIKE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}  # of losses; backward on a GPU adds in no fixed order
TIMES = 8  # hand-overs that are timed


def check_steps(setting: Setting, transport: str, samples: int) -> dict[str, Any]:
    """Steps of both parts with real layers: losses as without any process between them, and memory as a dry run says.
    used_bytes: of the device, by both processes, when the last step is done."""
    if transport == CUDA_IPC:
        setting.require_cuda("CUDA IPC")
    free()
    folder = make_shape(setting, LAYERS)
    graph = pair_of(load_family(folder))
    data = deal(setting, folder, make_samples(folder, sizes(setting, samples)))
    wanted = _losses_here(setting, folder, data)
    before, losses, times = _used(setting), [], []
    with ExitStack() as stack:
        groups = {}
        for stage in (VISION, TEXT):
            own = settings_of(graph, stage, folder, UPDATE, "light", dtype=setting.format, device=setting.device)
            ranks = Ranks(stage, 1, setting.device, Built, own, backend=_backend(setting), transport=transport)
            groups[stage] = stack.enter_context(ranks)
        stages, schedule = make_stages(graph, groups), make_schedule("sequential", graph, 1)
        batch = as_batch(data, lambda value: Stored.put(value, Path(stack.enter_context(TemporaryDirectory()))))
        for _ in range(STEPS):
            begin = time.perf_counter()
            losses.append(train_step(stages, schedule, graph.ties, batch).reports[TEXT][0].loss)
            times.append((time.perf_counter() - begin) * 1e3)
        used = _used(setting)
        memory = {stage: group.first("memory") for stage, group in groups.items()}
    return _judged(setting, folder, losses, wanted, memory) | {
        "step_ms": round(median(times[1:]), 3),
        "used_bytes": None if used is None else used - before,
        "backend": _backend(setting),
    }


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


@dataclass(frozen=True)
class Stored(RemoteValue):
    """A value in a file, which each process reads once: patches reach a run's ranks by mapped memory, not by a pipe."""

    @classmethod
    def put(cls, value: Any, folder: Path) -> Stored:
        """Write it."""
        file = folder / "value"
        torch.save(value, file)
        return cls(str(file))

    def fetch(self) -> Any:
        """The value, the same each time."""
        return _read(self.ref)


@cache
def _read(file: str) -> Any:
    return torch.load(file, weights_only=False, mmap=True)


class Built:
    """A trainer with random weights, as `make_rank` makes one of files; and what it takes."""

    def __init__(self, settings: StageSettings):
        with built_on(settings.device):
            self._trainer = make_rank(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def memory(self) -> dict[str, int] | None:
        """Bytes of this process on a GPU, now and at most."""
        if self._trainer.device.type != "cuda":
            return None
        own = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        return own | {"most_allocated": torch.cuda.max_memory_allocated()}


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


def _used(setting: Setting) -> int | None:
    if not setting.cuda:
        return None
    torch.cuda.synchronize()
    unused, whole = torch.cuda.mem_get_info()
    return whole - unused


def _losses_here(setting: Setting, folder: str, data: Any) -> list[float]:
    pair = start_pair(setting, folder, "light")
    losses = [pair.step(data)[1].loss for _ in range(STEPS)]
    del pair
    free()
    return losses


def _judged(
    setting: Setting, folder: str, losses: list[float], wanted: list[float], memory: dict[str, Any]
) -> dict[str, Any]:
    error = max(abs(one / other - 1) for one, other in zip(losses, wanted, strict=True))
    found: dict[str, Any] = {"ok": error < ALIKE[setting.dtype], "loss_error": error, "losses": losses}
    dry = {part: states_of(setting, folder, part) for part in (VISION, TEXT)}
    found["dry_run_bytes"] = sum(one.total for one in dry.values())
    for part, said in dry.items():
        if memory[part] is not None:
            found["ok"] &= agree(memory[part]["allocated"], said)
            found |= {f"{part}_{name}_bytes": value for name, value in memory[part].items()}
    return found


def _span_ms(ranks: Ranks, name: str) -> float:
    (spans,) = ranks.spans()
    return max((one.end_ns - one.start_ns) / 1e6 for one in spans if (one.name, one.kind) == (name, TRANSFER))
