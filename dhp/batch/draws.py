"""Keys of what adapters draw for a step's samples, their pictures and tokens: see `dhp.core.draws`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dhp.batch.row_shards import Spans
from dhp.core.draws import DrawRun, draw_key
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples

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
    their sum.
    """
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
