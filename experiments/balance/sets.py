"""Sets of lengths: files of real ones, and a made one of the size and the means of InternVL's 1.2M samples.

Of the made set, the counts are published and so is what follows from them: 256 decoder tokens a tile, 1, 3 or 5 tiles
an image (at most 4 and a thumbnail), 4,096 tokens a sample; about 1.92 tiles and 762 tokens in the mean, which the
published pack sizes imply. The shares of tiles of each source and its text lengths (log-normal) are guesses that give
these means and, with random batches, the published PadRatio and DistRatio.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from dhp.data.balance.packs import Loads

TOKENS_A_TILE = 256
LONGEST = 4096

# ConfigSource: samples, shares of tiles, mean and σ of the text's logarithmic normal distribution.
SOURCES: dict[str, tuple[int, dict[int, float], float, float]] = {
    "sharegpt4v_cap100k": (102_025, {1: 0.42, 3: 0.38, 5: 0.20}, 250, 0.35),
    "llava_zh": (157_712, {1: 0.76, 3: 0.22, 5: 0.02}, 260, 0.7),
    "coco": (363_860, {1: 0.70, 3: 0.26, 5: 0.04}, 285, 0.7),
    "vg": (86_417, {1: 0.62, 3: 0.30, 5: 0.08}, 250, 0.5),
    "gqa": (72_140, {1: 0.62, 3: 0.30, 5: 0.08}, 250, 0.5),
    "ocr_vqa": (80_000, {1: 0.30, 3: 0.70}, 170, 0.3),
    "textvqa": (21_953, {3: 0.30, 5: 0.70}, 200, 0.5),
    "text": (40_688, {0: 1.0}, 700, 0.9),
    "dvqa": (200_000, {1: 0.90, 3: 0.10}, 260, 0.3),
    "geoqa": (72_318, {1: 0.45, 3: 0.40, 5: 0.15}, 150, 0.4),
    "ai2d": (12_413, {1: 0.30, 3: 0.40, 5: 0.30}, 150, 0.4),
    "chartqa": (18_317, {3: 0.30, 5: 0.70}, 120, 0.4),
    "docvqa": (10_211, {3: 0.30, 5: 0.70}, 110, 0.4),
    "synthdog": (29_765, {1: 0.20, 3: 0.40, 5: 0.40}, 300, 0.5),
}


def made(seed: int = 0) -> Loads:
    """The made set, 1,267,819 samples."""
    rng = np.random.default_rng(seed)
    tiles, texts = [], []
    for count, shares, mean, sigma in SOURCES.values():
        tiles.append(rng.choice(list(shares), count, p=list(shares.values())))
        texts.append(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count))
    vision = np.concatenate(tiles).astype(np.int64)
    text = np.concatenate(texts).round().astype(np.int64) + vision * TOKENS_A_TILE
    return Loads(vision, text.clip(16, LONGEST))


def read(files: list[Path]) -> Loads:
    """Files with the columns vision_tiles and text_tokens, one after another."""
    rows = [row for file in files for row in csv.DictReader(file.open(encoding="utf-8"))]
    vision = np.array([int(row["vision_tiles"]) for row in rows], dtype=np.int64)
    return Loads(vision, np.array([int(row["text_tokens"]) for row in rows], dtype=np.int64))
