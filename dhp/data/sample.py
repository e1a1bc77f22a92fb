"""One preprocessed conversation: what the model gets, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORED = -100  # the label of a token that is not a target


@dataclass(frozen=True, eq=False)
class Sample:
    """L: tokens after each image placeholder was expanded to its merged patches.

    position: 1-based line or element in the annotation file of `dataset`.
    """

    dataset: str
    position: int
    input_ids: np.ndarray  # int64 [L]
    labels: np.ndarray  # int64 [L], IGNORED outside answers; not shifted: labels[i] is input_ids[i]
    mm_token_type_ids: np.ndarray  # int64 [L], 1 at image tokens, 0 at text
    pixels: tuple[np.ndarray, ...]  # one float32 [patches, channels × frames × patch × patch] an image
    grids: tuple[tuple[int, int, int], ...]  # one (t, h, w) an image, in patches: t × h × w = patches

    @property
    def target_tokens(self) -> int:
        """Tokens that the loss counts. The first token of a row is predicted by nothing."""
        return int((self.labels[1:] != IGNORED).sum())
