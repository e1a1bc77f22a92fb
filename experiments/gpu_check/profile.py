"""Row: which kernels ran in a micro-batch, how long the device had nothing to do, and which copies it hid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.gpu_check.pair import shared_pair
from experiments.gpu_check.samples import deal, make_samples, sizes
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import make_shape

LONGEST, NAME = 25, 100  # rows of the table; characters of a kernel's name
COPIES = ("Memcpy", "Memset")
Interval = tuple[float, float]


def check(setting: Setting, samples: int, recompute: str) -> dict[str, Any]:
    """Of the second micro-batch: memory and kernels are there by then."""
    folder = make_shape(setting)
    data, pair = deal(setting, folder, make_samples(folder, sizes(setting, samples))), shared_pair(setting)
    pair.choose(recompute)
    pair.step(data)
    return {"ok": True, **watch(setting, lambda: pair.micro_batch(data))}


def watch(setting: Setting, call: Callable[[], Any]) -> dict[str, Any]:
    """What the device did in `call`. On a CPU, torch's operators stand for kernels, and nothing is said of copies."""
    setting.wait()
    with profile(activities=[ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU]) as seen:
        call()
        setting.wait()
    on = DeviceType.CUDA if setting.cuda else DeviceType.CPU  # the driver's calls are events too
    events = [
        event for event in seen.events() if event.device_type == on and not getattr(event, "is_user_annotation", False)
    ]
    done = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    if not setting.cuda:
        return {"kernels": _longest(done)}
    kernels = [one for one in done if not one[0].startswith(COPIES)]
    copies = [span for name, span in done if name.startswith(COPIES[0])]
    busy, whole = union(span for _, span in kernels), union(span for _, span in done)
    spent, copied = total(whole), total(union(copies))
    return {
        "kernels": _longest(kernels),
        "launches": len(kernels),
        "kernels_ms": round(total(busy) / 1e3, 3),
        "idle_percent": round(100 * (1 - spent / (whole[-1][1] - whole[0][0])), 2),
        "copies_ms": round(copied / 1e3, 3),
        "copies_hidden_percent": round(100 * overlap(busy, union(copies)) / copied, 2) if copied else None,
    }


def _longest(done: Iterable[tuple[str, Interval]]) -> list[dict[str, Any]]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, (begin, end) in done:
        by_name[name[:NAME]].append(end - begin)
    rows = ({"name": name, "calls": len(us), "ms": round(sum(us) / 1e3, 3)} for name, us in by_name.items())
    return sorted(rows, key=lambda row: -row["ms"])[:LONGEST]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Of intervals that may overlap, in order."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def total(spans: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(end - begin for begin, end in spans)


def overlap(one: list[Interval], other: list[Interval]) -> float:
    """How much of two unions is common."""
    return total(one) + total(other) - total(union([*one, *other]))
