"""How long a training step takes with four ranks that share a row, in each way, beside a peer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any
from unittest import mock

import torch.distributed as dist

from dhp.batch.row_shards import SequenceGroups
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.parallel.attention.shard_plan import ShardPlan, contiguous_plan
from experiments.long_context.peer import Peer
from experiments.long_context.ranks import Decoder
from experiments.ranks import on_ranks

RANKS = 4
PEER = "transformers + DeepSpeed Ulysses 4"
WAYS = {
    "ulysses 4": Degrees(ulysses=4),
    "ring 4": Degrees(ring=4),
    "ring 4, each the next part": Degrees(ring=4),
    "ring 2 × ulysses 2": Degrees(ring=2, ulysses=2),
    "ring 2 × tensor 2": Degrees(ring=2, tensor=2),
}
LONG = 1 << 16  # tokens from which on the first round counts: what it does once is nothing beside minutes
SAME = 2e-5  # relative, of losses in float32


def measure(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way and length: median seconds, and the median over rounds of the peer's seconds to its."""
    for tokens in given.tokens:
        rounds = given.rounds if tokens < 1 << 17 else 1
        seconds = on_ranks(RANKS, _measure, model, tokens, rounds)
        for way, of_way in seconds.items():
            ratios = [peer / own for peer, own in zip(seconds[PEER], of_way, strict=True)]
            yield {
                "way": way,
                "layers": given.layers,
                "tokens": tokens,
                "rounds": rounds,
                "seconds": round(median(of_way), 3),
                "speed_to_peer": round(median(ratios), 3),
            }


def _measure(model: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """On each rank: seconds of each way in each round, all ranks' together; the first round does not count, unless
    it is long."""
    takes = dict(_takes(model, tokens))
    seconds: dict[str, list[float]] = {way: [] for way in takes}
    for number in range(rounds + (tokens < LONG)):
        losses = {}
        for way in list(takes)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            losses[way] = takes[way]()
            dist.barrier()
            if number or tokens >= LONG:
                seconds[way].append(time.perf_counter() - begun)
        if number == 0:
            _require_same(losses)
    return seconds


def _takes(model: str, tokens: int) -> Iterator[tuple[str, Callable[[], float]]]:
    for way, degrees in WAYS.items():
        decoder = Decoder(model, degrees)
        data = _contiguous(decoder, tokens) if way.endswith("the next part") else decoder.data(tokens)
        yield way, lambda decoder=decoder, data=data: _loss(decoder, data)
    peer = Peer(model)
    row = peer.data(tokens)
    yield PEER, lambda: peer.step(row, tokens)


def _contiguous(decoder: Decoder, tokens: int) -> StepData:
    """A row cut as rings that are not balanced cut it."""

    def plan(lengths: Sequence[int], ring: int, ulysses: int, groups: SequenceGroups) -> ShardPlan:
        return contiguous_plan(lengths, ring, ulysses)

    with mock.patch("dhp.batch.shard.grouped_plan", plan):
        return decoder.data(tokens)


def _loss(decoder: Decoder, data: StepData) -> float:
    own = decoder.step(data).loss
    of_ranks: list[float] = [0.0] * RANKS
    dist.all_gather_object(of_ranks, own)
    return sum(of_ranks[:: decoder.degrees.tensor])


def _require_same(losses: dict[str, float]) -> None:
    """Raises RuntimeError unless all ways computed the same in their first step."""
    off = {way: loss for way, loss in losses.items() if abs(loss / losses[PEER] - 1) > SAME}
    if off:
        raise RuntimeError(f"the first losses differ from the peer's {losses[PEER]}: {off}")
