"""Shards a row's tokens over ranks, with keys for draws."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from dhp.batch.assign_images import TOLERANCE, assign_longest_first
from dhp.batch.collate import BY_PICTURE
from dhp.core.batch import TokenRange
from dhp.core.draws import DrawRun, draw_key
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.parallel.attention.shard_plan import ShardPlan, cut_ranges, even_counts, is_whole, join_ranges, zigzag_chunks

ROOM = 1.1  # no rank gets more than so many times an even share of the row's tokens: they are what fills memory


@dataclass(frozen=True)
class SequenceGroups:
    """The samples of a row by how far they are divided: their numbers in the row.

    shared: over all ranks. of_rings: over the Ulysses ranks of each ring rank. of_ranks: whole on each rank, Ulysses
    innermost."""

    shared: tuple[int, ...]
    of_rings: tuple[tuple[int, ...], ...] = ()
    of_ranks: tuple[tuple[int, ...], ...] = ()


def divide_all(lengths: Sequence[int], ring: int, ulysses: int) -> SequenceGroups:
    """Every sample over all ranks."""
    return SequenceGroups(tuple(range(len(lengths))), ((),) * ring, ((),) * (ring * ulysses))


def choose_groups(lengths: Sequence[int], ring: int, ulysses: int, crossover: float) -> SequenceGroups:
    """The division that exchanges least while ranks stay even: no rank has more than `TOLERANCE` times the mean cost,
    nor more than `ROOM` times the mean number of tokens.

    crossover: tokens at which causal attention of a sample costs as much as all the rest."""
    costs = [n * (1.0 + n / crossover) for n in lengths]
    dearest = sorted(range(len(lengths)), key=lambda sample: (-costs[sample], sample))
    even = sum(costs) / (ring * ulysses)
    beyond_ring = sum(cost > even * ulysses * TOLERANCE for cost in costs)
    beyond_rank = sum(cost > even * TOLERANCE for cost in costs)
    for shared in _more(beyond_ring, len(lengths)):
        for divided in _more(max(beyond_rank, shared), len(lengths)):
            if divided > shared and ulysses == 1:
                break  # a ring rank is one rank
            chosen = dearest[:shared], dearest[shared:divided], dearest[divided:]
            groups = _assign(chosen, costs, lengths, ring, ulysses)
            if groups is not None:
                return groups
    return divide_all(lengths, ring, ulysses)


def grouped_plan(lengths: Sequence[int], ring: int, ulysses: int, groups: SequenceGroups) -> ShardPlan:
    """The shards of these groups: samples divided over all in the two-ended layout of `zigzag_plan`, each rank's
    tokens in the order of the row."""
    shared = zigzag_chunks([(sample, lengths[sample]) for sample in groups.shared], ring)
    shards = []
    for ring_rank in range(ring):
        inside = [TokenRange(sample, 0, lengths[sample]) for sample in groups.of_rings[ring_rank]]
        chunk = join_ranges(sorted([*shared[ring_rank], *inside], key=_place))
        parts = cut_ranges(chunk, even_counts(sum(piece.count for piece in chunk), ulysses))
        whole = groups.of_ranks[ring_rank * ulysses : (ring_rank + 1) * ulysses]
        own = ([TokenRange(sample, 0, lengths[sample]) for sample in of_rank] for of_rank in whole)
        shards.append(tuple(tuple(sorted([*part, *more], key=_place)) for part, more in zip(parts, own, strict=True)))
    return ShardPlan(tuple(lengths), tuple(shards))


def _place(piece: TokenRange) -> tuple[int, int]:
    return piece.segment, piece.first


def _more(first: int, last: int) -> Iterator[int]:
    """`first` and more, in growing steps, up to `last`."""
    step, number = 1, first
    while number < last:
        yield number
        number, step = number + step, 2 * step
    yield last


def _assign(
    chosen: tuple[Sequence[int], ...], costs: Sequence[float], lengths: Sequence[int], ring: int, ulysses: int
) -> SequenceGroups | None:
    """Samples by how far they are divided, given to ring ranks and ranks; None: some rank would have too much."""
    ranks = ring * ulysses
    shared, in_rings, whole = chosen
    of_rings = _assigned(in_rings, costs, ring)
    of_ranks = _assigned(whole, costs, ranks)
    for values, limit in ((costs, TOLERANCE), (lengths, ROOM)):
        loads = [sum(values[sample] for sample in held) for held in of_ranks]
        from_rings = [sum(values[sample] for sample in held) / ulysses for held in of_rings]
        most = max(load + from_rings[rank // ulysses] for rank, load in enumerate(loads))
        alike = sum(values[sample] for sample in shared) / ranks
        if most + alike > limit * sum(values) / ranks:
            return None
    return SequenceGroups(tuple(sorted(shared)), of_rings, of_ranks)


def _assigned(samples: Sequence[int], costs: Sequence[float], bins: int) -> tuple[tuple[int, ...], ...]:
    bins_of = assign_longest_first([costs[sample] for sample in samples], bins)
    return tuple(tuple(sorted(samples[i] for i in held)) for held in bins_of)


Spans = tuple[tuple[int, int, int], ...]  # (segment, first token, tokens)


@dataclass(frozen=True)
class SharedRow:
    """How ranks share a row.

    lengths: tokens of each segment: the samples, and behind them a segment of one token for each rank without any,
    which takes part in the collectives all the same. shards: for each rank (Ulysses innermost), what it holds, in the
    order of its tokens. places: for each rank, its tokens' places in the row, int64, without the dummy."""

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
        """Blocks of all segments, from those of the row (`dhp.core.batch.TextInput.blocks`)."""
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


