"""`evaluate needle`: what it refuses, what it asks, and what it writes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dhp.__main__ import main
from dhp.cli.evaluate import _hide
from dhp.core.reports import EvaluatedShare
from dhp.trainer.evaluation import Evaluation, _Done
from tests.helpers.graphs import make_graph
from tests.helpers.runs import train


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--frames", "8,3"], "--frames 3: two frames are a step in time; take even numbers from 4 on"),
        (["--frames", "7"], "--frames 7: two frames"),
        (["--depths", "0,1.5"], "--depths 1.5: 0 is a video's beginning and 1 its end"),
        (["--needles", "0"], "--needles 0: at least one video"),
        (["--image", "a.png"], "--image, --question and --answer make a needle together"),
        (["--haystack", "v.mp4"], "--haystack without --image"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "needle", "somewhere", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_an_evaluation_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "needel", "x"]) == 2
    assert "needel is no evaluation; did you mean needle?" in capsys.readouterr().err
    assert main(["evaluate", "--help"]) == 0


def test_every_cell_has_needles_of_several_colours() -> None:
    given = Namespace(depths=(0.0, 1.0), frames=(8, 16), needles=3, image=None, seed=0)
    hidden = _hide(given)
    assert [(one.depth, one.frames) for one in hidden[::3]] == [(0.0, 8), (0.0, 16), (1.0, 8), (1.0, 16)]
    assert len({one.needle.answer for one in hidden[:3]}) == 3
    assert len({one.seed for one in hidden}) == len(hidden)


def test_a_sample_is_found_where_all_of_its_targets_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas, whose two ranks share a row; the last batch has a sample for one of them alone."""
    evaluation = Evaluation.__new__(Evaluation)
    evaluation._graph = make_graph(text=_degrees())
    evaluation._datasets = [None]  # type: ignore[list-item]
    share = lambda right, targets: EvaluatedShare(0.0, right, targets)
    batches: list[Any] = [
        _Done(None, (share(1, 1), share(2, 2), share(2, 2), share(0, 1))),  # type: ignore[arg-type]
        _Done(None, (share(0, 0), share(3, 3), share(0, 0), share(0, 0))),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(Evaluation, "_batches", lambda self, data: batches)
    assert evaluation.each() == [True, False, True]


def _degrees() -> Any:
    from dhp.core.axes import Degrees

    return Degrees(data=2, ring=2)


@pytest.mark.slow
def test_a_model_that_knows_nothing_finds_nothing(tmp_path: Path, tiny_assets: Path) -> None:
    Image.new("RGB", (56, 56), (250, 10, 10)).save(tmp_path / "red.png")
    own = ["--image", str(tmp_path / "red.png"), "--question", "Which?", "--answer", "red"]
    outcome = train(
        *("evaluate", "needle", str(tiny_assets / "model"), "--config-name=tiny", f"--out={tmp_path / 'out'}"),
        *("--frames=4,300", "--depths=0,1", "--needles=1", *own),
        *("text.parallelism=sequence", "data.video_whole_frames=64"),
        module="dhp",
    )
    assert outcome.status == 0, outcome.stderr
    told = json.loads((tmp_path / "out" / "needle.json").read_text())
    assert told == {
        "model": str(tiny_assets / "model"),
        "frames": [4, 300],
        "depths": [0.0, 1.0],
        "needles": 1,
        "found": [[0.0, 0.0], [0.0, 0.0]],
    }
    with Image.open(tmp_path / "out" / "needle.png") as drawn:
        assert drawn.width > 200
