"""Tiny models and hand-made samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp.data.sample import IGNORED, Sample

IMAGE_TOKEN = 505


def make_sample(grids: Sequence[tuple[int, int, int]], tokens: int, targets: int, seed: int, image_token: int) -> Sample:
    """A sample with random pixels and text: some text, each image, `tokens` of text whose last `targets` are labels."""
    rng = np.random.default_rng(seed)
    text = lambda n: list(rng.integers(3, 300, n))
    ids: list[int] = text(2)
    kinds = [0, 0]
    for t, h, w in grids:
        ids += [image_token] * (t * h * w // 4) + text(1)
        kinds += [1] * (t * h * w // 4) + [0]
    ids += text(tokens)
    kinds += [0] * tokens
    labels = [IGNORED] * (len(ids) - targets) + ids[len(ids) - targets :]
    pixels = tuple(rng.standard_normal((t * h * w, 3 * 2 * 14 * 14)).astype(np.float32) for t, h, w in grids)
    as_array = lambda values: np.array(values, dtype=np.int64)
    return Sample("made", seed, as_array(ids), as_array(labels), as_array(kinds), pixels, tuple(grids))
