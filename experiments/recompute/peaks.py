"""What the planner expects of a plan at the fullest device, and what the plan takes when it is tried."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dhp.core.axes import Degrees
from dhp.plan.count.costs import predicted_bytes
from dhp.plan.recompute.planner import Planner, as_text
from experiments.recompute.layout import Layout, Run, as_actors
from experiments.recompute.work import deal, make_model, make_samples

TWO = {name: Degrees(**{name: 2}) for name in ("data", "ring", "ulysses", "tensor")}
LAYOUTS = {
    "one rank each": Layout(),
    "one rank each, bfloat16, vision one ahead": Layout(
        dtype="bfloat16", schedule="vision_ahead", micro_batches=2, collocate=False
    ),
    "ulysses 2, tensor 2, padded rows": Layout(TWO["ulysses"], TWO["tensor"], packing=False),
    "ring 2, tensor 2, vision one ahead": Layout(TWO["ring"], TWO["tensor"], schedule="vision_ahead", micro_batches=2),
    "data 2, data 2, ZeRO-3": Layout(TWO["data"], TWO["data"], zero_stage=3, micro_batches=2),
}
# How much the budget admits of what lies between recomputing everything and nothing; patches along a side of an image,
# words of a sample.
CASES = ((0.3, 24, 768), (0.65, 40, 64))
TOWER, DECODER, LAYERS = 128, 128, 8
SAMPLES = 4


def measure() -> Iterator[dict[str, Any]]:
    """A row for each layout and budget, and one for all of them: peak_error is measured / predicted − 1."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), TOWER, DECODER, LAYERS)
        for name, layout in LAYOUTS.items():
            with as_actors(layout, model) as run:
                for share, side, words in CASES:
                    samples = make_samples(SAMPLES, side, words)
                    run.take(deal(model, layout.vision, layout.text, samples, layout.micro_batches, layout.packing))
                    row = try_plan(run, share)
                    errors.append(abs(row["peak_error"]))
                    yield {"mode": "peaks", "layout": name, "patches": side * side, "words": words, **row}
    yield {"mode": "peaks", "configs": len(errors), "peak_error": max(errors)}


def try_plan(run: Run, share: float) -> dict[str, Any]:
    """Measure, plan for a budget that admits `share` of what could be kept, and try the plan once, uncorrected."""
    planner = Planner(run.kinds, {}, run.arrangement, float("inf"))
    run.settle(planner)
    least, most = (
        predicted_bytes(planner.costs(), run.everything(choice), run.arrangement) for choice in ("all", "none")
    )
    budget = least + share * (most - least)
    tried = Planner(run.kinds, {}, run.arrangement, budget, known=planner.costs())
    predicted = tried.predicted_bytes()
    measured = tried.measured_bytes(run.step(tried.asked))
    return {
        "peak_error": round(measured / predicted - 1, 5),
        "predicted_mib": round(predicted / 2**20, 2),
        "measured_mib": round(measured / 2**20, 2),
        "budget_mib": round(budget / 2**20, 2),
        **{part: as_text(choices) for part, choices in tried.asked.items()},
    }
