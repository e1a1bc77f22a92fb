"""What evaluating a batch costs beside training on it, in the same stages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from dhp.core.axes import Degrees
from experiments.finetuning.frozen import SIDE, WIDTHS, WORDS
from experiments.finetuning.ways import Trained, Way
from experiments.pair import join_alone
from experiments.recompute.work import deal, make_model, make_samples

SAMPLES = 4


def measure(rounds: int, widths: Mapping[str, int] = WIDTHS, side: int = SIDE) -> Iterator[dict[str, Any]]:
    """One row, after one round that does not count. Raises AssertionError where the loss is another than training's."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = make_model(Path(folder), **widths)
        data = deal(model, Degrees(), Degrees(), make_samples(SAMPLES, side, WORDS), SAMPLES)
        way, evaluated, trained = Way(model, Trained(), SAMPLES), [], []
        for _ in range(rounds + 1):
            evaluated.append(way.evaluate(data))
            trained.append(way.step(data))
            if abs(evaluated[-1].loss - trained[-1].loss) > 1e-6 * abs(trained[-1].loss):
                raise AssertionError(f"evaluated to {evaluated[-1].loss}, and trained from {trained[-1].loss}")
        pairs = list(zip(evaluated, trained, strict=True))[1:]
        yield {
            "train": "all",
            "evaluation_to_step": round(median(one.seconds / step.seconds for one, step in pairs), 3),
            "evaluation_s": round(median(one.seconds for one, _ in pairs), 4),
            "step_s": round(median(step.seconds for _, step in pairs), 4),
            "samples": SAMPLES,
            "rounds": len(pairs),
        }
