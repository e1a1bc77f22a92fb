"""What a row is told: where it runs, and at which sizes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch


class NotHere(Exception):
    """What the row looks at does not exist on this device. Its text says why."""


@dataclass(frozen=True)
class Setting:
    """device: cuda | cpu, where sizes are tiny. folder: of models, made once."""

    device: str
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of kernels and layers: 16 bits where there are kernels for them."""
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def format(self) -> str:
        """`dtype`'s name."""
        return str(self.dtype).removeprefix("torch.")

    def require_cuda(self, what: str) -> None:
        """Raises NotHere on a CPU."""
        if not self.cuda:
            raise NotHere(f"{what} needs a GPU")

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Spent:
    """Milliseconds, medians. ms: of the device, from the first kernel to the end of the last. host_ms: until the call
    returned, waiting for nothing."""

    ms: float
    host_ms: float

    def told(self, name: str) -> dict[str, float]:
        """As fields of a row."""
        return {f"{name}_ms": round(self.ms, 4), f"{name}_host_ms": round(self.host_ms, 4)}


def spend(setting: Setting, *calls: Callable[[], Any], rounds: int = 7, budget_s: float = 8.0) -> list[Spent]:
    """Each of `calls`, one behind another, after two rounds that do not count. Fewer rounds where they take longer than
    `budget_s`, but one."""
    end, taken = time.perf_counter() + budget_s, []
    for number in range(rounds + 2):
        taken.append([_once(setting, call) for call in calls])
        if time.perf_counter() > end and number >= 1:
            break
    counted = taken[2:] or taken[-1:]
    return [Spent(*(median(values) for values in zip(*of_call))) for of_call in zip(*counted)]


def _once(setting: Setting, call: Callable[[], Any]) -> tuple[float, float]:
    setting.wait()
    if setting.cuda:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    begin = time.perf_counter()
    call()
    host_ms = (time.perf_counter() - begin) * 1e3
    if not setting.cuda:
        return host_ms, host_ms
    last.record()
    last.synchronize()
    return first.elapsed_time(last), host_ms


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖, in double precision. Of what is no number: itself."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())
