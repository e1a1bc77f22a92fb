"""Matrices that are cut over ranks, each put together on one rank, changed there, and handed back in parts.

The matrices of a group of ranks go in rounds of as many as there are ranks, one to each: a rank sends what it holds of
each, and gets as much back. So a rank's traffic is twice its own share of the matrices, whatever the number of ranks,
and no two ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.parallel.comm import exchange_rows
from dhp.parallel.optim.places import Place

Change = Callable[[Tensor], Tensor]  # a whole matrix → another of its shape and format


class WholeMatrices:
    """Some matrices of one group of ranks, all of which make it together. places: of what this rank holds of each."""

    def __init__(self, places: Sequence[Place], group: dist.ProcessGroup):
        self._group, self._own = group, places
        self._of_ranks: list[list[Place]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(self._of_ranks, list(places), group=group)

    def changed(self, part: Callable[[int], Tensor], change: Change, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The number of each matrix, and this rank's part of what `change` makes of it. All ranks together.

        part: this rank's part of a matrix, by its number. like: a tensor of the parts' device and format.
        """
        ranks, own = len(self._of_ranks), dist.get_rank(self._group)
        for first in range(0, len(self._own), ranks):
            round_of = range(first, min(first + ranks, len(self._own)))
            mine = first + own if first + own in round_of else None
            send = [self._own[number].count for number in round_of] + [0] * (ranks - len(round_of))
            held = [] if mine is None else [places[mine] for places in self._of_ranks]
            receive = [place.count for place in held] or [0] * ranks
            sent = torch.cat([part(number).flatten() for number in round_of])
            came = exchange_rows(sent, send, receive, self._group)
            back = _change(came, held, change) if held else like.new_empty(0)
            parts = exchange_rows(back, receive, send, self._group).split(send)
            for number, values in zip(round_of, parts):
                yield number, values.view(self._own[number].shape)


def _change(came: Tensor, held: Sequence[Place], change: Change) -> Tensor:
    """Put parts together, change the whole, and take it apart again."""
    whole = came.new_empty(held[0].whole)
    for place, values in zip(held, came.split([place.count for place in held]), strict=True):
        whole[place.numbers] = values.view(place.shape)
    changed = change(whole)
    return torch.cat([changed[place.numbers].flatten() for place in held])