Shown = TypeVar("Shown")
FILLER: DrawRun = (0, 0, 1)  # one token that counts for nothing


@dataclass(frozen=True)
class Draws:
    """What of a run draws. seed: the run's. parts: that have adapters with dropout."""

    seed: int = 0
    parts: tuple[str, ...] = ()


NO_DRAWS = Draws()
StepKeys = tuple[tuple[tuple[int, ...], ...], ...]  # [micro-batch][replica][sample]


def sample_keys(samples: StepSamples, seed: int) -> StepKeys:
    """A key for each sample of a step: by the step and by which sample it is, not by where the layout puts it.

    A sample that the step has more than once has a key for each time; which of them is where makes no difference to
    their sum."""
    seen = Counter[tuple[str, int]]()

    def key(sample: Sample) -> int:
        name = (sample.dataset, sample.position)
        seen[name] += 1
        return draw_key(seed, samples.step, *name, seen[name])

    return tuple(tuple(tuple(map(key, row)) for row in of_replicas) for of_replicas in samples.samples)


def with_keys(sample: int | None, pictures: Iterable[Shown]) -> Iterator[tuple[int, Shown]]:
    """A sample's pictures, or clips, each with a key by its number. sample: its own key; None: nothing draws."""
    for number, picture in enumerate(pictures):
        yield 0 if sample is None else draw_key(sample, number), picture


def runs_of_rows(keys: Sequence[int], lengths: Sequence[int], width: int) -> tuple[DrawRun, ...]:
    """The runs of a replica's samples of these lengths, each in a row of `width` tokens; 0: behind one another in one.
    Without samples there is one token that fills up."""
    found: list[DrawRun] = []
    for key, length in zip(keys, lengths, strict=True):
        found.append((key, 0, length))
        if width > length:
            found.append((0, 0, width - length))
    return tuple(found) or (FILLER,)


def runs_of_shard(keys: Sequence[int], spans: Spans) -> tuple[DrawRun, ...]:
    """The runs of a rank that shares a row of samples with these keys. Segments behind the samples fill up."""
    return tuple((keys[segment] if segment < len(keys) else 0, first, count) for segment, first, count in spans)
