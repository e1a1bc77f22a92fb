"""The longest prompt that is answered within so many bytes a rank: keys and values, and all else that prefill holds.

Every storage of a rank is counted as operations make it, without weights, up to the first token of an answer. Beside
dhp's ranks, which share the prompt: transformers in one process, and its layers dealt out over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import DynamicCache

from dhp.core.axes import Degrees
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from dhp.parallel.recompute.live_storages import LiveStorages
from experiments.long_context.inference import CUT, PLAIN, CutByLayers, load_plain, prompt_of
from experiments.long_context.longest import MIB, UNIT
from experiments.long_context.ranks import UPDATE
from experiments.long_context.work import make_row
from experiments.longest_sequence.search import largest_within
from experiments.pair import ONE, TEXT, pair_of, settings_of
from experiments.ranks import on_ranks

ALONE = "dhp, one rank"
SHARED = {
    ALONE: Degrees(),
    **{f"dhp, {axis} {ranks}": Degrees(**{axis: ranks}) for ranks in (2, 4) for axis in ("ulysses", "ring")},
    "dhp, ring 2 × ulysses 2": Degrees(ring=2, ulysses=2),
}
WAYS = {PLAIN: 1, **{f"{CUT}, {ranks}": ranks for ranks in (2, 4)}, **{name: of.world for name, of in SHARED.items()}}
Peak = Callable[[int], int]


def measure(model: str, budget_mib: int) -> Iterator[dict[str, Any]]:
    """A line for each way: tokens, and how many times those of one rank of its kind."""
    found: dict[str, int] = {}
    for ranks in sorted(set(WAYS.values())):
        ways = [way for way, of in WAYS.items() if of == ranks]
        found |= on_ranks(ranks, longest, model, ways, budget_mib * MIB)
        for way in ways:
            yield {
                "way": way,
                "ranks": ranks,
                "budget_mib": budget_mib,
                "tokens": found[way],
                "to_one_rank": round(found[way] / found[ALONE if way in SHARED else PLAIN], 3),
                "to_plain": round(found[way] / found[PLAIN], 3),
            }


def longest(model: str, ways: Sequence[str], budget: int) -> dict[str, int]:
    """On each rank: the most tokens of each way, all ranks alike. Raises ValueError where not even a unit fits."""
    found = {}
    for way in ways:
        found[way] = UNIT * largest_within(budget, _of_all(_peak(model, way)), 8 * WAYS[way])
        if not found[way]:
            raise ValueError(
                f"{way}: a prompt of {UNIT} tokens takes more than {budget / MIB:.1f} MiB; raise --budget-mib"
            )
    return found


def _of_all(peak: Peak) -> Peak:
    """Of the fullest rank, for so many units of tokens."""

    def of_all(size: int) -> int:
        most = torch.tensor(peak(size * UNIT))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    return of_all


def count(model: nn.Module, answer: Callable[[], Any]) -> int:
    """The most bytes of storages at any moment of `answer`, without weights and what was there before."""
    live = LiveStorages(shares=False)
    for tensor in (*model.parameters(), *model.buffers()):
        live.leave_out(tensor)
    live.begin()
    with torch.no_grad(), live:
        answer()
    return live.peak


def _peak(model: str, way: str) -> Peak:
    """From a number of tokens to the bytes that this rank takes at most."""
    if way in SHARED:
        return _of_shared(model, SHARED[way])
    return _of_plain(model) if way == PLAIN else _of_cut(model)


def _of_shared(model: str, degrees: Degrees) -> Peak:
    family = load_family(model)
    engine = TextEngine(settings_of(pair_of(family, ONE, degrees), TEXT, model, UPDATE))

    def peak(tokens: int) -> int:
        prompt = prompt_of(family, tokens, degrees, new=1)
        return count(engine.model, lambda: engine.generate(0, 0, prompt))

    return peak


def _of_plain(name: str) -> Peak:
    model = load_plain(name)

    def peak(tokens: int) -> int:
        given = torch.from_numpy(make_row(tokens).input_ids)[None]
        asked = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "past_key_values": DynamicCache()}
        return count(model, lambda: model.generate(input_ids=given, attention_mask=torch.ones_like(given), **asked))

    return peak


def _of_cut(name: str) -> Peak:
    way = CutByLayers(name, UNIT)

    def peak(tokens: int) -> int:
        given, cache = torch.from_numpy(make_row(tokens).input_ids)[None], DynamicCache()
        return count(way.model, lambda: way.step(given, 0, cache))

    return peak
