"""Columns of OmniBal's tables that a run does not report: the largest row, and in the place of GPU days the time of an
epoch's steps by the decoder's operations."""

from __future__ import annotations

import numpy as np

from dhp.data.balance.packs import QUADRATIC_TOKENS, Loads, Packs


def row_columns(packs: Packs, loads: Loads, replicas: int, padded: bool) -> dict[str, float]:
    """longest_vision, longest_text: the tower's load and the tokens of the largest row, padding included. time_to_even:
    operations of each step's fullest replica, summed over steps, to an even share of the operations of all samples
    without padding; 1 is ideal."""
    text = packs.maxima(loads.text) * packs.counts if padded else packs.sums(loads.text)
    lengths = np.repeat(packs.maxima(loads.text), packs.counts) if padded else loads.text[packs.samples]
    of_rows = np.add.reduceat(_operations(lengths), packs.starts)
    steps = np.pad(of_rows, (0, -len(of_rows) % replicas)).reshape(-1, replicas)
    even = _operations(loads.text[packs.samples]).sum() / replicas
    return {
        "longest_vision": int(packs.sums(loads.vision).max()),
        "longest_text": int(text.max()),
        "time_to_even": round(float(steps.max(axis=1).sum() / even), 4),
    }


def _operations(lengths: np.ndarray) -> np.ndarray:
    """Of each sample, in tokens: matrices, and attention to itself."""
    found: np.ndarray = lengths * (1.0 + lengths / QUADRATIC_TOKENS)
    return found
