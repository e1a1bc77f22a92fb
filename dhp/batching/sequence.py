"""Shards a text replica's row over the ranks that share its sequence, by a plan.

Targets were shifted and positions counted before, on the whole row, so no rank needs a neighbour's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dhp.batching.collate import BY_PICTURE
from dhp.parallel.attention.shard_plan import ShardPlan, is_whole

Spans = tuple[tuple[int, int, int], ...]  # (segment, first token, tokens)


@dataclass(frozen=True)
class SharedRow:
    """How ranks share a row.

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

    def cut(self, tensors: dict[str, Tensor], rank: int, fills: Mapping[str, float]) -> dict[str, Tensor]:
        """A rank's share of the tensors with an element a token, in the last dimension. Tensors with a row a picture
        are dropped: they were needed for positions alone. fills: values of dummy tokens, where they are not 0."""
        places = self.places[rank]
        own = {name: values for name, values in tensors.items() if name not in BY_PICTURE}
        if not len(places):
            return {name: _dummy(values, fills.get(name, 0)) for name, values in own.items()}
        return {name: values[..., places] for name, values in own.items()}

    def with_dummies(self, blocks: Tensor | None) -> Tensor | None:
        """Blocks of all segments, from those of the row (`dhp.base.messages.TextInput.blocks`)."""
        if blocks is None:
            return None
        return torch.cat([blocks, blocks.new_full((sum(self.lengths) - len(blocks),), -1)])


def share_row(plan: ShardPlan) -> SharedRow:
    """Share a row among ranks. plan: of its samples; each rank's tokens in the order of the row."""
    starts = [0, *accumulate(plan.lengths)]
    segments, shards, places = list(plan.lengths), [], []
    for held in (shard for of_ring in plan.shards for shard in of_ring):
        spans = tuple((piece.segment, piece.first, piece.count) for piece in held)
        runs = [torch.arange(starts[s] + first, starts[s] + first + count) for s, first, count in spans]
        places.append(torch.cat([torch.empty(0, dtype=torch.long), *runs]))
        if not spans:
            spans = ((len(segments), 0, 1),)
            segments.append(1)
        shards.append(spans)
    return SharedRow(tuple(segments), tuple(shards), tuple(places))


def count_divided(plan: ShardPlan) -> int:
    """Tokens of samples that are divided over several ranks, though they are no longer than a rank's even share of the
    row: what communicates without need."""
    share = -(-sum(plan.lengths) // (plan.ring * plan.ulysses))
    held = [piece for of_ring in plan.shards for shard in of_ring for piece in shard]
    divided = {piece.segment for piece in held if not is_whole(piece, plan.lengths)}
    return sum(plan.lengths[sample] for sample in divided if plan.lengths[sample] <= share)


def _dummy(values: Tensor, fill: float) -> Tensor:
    return values.new_full((*values.shape[:-1], 1), fill)
