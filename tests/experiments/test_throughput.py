"""The cells of figure 2: their runs, the batch that is taken, and what dry runs say of them."""

from pathlib import Path
from typing import Any

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from experiments.commands import ROOT
from experiments.throughput.__main__ import cell_rows, planned, small_model, states_bytes
from experiments.throughput.cells import LAYOUTS, SIDES, Cell, published
from tests.helpers.figures import Sentences, missing, rows

CONFIG = "qwen2_5_vl_32b"


def test_cells_are_the_published_ones() -> None:
    assert [Cell("SP+TP", size, 8).patches for size in SIDES] == [1024, 4096, 9216, 16384, 25600, 65536]
    assert published(Cell("TP", "65k", 8)) == {"published": 16631, "published_batch": 2}
    assert published(Cell("ZeRO-3", "16k", 8)) == {"published": None, "published_batch": None}
    assert [Cell(layout, "1k", 8).batches() for layout in LAYOUTS] == [(8, 4, 2, 1), (8, 4, 2, 1), (8,)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_has_the_layout_and_the_picture_of_its_cell(layout: str) -> None:
    cell = Cell(layout, "9k", 8)
    config = resolve(compose_config(CONFIG, str(ROOT / "configs"), cell.settings(8)))
    degree = {"SP+TP": ("ulysses", "tensor"), "TP": ("tensor", "tensor"), "ZeRO-3": ("data", "data")}[layout]
    assert [getattr(part, one) for part, one in zip((config.vision, config.text), degree, strict=True)] == [8, 8]
    assert config.vision.zero_stage == {"SP+TP": 1, "TP": 0, "ZeRO-3": 3}[layout]
    assert config.data.min_pixels == config.data.max_pixels == (96 * 14) ** 2
    assert config.training.batch_size == 8 and config.training.micro_batch_size == (1 if layout == "ZeRO-3" else 8)


def test_the_largest_batch_that_fits_is_taken() -> None:
    tried = []

    def attempt(cell: Cell, batch: int) -> dict[str, Any] | None:
        tried.append((cell.size, batch))
        return {"step_s": 0.5} if batch * cell.patches <= 4 * 25600 else None

    rows = list(cell_rows([Cell("TP", "25k", 8), Cell("TP", "65k", 8), Cell("ZeRO-3", "25k", 8)], attempt))
    assert [(row["batch"], row["patches_s"]) for row in rows] == [(4, 204800), (1, 131072), (None, None)]
    assert tried == [("25k", 8), ("25k", 4), ("65k", 4), ("65k", 2), ("65k", 1), ("25k", 8)]


def test_dry_runs_say_which_batch_fits() -> None:
    """By SP+TP those that were published; ZeRO-3 has no room for the longest pictures."""
    cells = [Cell("SP+TP", size, 8) for size in ("1k", "16k", "25k", "65k")]
    rows = list(cell_rows([*cells, Cell("ZeRO-3", "65k", 8)], lambda cell, batch: planned(CONFIG, [], cell, batch)))
    assert [row["batch"] for row in rows] == [8, 8, 4, 2, None]
    assert all(row["patches_s"] > row["published"] for row in rows[:-1])
    assert all(0 < row["gib"] < 76 for row in rows[:-1])


def figures() -> Sentences:
    """What the README has of the rows that are kept."""
    page, of_plan = "experiments/throughput/README.md", rows("throughput", device="plan")
    found = {(row["layout"], row["size"]): row for row in of_plan}
    for size in SIDES:
        own = [found[layout, size] for layout in LAYOUTS]
        shown = [cell(row[key], row[batch]) for row in own for key, batch in COLUMNS.items()]
        ratios = [f"{own[0][key] / own[1][key]:.2f} ×" for key in COLUMNS]
        yield page, f"| {size} | {' | '.join([*shown, *ratios])} |"
    alike = sum(row["batch"] == row["published_batch"] for row in found.values())
    yield page, f"{alike} of {len(found)} cells have the published batch"
    here = {(row["layout"], row["size"]): row for row in rows("throughput", device="cpu")}
    for size in ("1k", "4k"):
        own = [here[layout, size] for layout in LAYOUTS]
        shown = [cell(row["patches_s"], row["batch"]) for row in own]
        yield page, f"| {size} | {' | '.join(shown)} | {own[0]['patches_s'] / own[1]['patches_s']:.2f} × |"
    assert all((row["patches_s"] is None) == (row["size"] not in ("1k", "4k")) for row in here.values())
    yield page, f"| 9k to 65k | {' | '.join(['out of memory'] * 3)} | |"


COLUMNS = {"patches_s": "batch", "published": "published_batch"}


def cell(patches: int | None, batch: int | None) -> str:
    return "out of memory" if patches is None else f"{patches:,} ({batch})"


def test_the_page_has_the_rows() -> None:
    assert missing(figures()) == []


def test_a_cpu_has_a_model_of_the_same_proportions(tmp_path: Path) -> None:
    small = small_model(tmp_path)
    config = resolve(compose_config("tiny", str(ROOT / "configs"), [*Cell("SP+TP", "1k", 2).settings(8), *small]))
    assert (config.text.tensor, config.vision.ulysses, config.text.dtype) == (2, 2, "float32")
    own, theirs = states_bytes("tiny", small, 2), states_bytes(CONFIG, [], 8)
    assert 3.5e10 < theirs < 5e10 and 1e8 < own < 3e8
