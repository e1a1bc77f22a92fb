"""Rows: what each kind of recomputing costs and saves at eight layers of the text part, and whether the planner's word
on its memory is true."""

from __future__ import annotations

from typing import Any

import torch

from dhp.config.layout import CHOICES, OFFLOAD
from dhp.core.reports import StageReport
from dhp.plan.count.costs import Arrangement, predicted_bytes
from dhp.plan.recompute.planner import Planner, as_text
from experiments.gpu_check.pair import Text, free, time_steps
from experiments.gpu_check.profile import watch
from experiments.gpu_check.samples import deal, make_samples, sizes
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import make_shape
from experiments.pair import TEXT

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
        "ok": abs(error) < NEAR,
        "peak_error": round(error, 5),
        "predicted_bytes": round(tried.predicted_bytes()),
        "measured_bytes": measured,
        "budget_bytes": round(budget),
        "plan": as_text(tried.asked[TEXT]),
    }


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
