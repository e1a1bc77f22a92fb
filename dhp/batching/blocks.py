"""Blocks of tokens with bidirectional attention: those of an image, or of a prompt, as the model's family has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dhp.base.geometry import IGNORED
from dhp.models.decoder import Decoder
from dhp.parallel.attention.visibility import number_runs


def find_blocks(decoder: Decoder, tensors: dict[str, Tensor], lengths: Sequence[int] | None) -> Tensor | None:
    """Numbers of the blocks, int64 [rows × tokens], -1 in none; None where the family has none.

    tensors: as `dhp.batching.collate.Collator.make` gives them; lengths: of the samples of a packed row.
    """
    if decoder.block_rule is None:
        return None
    kinds = tensors["mm_token_type_ids"]
    rows, tokens = kinds.shape
    inside = kinds > 0
    if decoder.sees_prefix:
        inside = find_prefixes(tensors["targets"].flatten(), (tokens,) * rows if lengths is None else lengths)
    return number_runs(inside)


def find_prefixes(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Which tokens come before all that is to be learned in their sample, bool [tokens]. targets: int64 [tokens], what
    each should predict; lengths: of the samples."""
    learned = [(sample != IGNORED).cumsum(0) for sample in targets.split(list(lengths))]
    # The token that predicts the first of an answer is the last one before it.
    return torch.cat([(count == 0) | ((count == 1) & (count.diff(prepend=count[:1] * 0) == 1)) for count in learned])
