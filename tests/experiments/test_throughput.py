"""The largest batch that fits, a device's bytes by what its two ranks counted, and the rows and picture of a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest
from PIL import Image

from experiments import values
from experiments.pair import TEXT, VISION
from experiments.published.tables import read_table
from experiments.throughput import __main__ as throughput
from experiments.throughput import cells
from experiments.throughput.cells import LAYOUTS, MIB, SIDES, Cell, Fit, budget_of, find_batch
from experiments.throughput.counted import Turn, count_device, device_peak
from experiments.throughput.plot import draw
from tests.helpers.figures import Sentences, missing, rows, span

PAGE = "experiments/throughput/README.md"


class _Planned(Cell):
    """A cell whose plan says 10 bytes a sample."""

    def device_bytes(self, samples: int) -> int:
        return 10 * samples


def cell(layout: str = "SP+TP", size: str = "1k", models: Path = Path()) -> Cell:
    return Cell(models, "3B", size, layout)


@pytest.mark.parametrize(
    ("layout", "budget", "wanted"),
    [
        ("SP+TP", 80, Fit(8, 80, 0)),
        ("SP+TP", 79, Fit(4, 40, 8)),
        ("SP+TP", 10, Fit(1, 10, 2)),
        ("SP+TP", 9, Fit(0, 10, 1)),
        ("ZeRO-3", 19, Fit(0, 20, 2)),  # one sample for each of its replicas
    ],
)
def test_the_largest_batch_that_fits(layout: str, budget: int, wanted: Fit) -> None:
    assert find_batch(_Planned(Path(), "3B", "1k", layout), budget) == wanted


def turns(**given: tuple[int, int]) -> dict[str, Turn]:
    return {name: Turn(*found) for name, found in given.items()}


def test_a_devices_peak_is_of_one_rank_and_of_what_the_other_holds_meanwhile() -> None:
    vision = turns(forward_step=(50, 30), backward_step=(90, 20), optimizer_step=(25, 10))
    text = turns(forward_step=(60, 40), backward_step=(70, 15), optimizer_step=(18, 12))
    ranks: Mapping[str, tuple[int, Mapping[str, Turn]]] = {VISION: (10, vision), TEXT: (12, text)}
    assert device_peak(ranks) == 90 + 15  # vision's backward, behind text's
    ranks = {VISION: (10, vision), TEXT: (12, text | turns(backward_step=(80, 15)))}
    assert device_peak(ranks) == 80 + 30  # text's backward, while vision keeps what its forward kept


def test_sizes_are_those_that_were_published() -> None:
    published = {row["patches"] for row in read_table("ray_cells")["rows"]}
    assert {side * side for side in SIDES.values()} == published
    assert set(LAYOUTS) == {row["layout"] for row in read_table("ray_cells")["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_a_plan_are_those_that_are_counted(layout: str, tmp_path: Path) -> None:
    one = cell(layout, models=tmp_path)
    assert count_device(one.of_batch(2)) == pytest.approx(one.device_bytes(2), rel=0.05)


def test_a_run_is_planned_timed_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput, "time_cells", lambda fits, rounds: {one: [2.0, 1.0, 3.0] for one in fits})
    monkeypatch.setattr(throughput, "count_device", lambda layout: (1 if "batch_size=4" in str(layout) else 99) * MIB)
    monkeypatch.setattr(
        throughput, "find_batch", lambda one, budget: Fit(4, MIB, 8) if one.size == "1k" else Fit(0, 9, 1)
    )
    monkeypatch.setattr(cells, "save_model", lambda *_: "model")
    asked = ["--models", "32B", "--sizes", "1k", "65k", "--budget-mib", "50", "--plot", str(tmp_path / "figure.png")]
    throughput.main(asked)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["size"], row["layout"]) for row in found] == [(s, layout) for s in ("1k", "65k") for layout in LAYOUTS]
    first = found[0]
    assert (first["patches_per_s"], first["published_patches_per_s"]) == (4 * 1024 / 2.0, 4264)
    assert (first["counted_mib"], first["larger_mib"], first["as_planned"]) == (1.0, 99.0, True)
    assert [row for row in found if "as_planned" in row] == [first]  # one of six
    assert found[-1]["published_patches_per_s"] is None and not found[-1]["fits"]
    assert found[-1]["patches_per_s"] is None
    with Image.open(tmp_path / "figure.png") as drawn:
        assert drawn.size[0] > 300
    draw(found[3:], tmp_path / "nothing.png")


def test_a_device_has_what_the_longest_picture_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        Cell, "device_bytes", lambda self, samples: asked.append((self.size, self.layout, samples)) or 1000
    )
    assert budget_of(Path(), "3B") == 1050 and asked == [("65k", "SP+TP", 1)]


def sentences() -> Sentences:
    found = rows("throughput")
    in_order = sorted(found, key=lambda row: bool(row["steps"]))  # timed rows replace those that were only planned
    cells = {(row["model"], row["size"], row["layout"]): row for row in in_order}
    for model, size in dict.fromkeys((model, size) for model, size, _ in cells):
        own = [cells[model, size, layout] for layout in ("SP+TP", "TP", "ZeRO-3")]
        speeds = [
            f"{row['patches_per_s']:,.0f} ({row['batch']})" if row["steps"] else "out of memory" for row in own
        ]  # fmt: skip
        yield PAGE, f"| {model} | {size} | {' | '.join(speeds)} |"
    for than in ("TP", "ZeRO-3"):
        ratios = values.faster(than)(list(cells.values()))
        yield PAGE, f"{span(ratios)} × {'the patches a second of TP' if than == 'TP' else 'those of ZeRO-3'}"
        yield PAGE, f"{median(ratios):.2f} × in the median"
        if than == "ZeRO-3":
            yield PAGE, f"ZeRO-3 is the faster one in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} cells"
    checked = [row for row in found if "as_planned" in row]
    assert len(checked) == 11 and all(row["as_planned"] for row in checked)
    assert sum("larger_mib" in row for row in checked) == 7
    assert all(abs(row["planned_mib"] / row["counted_mib"] - 1) < 0.02 for row in checked)


def test_the_page_has_the_rows() -> None:
    assert missing(sentences()) == []
