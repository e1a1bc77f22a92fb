"""The cells: a scaled model, a picture's patches and a layout; the batch that fits into a device, by a plan's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments.plan_accuracy.cases import both
from experiments.plan_accuracy.layout import Layout
from experiments.plan_accuracy.memory import any_machine
from experiments.plan_accuracy.models import Load, Shape, save_model

# Qwen2.5-VL: widths by 16, layers by 8, so that one of four tower layers, not of eight, attends to whole pictures.
_TOWER = (4, 80, 216)
SHAPES = {
    "3B": Shape(_TOWER, (5, 128, 688)),
    "7B": Shape(_TOWER, (4, 224, 1184)),
    "32B": Shape(_TOWER, (8, 320, 1728)),
    "72B": Shape(_TOWER, (10, 512, 1848)),
}
SIDES = {"1k": 32, "4k": 64, "9k": 96, "16k": 128, "25k": 160, "65k": 256}  # patches along a side of a picture
LAYOUTS = {
    "SP+TP": (*both("tensor"), "vision.parallelism=sequence"),
    "TP": both("tensor"),
    "ZeRO-3": both("data", "zero_stage=3"),
}
REPLICAS = {"ZeRO-3": 2}  # of other layouts one
BATCHES = (8, 4, 2, 1)
LONGEST, ROOM = "65k", 1.05  # a device has as much as a picture of that length takes by SP+TP, and a twentieth more
_ALWAYS = ("data.packing=true", "vision.recompute=full", "text.recompute=full")
MIB = 2**20


@dataclass(frozen=True)
class Cell:
    """One bar of the figure. models: folder of those that were made."""

    models: Path
    model: str
    size: str
    layout: str

    def of_batch(self, samples: int) -> Layout:
        """With so many samples a step, in one micro-batch of each replica."""
        each = samples // REPLICAS.get(self.layout, 1)
        sizes = (f"training.batch_size={samples}", f"training.micro_batch_size={each}")
        side = SIDES[self.size]
        model = save_model(self.models, self.model, SHAPES)
        return Layout(model, Load(side, side), (*LAYOUTS[self.layout], *_ALWAYS, *sizes))

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """That give each replica a sample, the largest first."""
        return tuple(batch for batch in BATCHES if batch >= REPLICAS.get(self.layout, 1))

    def device_bytes(self, samples: int) -> int:
        """Of the fullest device, by a plan."""
        return round(self.of_batch(samples).expected(any_machine()).peak.total)


@dataclass(frozen=True)
class Fit:
    """Of a cell. batch: the largest that fits, 0 where none does; nbytes: of it by a plan, or of the smallest batch
    where none fits; larger: the smallest batch that does not fit, 0 where all do."""

    batch: int
    nbytes: int
    larger: int


def find_batch(cell: Cell, budget: int) -> Fit:
    """budget: bytes of a device."""
    larger, nbytes = 0, 0
    for batch in cell.batches:
        nbytes = cell.device_bytes(batch)
        if nbytes <= budget:
            return Fit(batch, nbytes, larger)
        larger = batch
    return Fit(0, nbytes, larger)


def budget_of(models: Path, model: str) -> int:
    """Bytes that a device has for a model."""
    return round(ROOM * Cell(models, model, LONGEST, "SP+TP").device_bytes(1))


def cells_of(models: Path, model: str, sizes: list[str], layouts: list[str]) -> Iterator[list[Cell]]:
    """All layouts of each size."""
    for size in sizes:
        yield [Cell(models, model, size, layout) for layout in layouts]
