"""What each shard of a step has to compute, relative to the others of its part: ranks' seconds are held against it."""

from __future__ import annotations

from collections.abc import Sequence

from dhp.batch.assign_images import segment_cost
from dhp.batch.collate import Row
from dhp.core.batch import TextInput, VisionInput
from dhp.models.flops import TextWork


def encoder_work(inputs: Sequence[Sequence[VisionInput]], ranks: int, crossover: float) -> tuple[float, ...]:
    """Of each shard of an encoder, its patches at what attention makes them cost. inputs: [micro-batch][shard]. ranks:
    that share a sequence. crossover: see `dhp.batch.assign_images.segment_cost`."""
    shards = range(len(inputs[0]) if inputs else 0)
    return tuple(sum(_patches(of[shard], shard % ranks, crossover) for of in inputs) for shard in shards)


def _patches(one: VisionInput, rank: int, crossover: float) -> float:
    if not any(one.rows):  # a dummy window
        return 0.0
    if rank >= len(one.shards):
        return sum(segment_cost(length, crossover) for length in one.segment_lengths)
    own = ((one.segment_lengths[segment], count) for segment, _, count in one.shards[rank])
    return sum(segment_cost(length, crossover) * count / length for length, count in own)


def text_work(
    inputs: Sequence[Sequence[TextInput]], rows: Sequence[Sequence[Row]], ranks: int, work: TextWork
) -> tuple[float, ...]:
    """Multiply-adds of each text shard, padding among them. inputs: [micro-batch][shard]; rows: the samples of each
    replica, [micro-batch][replica]; ranks: that share a replica's row, and the pairs and targets of its samples
    evenly."""
    found = [0.0] * len(inputs[0]) if inputs else []
    for of_shards, of_replicas in zip(inputs, rows, strict=True):
        for shard, one in enumerate(of_shards):
            count, length = one.tensors["input_ids"].shape
            lengths = [length] * count if one.lengths is None else one.lengths
            targets = sum(sample.target_tokens for sample in of_replicas[shard // ranks])
            shared = work.pair * sum(n * n for n in lengths) / 2 + work.target * targets
            found[shard] += work.token * count * length + shared / ranks
    return tuple(found)
