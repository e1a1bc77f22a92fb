"""How few packs there can be, whatever the method."""

import csv
from math import ceil
from pathlib import Path

import numpy as np

from dhp.data.balance.packs import QUADRATIC_TOKENS, Limits, Loads, Packs


def least_packs(loads: Loads, limits: Limits) -> int:
    """A lower bound on the packs that hold all samples within the limits; beyond one, a sample has a pack of its own.

    Of vision and text each, Martello and Toth's L2 (1990, Knapsack Problems, section 8.3): samples above limit − x need
    a pack each, those above half of the limit too, and what is between x and half fills their room at best."""
    alone = (loads.vision > limits.vision) | (loads.text > limits.text)
    inside = ~alone
    both = ((loads.vision[inside], limits.vision), (loads.text[inside], limits.text))
    return int(alone.sum()) + max(_l2(sizes, limit) for sizes, limit in both)


def _l2(sizes: np.ndarray, limit: int) -> int:
    ordered = np.sort(sizes)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    half = np.searchsorted(ordered, limit / 2, side="right")
    best = ceil(sums[-1] / limit)
    for x in np.unique([0, *ordered[ordered <= limit / 2]]):
        large = np.searchsorted(ordered, limit - x, side="right")
        from_x = np.searchsorted(ordered, x, side="left")
        middle = large - half
        room = middle * limit - (sums[large] - sums[half])
        rest = sums[half] - sums[from_x] - room
        best = max(best, (len(ordered) - large) + middle + max(0, ceil(rest / limit)))
    return int(best)  # NumPy's numbers are none of JSON's


def row_columns(packs: Packs, loads: Loads, replicas: int, padded: bool) -> dict[str, float]:
    """longest_vision, longest_text: the tower's load and the tokens of the largest row, padding included. time_to_even:
    operations of each step's fullest replica, summed over steps, to an even share of the operations of all samples
    without padding; 1 is ideal."""
    text = packs.maxima(loads.text) * packs.counts if padded else packs.sums(loads.text)
    lengths = np.repeat(packs.maxima(loads.text), packs.counts) if padded else loads.text[packs.samples]
    of_rows = np.add.reduceat(operations(lengths), packs.starts)
    steps = np.pad(of_rows, (0, -len(of_rows) % replicas)).reshape(-1, replicas)
    even = operations(loads.text[packs.samples]).sum() / replicas
    return {
        "longest_vision": int(packs.sums(loads.vision).max()),
        "longest_text": int(text.max()),
        "time_to_even": round(float(steps.max(axis=1).sum() / even), 4),
    }


def operations(lengths: np.ndarray) -> np.ndarray:
    """Of the decoder, for samples of so many tokens, in those of a token's matrices."""
    found: np.ndarray = lengths * (1.0 + lengths / QUADRATIC_TOKENS)
    return found


TOKENS_A_TILE = 256
LONGEST = 4096

# ConfigSource: samples, shares of tiles, mean and σ of the text's logarithmic normal distribution.
SOURCES: dict[str, tuple[int, dict[int, float], float, float]] = {
    "sharegpt4v_cap100k": (102_025, {1: 0.42, 3: 0.38, 5: 0.20}, 250, 0.35),
    "llava_zh": (157_712, {1: 0.76, 3: 0.22, 5: 0.02}, 260, 0.7),
    "coco": (363_860, {1: 0.70, 3: 0.26, 5: 0.04}, 285, 0.7), "vg": (86_417, {1: 0.62, 3: 0.30, 5: 0.08}, 250, 0.5),
    "gqa": (72_140, {1: 0.62, 3: 0.30, 5: 0.08}, 250, 0.5), "ocr_vqa": (80_000, {1: 0.30, 3: 0.70}, 170, 0.3),
    "textvqa": (21_953, {3: 0.30, 5: 0.70}, 200, 0.5), "text": (40_688, {0: 1.0}, 700, 0.9),
    "dvqa": (200_000, {1: 0.90, 3: 0.10}, 260, 0.3), "geoqa": (72_318, {1: 0.45, 3: 0.40, 5: 0.15}, 150, 0.4),
    "ai2d": (12_413, {1: 0.30, 3: 0.40, 5: 0.30}, 150, 0.4), "chartqa": (18_317, {3: 0.30, 5: 0.70}, 120, 0.4),
    "docvqa": (10_211, {3: 0.30, 5: 0.70}, 110, 0.4), "synthdog": (29_765, {1: 0.20, 3: 0.40, 5: 0.40}, 300, 0.5),
}  # fmt: skip


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
