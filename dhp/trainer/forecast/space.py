"""What a search looks through: a configuration, what of it stays, the machine, and the samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dhp.config.layout import DEGREES
from dhp.config.parts import DECODER, sections
from dhp.config.schema import Config
from dhp.trainer.forecast.counted import Counted
from dhp.trainer.forecast.layouts import PartLayout, Refused
from dhp.trainer.forecast.loads import RunLoads
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.samples import Samples
from dhp.trainer.forecast.score import Rows, Scores
from dhp.trainer.forecast.scorer import Scorer
from dhp.trainer.forecast.whole_run import WholeRun

_ROWS = (1, 2, 4, 8)  # samples of a row that are tried


@dataclass(frozen=True)
class Scored:
    """Layouts of both parts on so many devices. scores: of the decoder and the tower, if there is one, by division of a
    step; count: of all of them. refused: what cannot be."""

    scores: tuple[tuple[Scores, Scores | None], ...]
    refused: tuple[Refused, ...]
    count: int


@dataclass(frozen=True)
class Space:
    """What is searched. config: composed, not resolved. held: keys of each part that stay (`held_keys`); rows_held:
    training.micro_batch_size stays; schedule_held, devices_held: training.schedule, cluster.collocate.

    known, scored: what was made before, which spaces share that differ in devices and their memory alone."""

    config: Config
    whole: WholeRun
    counted: Counted
    machine: Machine
    samples: Samples
    held: Mapping[str, Collection[str]]
    rows_held: bool = False
    schedule_held: bool = False
    devices_held: bool = False
    known: dict[object, RunLoads] = field(default_factory=dict, compare=False)
    scored: dict[tuple[int, int | None], Scored] = field(default_factory=dict, compare=False)

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.counted, self.machine, self.loads)

    def divisions(self) -> Iterator[tuple[int, int, int]]:
        """Samples of a row, replicas and micro-batches of a step's batch."""
        training = self.config.training
        for size in (training.micro_batch_size,) if self.rows_held else _ROWS:
            for replicas in range(1, self.machine.count + 1):
                if training.batch_size % (size * replicas) == 0:
                    yield size, replicas, training.batch_size // (size * replicas)

    def loads(self, layout: PartLayout, rows: Rows) -> RunLoads:
        """Of a division, quickly."""
        packing = self.config.data.packing or (layout.part == DECODER and layout.degrees.sequence > 1)
        key = (rows, packing)
        if key not in self.known:
            text = replace(sections(self.config)[DECODER], **_replicas(rows.replicas))
            training = replace(self.config.training, micro_batch_size=rows.micro_batch_size)
            data = replace(self.config.data, packing=packing)
            config = replace(self.config, text=text, training=training, data=data)
            self.known[key] = self.samples.loads(config, quick=True)
        return self.known[key]


def _replicas(count: int) -> dict[str, Any]:
    return {**dict.fromkeys(DEGREES, 1), "parallelism": "data", "num_actors": count, "data": count}
