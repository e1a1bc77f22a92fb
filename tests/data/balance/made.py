"""Loads like those of a mixture of datasets."""

import numpy as np

from dhp.data.balance.packs import Limits, Loads

LIMITS = Limits(vision=9, text=4096, samples=4)


def mixture(samples: int = 20_000, seed: int = 0) -> Loads:
    """Zero to five tiles of 256 tokens, and text of very unequal length."""
    rng = np.random.default_rng(seed)
    vision = rng.choice([0, 1, 3, 5], samples, p=[0.03, 0.66, 0.24, 0.07]).astype(np.int64)
    text = rng.lognormal(5.4, 0.7, samples).round().astype(np.int64) + 256 * vision
    return Loads(vision, text.clip(16, 4096))
