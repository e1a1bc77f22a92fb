"""Rows: which kernels ran, and what each kind of recomputing costs and saves beside the planner's word."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dhp.config.recompute import CHOICES, OFFLOAD
from dhp.core.reports import StageReport
from dhp.planner.costs import Arrangement, predicted_bytes
from dhp.planner.planner import Planner, as_text
from experiments.gpu_check.pair import Text, free, shared_pair, time_steps
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import deal, make_samples, make_shape, sizes
from experiments.pair import TEXT

LONGEST, NAME = 25, 100  # rows of the table; characters of a kernel's name
COPIES = ("Memcpy", "Memset")
Interval = tuple[float, float]


def check_profile(setting: Setting, samples: int, recompute: str) -> dict[str, Any]:
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
        "kernels": _longest(kernels), "launches": len(kernels), "kernels_ms": round(total(busy) / 1e3, 3),
        "idle_percent": round(100 * (1 - spent / (whole[-1][1] - whole[0][0])), 2), "copies_ms": round(copied / 1e3, 3),
        "copies_hidden_percent": round(100 * overlap(busy, union(copies)) / copied, 2) if copied else None,
    }  # fmt: skip


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


LAYERS, SHARE = 8, 0.4  # layers; what the plan's budget admits of what lies between recomputing everything and nothing
NEAR = 0.1  # relative: of the measured peak and the planner's
ALONE = Arrangement((frozenset({TEXT}),), {TEXT: {TEXT: 1}}, together=False)


def check_kind(setting: Setting, samples: int, kind: str) -> dict[str, Any]:
    """Milliseconds of a step, and the most bytes on top of what is there between steps. Of offload, how much of its
    copies ran beside kernels."""
    text = _start(setting, samples)
    text.choose((kind,) * LAYERS)
    text.step()
    report: StageReport = text.step()
    times = time_steps(setting, lambda _: text.step())
    found = {"ok": report.usage is not None, **times, "peak_bytes": report.usage.peak_bytes}
    if kind != OFFLOAD or not setting.cuda:
        return found
    copies = watch(setting, text.step)
    return found | {name: copies[name] for name in ("copies_ms", "copies_hidden_percent", "idle_percent")}


def check_plan(setting: Setting, samples: int) -> dict[str, Any]:
    """Measure, plan for a budget between everything and nothing, and try the plan once, uncorrected."""
    text = _start(setting, samples)
    kinds = {TEXT: text.trainer.family.decoder.layers.kinds}
    planner = Planner(kinds, {}, ALONE, float("inf"))
    while not planner.settled:
        text.choose(planner.asked[TEXT])
        planner.learn({TEXT: text.step().usage})
    least, most = (
        predicted_bytes(planner.costs(), {TEXT: (choice,) * LAYERS}, ALONE) for choice in (CHOICES[-2], CHOICES[0])
    )
    budget = least + SHARE * (most - least)
    tried = Planner(kinds, {}, ALONE, budget, known=planner.costs())
    text.choose(tried.asked[TEXT])
    measured = tried.measured_bytes({TEXT: text.step().usage})
    error = measured / tried.predicted_bytes() - 1
    return {
        "ok": abs(error) < NEAR, "peak_error": round(error, 5), "predicted_bytes": round(tried.predicted_bytes()),
        "measured_bytes": measured, "budget_bytes": round(budget), "plan": as_text(tried.asked[TEXT]),
    }  # fmt: skip


_STARTED: dict[tuple[Setting, int], Text] = {}


def _start(setting: Setting, samples: int) -> Text:
    """Once for all rows."""
    if (setting, samples) not in _STARTED:
        free()
        folder = make_shape(setting, LAYERS)
        data = deal(setting, folder, make_samples(folder, sizes(setting, samples)))
        _STARTED[setting, samples] = Text(setting, folder, data, "full", measure=True)
        torch.manual_seed(0)
    return _STARTED[setting, samples]
