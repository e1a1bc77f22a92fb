"""A text replica's row as the ranks that share its sequence get it: each a share of every sample, even by token, in the
two-ended layout of causal attention (`dhp.parallel.attention.shard_plan.zigzag_plan`).

Targets were shifted and positions counted before, on the whole row, so no rank needs a neighbour's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dhp.base.geometry import IGNORED
from dhp.batching.collate import BY_PICTURE
from dhp.parallel.attention.shard_plan import zigzag_plan

Spans = tuple[tuple[int, int, int], ...]  # (segment, first token, tokens)
_DUMMY = {"targets": IGNORED}  # what a token that nobody needs has, where it is not 0


@dataclass(frozen=True)
class SharedRow:
    """Who has what of a row.

    lengths: tokens of each segment: the samples, and behind them a segment of one token for each rank without any,
    which takes part in the collectives all the same. shards: for each rank (Ulysses innermost), what it holds, in the
    order of its tokens. places: for each rank, its tokens' places in the row, int64, without the dummy.
    """

    lengths: tuple[int, ...]
    shards: tuple[Spans, ...]
    places: tuple[Tensor, ...]

    def owners(self) -> Tensor:
        """For each token of the row, the rank that has it, int64."""
        found = torch.empty(sum(map(len, self.places)), dtype=torch.long)
        for rank, places in enumerate(self.places):
            found[places] = rank
        return found

    def cut(self, tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        """A rank's own of what the row has an element a token of, in the last dimension. What has a row a picture stays
        behind: it was needed for positions alone."""
        places = self.places[rank]
        own = {name: values for name, values in tensors.items() if name not in BY_PICTURE}
        if not len(places):
            return {name: _dummy(name, values) for name, values in own.items()}
        return {name: values[..., places] for name, values in own.items()}

    def with_dummies(self, blocks: Tensor | None) -> Tensor | None:
        """Blocks of all segments, from those of the row (`dhp.base.messages.TextInput.blocks`)."""
        if blocks is None:
            return None
        return torch.cat([blocks, blocks.new_full((sum(self.lengths) - len(blocks),), -1)])


def share_row(lengths: Sequence[int], ring: int, ulysses: int) -> SharedRow:
    """Share a row of samples of so many tokens among ring × Ulysses ranks."""
    plan = zigzag_plan(lengths, ring, ulysses)
    starts = [0, *accumulate(lengths)]
    segments, shards, places = list(lengths), [], []
    for held in (shard for of_ring in plan.shards for shard in of_ring):
        spans = tuple((piece.segment, piece.first, piece.count) for piece in held)
        runs = [torch.arange(starts[s] + first, starts[s] + first + count) for s, first, count in spans]
        places.append(torch.cat([torch.empty(0, dtype=torch.long), *runs]))
        if not spans:
            spans = ((len(segments), 0, 1),)
            segments.append(1)
        shards.append(spans)
    return SharedRow(tuple(segments), tuple(shards), tuple(places))


def _dummy(name: str, values: Tensor) -> Tensor:
    return values.new_full((*values.shape[:-1], 1), _DUMMY.get(name, 0))
