"""Reading beside torch's DataLoader: both make the same patches and tokens, and shares are of all seconds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.reading.__main__ import CAUSES, _counted, open_loader, open_reader, rows
from experiments.reading.made import KEY_FRAMES, VIDEO_FRAMES, make_model, make_samples
from tests.helpers.figures import cells, fixed, missing, one

PAGE = "experiments/reading/README.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reading") / "model")


def test_both_read_the_same(model: Path, tmp_path: Path) -> None:
    file = make_samples(tmp_path / "data", "small", 8)
    (theirs,) = open_loader(model, file)
    ours = open_reader(model, file).model_inputs(0)
    pixels = torch.cat([value for name, value in ours.items() if name.endswith("pixel_values")])
    assert torch.equal(pixels, theirs["pixel_values"])
    (ids,) = (value for name, value in ours.items() if name.endswith("input_ids"))
    for own, their, kept in zip(ids, theirs["input_ids"], theirs["attention_mask"], strict=True):
        assert their[kept.bool()].tolist() == own[: int(kept.sum())].tolist()


def test_a_row_has_every_way_and_shares_of_one(tmp_path: Path) -> None:
    (row,) = rows(["small"], 8, 1, tmp_path)
    assert {"dhp_samples_s", "loader_samples_s", "reduced_samples_s", "dhp_over_loader"} <= row.keys()
    assert row["shares"].keys() == CAUSES.keys() and abs(sum(row["shares"].values()) - 1) < 0.01
    assert all(share > 0 for share in row["shares"].values())


def test_seconds_of_what_is_called_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = iter([0.0, 1.0, 3.0, 10.0]), dict.fromkeys(("outer", "inner"), 0.0)
    monkeypatch.setattr("experiments.reading.__main__.time.perf_counter", lambda: next(clock))
    with _counted(f"{__name__}.outer", "outer", seconds), _counted(f"{__name__}.inner", "inner", seconds):  # type: ignore[arg-type]
        assert outer() == 7
    assert seconds == {"outer": 8.0, "inner": 2.0}


def outer() -> int:
    return globals()["inner"]() + 1


def inner() -> int:
    return 6


def test_films_have_frames_that_few_are_taken_of() -> None:
    assert VIDEO_FRAMES / 8 > 100 > KEY_FRAMES


def test_the_page_has_the_rows() -> None:
    sentences: list[Any] = []
    for kind in ("small", "middle", "large", "video"):
        row = one("reading", kind=kind)
        figures = [fixed(row[f"{way}_samples_s"], 1) for way in ("loader", "dhp")]
        sentences.append((PAGE, cells(kind, *figures, fixed(row["dhp_over_loader"], 2))))
    assert missing(sentences) == [] and np.all([one("reading", kind="large")["reduced_over_loader"] > 0])
