"""How long the samples of a configuration's data are, as the model gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dhp.batch.reader import make_reader
from dhp.config.schema import Config
from dhp.plan.batches import feed_settings
from dhp.trainer.preflight import prepare

IMAGE = 1  # in a sample's mm_token_type_ids


def describe(config: Config) -> dict[str, Any]:
    """Samples, and mean, median and 95th percentile of their tokens, of their image tokens and of their images."""
    feed = make_reader(feed_settings(prepare(config)))
    steps = (feed.samples(step).samples for step in range(feed.steps(1)))
    samples = [sample for rows in steps for row in rows for of_replica in row for sample in of_replica]
    return {
        "samples": len(samples),
        "tokens": _spread([len(s.input_ids) for s in samples]),
        "image_tokens": _spread([int((s.mm_token_type_ids == IMAGE).sum()) for s in samples]),
        "images": _spread([len(s.pixels) for s in samples]),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {
        "mean": round(float(np.mean(values)), 1),
        "median": float(np.median(values)),
        "p95": round(float(np.percentile(values, 95)), 1),
        "max": max(values),
    }
