"""What bounds a run, and the charts that show it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from dhp.report import tables
from dhp.report.bound import HEALTHY, Cause, find_causes, sentence, times_of
from dhp.report.charts import (
    HEIGHT,
    INK,
    MOST_POINTS,
    Bar,
    Box,
    Dot,
    Drawing,
    Label,
    Line,
    Pixels,
    Polyline,
    heat_map,
    line_chart,
    spread_bars,
    stacked_bars,
    thinned,
    ticks,
)
from dhp.report.run_record import read_run
from dhp.report.tables import SIDE, Gallery
from tests.helpers.made_runs import healthy_ranks, make_run


def slow_text_rank(step: int) -> Mapping[str, Any]:
    """Rank 1 of text takes 1.5 times as long, for which rank 0 waits in collectives."""
    ranks = healthy_ranks()
    ranks["text"] = {
        "forward": [0.15, 0.225],
        "backward": [0.3, 0.45],
        "optimizer": [0.02, 0.03],
        "comm": [0.245, 0.01],
    }
    return ranks


def uneven_vision(step: int) -> Mapping[str, Any]:
    """One rank of vision has 1.4 times the mean's work, the other 0.6 times."""
    ranks = healthy_ranks()
    ranks["vision"] = {"forward": [0.21, 0.09], "backward": [0.42, 0.18], "comm": [0.01, 0.37]}
    return ranks


def sending(step: int) -> Mapping[str, Any]:
    """Collectives of text take 0.6 s."""
    ranks = healthy_ranks()
    ranks["text"]["comm"] = [0.6, 0.61]
    return ranks


def tower_on_one_device(step: int) -> Mapping[str, Any]:
    """Vision has one rank of two devices."""
    ranks = healthy_ranks()
    ranks["vision"] = {"forward": [0.3], "backward": [0.6], "comm": [0.0]}
    return ranks


def largest(run_dir: Path) -> Cause:
    record = read_run(run_dir)
    times = times_of(record)
    assert times is not None
    return find_causes(record, times)[0]


MADE: dict[str, tuple[dict[str, Any], str, float, str]] = {
    # made with, kind, the share of the step that would go, what the sentence names
    "data": ({"step_s": lambda step: 1.5, "data_s": 0.5}, "data", 0.5 / 1.5, "data.num_workers higher than 1"),
    "rank": ({"seconds": slow_text_rank, "step_s": lambda step: 1.2}, "slow rank", 0.235 / 1.2, "text rank 1"),
    "work": (
        {
            "seconds": uneven_vision,
            "work": lambda step: {"vision": [1.4, 0.6], "text": [1.0, 1.0]},
            "step_s": lambda step: 1.2,
        },
        "uneven work",
        0.18 / 1.2,
        "data.balance=balanced",
    ),
    "link": ({"seconds": sending, "step_s": lambda step: 1.6}, "link", 0.6 / 1.6, "text.tensor is 2: try fewer"),
    "saves": (
        {"saves": {step: 0.8 for step in range(2, 21, 2)}, "config": {"training": {"save_steps": 2}}},
        "save",
        0.4 / 1.4,
        "training.save_steps=2",
    ),
    "tower": (
        {
            "seconds": tower_on_one_device,
            "work": lambda step: {"vision": [1.0], "text": [1.0, 1.0]},
            "step_s": lambda step: 1.4,
        },
        "heavy part",
        0.45 / 1.4,
        "vision.num_actors=2",
    ),
    "long sample": (
        {
            "step_s": lambda step: 8.0 if step in (9, 17) else 1.0,
            "flops": lambda step: 9000 if step in (9, 17) else 1000,
        },
        "long sample",
        14.0 / 32.0,
        "data.max_tokens",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_the_sentence_names_what_bounds_a_run_and_its_gain(name: str, tmp_path: Path) -> None:
    made, kind, share, words = MADE[name]
    run_dir = make_run(tmp_path / "run", **made)
    cause = largest(run_dir)
    assert cause.kind == kind
    assert cause.share == pytest.approx(share, rel=0.1)
    record = read_run(run_dir)
    said = sentence(record, times_of(record))
    assert words in said and f"{1 / (1 - cause.share):.2f} times as fast" in said


def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run"))
    times = times_of(record)
    assert times is not None and all(cause.share < HEALTHY for cause in find_causes(record, times))
    assert sentence(record, times).startswith("This run is healthy")


def test_a_slow_rank_is_not_taken_for_uneven_work_nor_the_other_way_round(tmp_path: Path) -> None:
    for name, other in (("rank", "uneven work"), ("work", "slow rank")):
        record = read_run(make_run(tmp_path / name, **MADE[name][0]))
        times = times_of(record)
        assert times is not None
        assert all(cause.share < HEALTHY for cause in find_causes(record, times) if cause.kind == other)


def test_two_stages_with_devices_of_their_own_wait_for_the_heavier_one(tmp_path: Path) -> None:
    def seconds(step: int) -> Mapping[str, Any]:
        return {
            "vision": {"forward": [0.2, 0.2], "comm": [0.0, 0.0]},
            "text": {"forward": [1.0, 1.0], "comm": [0.0, 0.0]},
        }

    run_dir = make_run(tmp_path / "run", seconds=seconds, config={"cluster": {"collocate": False}})
    cause = largest(run_dir)
    assert (cause.kind, round(cause.share, 3)) == ("heavy part", 0.4)
    assert "text" in cause.what and "text.num_actors" in cause.change


@pytest.mark.parametrize(
    ("cluster", "text", "gain"),
    [
        ({"collocate": True}, ["text"], None),
        ({}, ["text"], None),
        ({"collocate": False}, ["text"], "text.num_actors), or share them"),
        ({"collocate": True}, ["text.0", "text.1"], "text.partition=exact"),
        ({"collocate": True, "chain": True}, ["text"], "(text.num_actors): a step"),
    ],
)
def test_what_shares_its_devices_is_not_told_to_share_them(
    cluster: dict[str, bool], text: list[str], gain: str | None, tmp_path: Path
) -> None:
    """Processes that compete for one device are busy for more seconds than the step takes."""

    def seconds(step: int) -> Mapping[str, Any]:
        heavy = {name: {"forward": [0.9 - 0.5 * at], "comm": [0.0]} for at, name in enumerate(text)}
        return {"vision": {"forward": [0.45], "comm": [0.0]}, **heavy}

    work = {name: [1.0] for name in ("vision", *text)}
    made = make_run(tmp_path / "run", seconds=seconds, work=lambda step: work, config={"cluster": cluster})
    record = read_run(made)
    said = sentence(record, times_of(record))
    if gain is None:
        assert said.startswith("This run is healthy") and "num_actors" not in said
        assert "text computes most of the step (90%): that is the model's own work." in said
    else:
        assert said.startswith("This run is bound by text") and gain in said


def test_three_steps_are_too_few_to_say(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run", steps=1))
    assert "Too few steps" in sentence(record, times_of(record))


def test_work_of_four_ranks_is_held_against_their_mean(tmp_path: Path) -> None:
    """One rank has five times the others' work: with even work the stage would take 0.4 of its time."""
    work = [2.5, 0.5, 0.5, 0.5]
    seconds = {"text": {"forward": [0.4 * one for one in work], "comm": [1.0 - 0.4 * one for one in work]}}
    run_dir = make_run(tmp_path / "run", seconds=lambda step: seconds, work=lambda step: {"text": work})
    cause = next(one for one in _causes(run_dir) if one.kind == "uneven work")
    assert cause.share == pytest.approx(0.6)


@pytest.mark.parametrize(("vision_batch", "rows", "told"), [(1, 2, True), (4, 2, False), (1, 8, False)])
def test_uneven_pictures_of_small_micro_batches_are_dealt_out_together(
    vision_batch: int, rows: int, told: bool, tmp_path: Path
) -> None:
    """As far as a step has several, and they are not."""
    training = {"save_steps": 5, "batch_size": 8, "micro_batch_size": rows, "vision_batch": vision_batch}
    work = {"vision": [1.4, 0.6]}
    config = {"training": training, "data": {"balance": "balanced", "num_workers": 1}}
    run_dir = make_run(tmp_path / "run", seconds=uneven_vision, work=lambda step: work, config=config)
    cause = next(one for one in _causes(run_dir) if one.kind == "uneven work")
    assert ("training.vision_batch=4, null: the step's" in cause.change) is told


def _causes(run_dir: Path) -> list[Cause]:
    record = read_run(run_dir)
    times = times_of(record)
    assert times is not None
    return find_causes(record, times)


def test_where_collectives_are_not_apart_no_rank_is_called_slow(tmp_path: Path) -> None:
    """As on GPUs: all ranks are as long at work, those that wait among them."""
    seconds = {"text": {"forward": [0.9, 0.9]}}
    work = {"text": [1.4, 0.6]}
    run_dir = make_run(tmp_path / "run", seconds=lambda step: seconds, work=lambda step: work)
    (cause, *_) = _causes(run_dir)
    assert (cause.kind, round(cause.share, 4)) == ("uneven work", round(0.9 * (1 - 1 / 1.4), 4))
    assert all(one.kind != "slow rank" for one in _causes(run_dir))


def test_what_was_not_measured_is_not_called_healthy(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", seconds=lambda step: {"text": {"forward": [0.9, 0.9]}})
    record = read_run(run_dir)
    said = sentence(record, times_of(record))
    assert "healthy" not in said and "Of text collectives are not measured apart" in said
    run_dir = make_run(tmp_path / "b")
    (run_dir / "ranks.jsonl").unlink()
    record = read_run(run_dir)
    assert "there is no ranks.jsonl" in sentence(record, times_of(record))


def test_a_checkpoint_at_the_end_bounds_no_run(tmp_path: Path) -> None:
    assert all(one.kind != "save" for one in _causes(make_run(tmp_path / "run", saves={20: 20.0})))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3, 37, [10, 20, 30]),
        (0, 0.0007, [0, 0.0002, 0.0004, 0.0006]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_steps_have_whole_ticks() -> None:
    assert ticks(1, 3, whole=True) == [1, 2, 3]


def test_many_steps_are_thinned_to_means_that_keep_least_and_most() -> None:
    steps = list(range(1, 10_001))
    values = [1.0] * 10_000
    values[5000] = 9.0
    points = thinned(steps, values)
    assert len(points) == MOST_POINTS and max(most for _, _, _, most in points) == 9.0
    assert thinned([], []) == [] and thinned([3], [2.0]) == [(3, 2.0, 2.0, 2.0)]


def test_a_line_leaves_out_what_is_not_finite_and_links_its_points() -> None:
    drawing = line_chart("loss", "Loss", [Line("loss", [1, 2, 3], [1.0, math.nan, 3.0], links={3: "#step-3"})], "nats")
    (line,) = [one for one in drawing.shapes if isinstance(one, Polyline) and not one.thin]
    assert len(line.points) == 2 and line.points[0][1] > line.points[1][1]  # more is higher
    (dot,) = [one for one in drawing.shapes if isinstance(one, Dot)]
    assert dot.link == "#step-3" and (dot.x, dot.y) == line.points[1]
    assert {"nats", "step", "loss"} <= {one.text for one in drawing.shapes if isinstance(one, Label)}
    assert all(0 <= y <= HEIGHT for _, y in line.points)


def test_a_chart_without_values_is_drawn_empty() -> None:
    assert line_chart("loss", "Loss", [Line("loss", [], [])], "nats").svg().startswith("<svg")


def test_the_pieces_of_a_bar_are_as_long_as_their_values() -> None:
    drawing = stacked_bars("x", "X", {"a": {"p": 1.0, "q": 3.0}, "b": {"q": 2.0}}, "s")
    boxes = [one for one in drawing.shapes if isinstance(one, Box) and one.title]
    assert [one.title for one in boxes] == ["a, p: 1 s", "a, q: 3 s", "b, q: 2 s"]
    first, second, third = boxes
    assert second.width == pytest.approx(3 * first.width) and third.width == pytest.approx(2 * first.width)
    assert second.x == pytest.approx(first.x + first.width) and second.colour == third.colour != first.colour


def test_a_bar_has_a_line_over_its_spread_and_none_where_it_was_measured_once() -> None:
    drawing = spread_bars("x", "X", {"a": Bar(2.0, 1.0, 4.0), "b": Bar(1.0, 1.0, 1.0)}, "s")
    first, second = [one for one in drawing.shapes if isinstance(one, Box)]
    assert (first.title, second.title) == ("a: 2 (1 to 4) s", "b: 1 s")
    assert first.width == pytest.approx(2 * second.width)
    marks = [one for one in drawing.shapes if isinstance(one, Polyline) and one.colour == INK]
    (line, low, high) = marks  # of the first bar alone
    unit = second.width
    assert [x - first.x for x, _ in line.points] == pytest.approx([unit, 4 * unit])
    assert [low.points[0][0], high.points[0][0]] == [x for x, _ in line.points]


@pytest.mark.parametrize(
    "bar", [Bar(1.0, 2.0, 3.0), Bar(-1.0, -1.0, 1.0), Bar(1.0, 1.0, math.inf), Bar(math.nan, 0, 1)]
)
def test_what_is_no_bar_is_refused(bar: Bar) -> None:
    with pytest.raises(ValueError, match="^a: Bar.* is no bar"):
        spread_bars("x", "X", {"a": bar}, "s")


def test_a_slow_rank_is_red_a_fast_one_blue_and_none_grey() -> None:
    values = np.array([[1.0, 1.5], [1.0, 0.5], [1.0, np.nan]])
    drawing = heat_map("pace", "Pace", ["a", "b", "c"], [1, 2], values, "u")
    (pixels,) = [one.values for one in drawing.shapes if isinstance(one, Pixels)]
    assert pixels[:, 0].tolist() == [[250] * 3] * 3
    (red, blue, grey) = pixels[:, 1].tolist()
    assert red[0] > red[2] and blue[2] > blue[0] and grey == [160] * 3


def test_a_heat_map_of_many_steps_is_thinned() -> None:
    drawing = heat_map("pace", "Pace", ["a"], list(range(5000)), np.ones((1, 5000)), "u")
    (pixels,) = [one.values for one in drawing.shapes if isinstance(one, Pixels)]
    assert pixels.shape == (1, 240, 3)


SHAPES = [
    Box(10, 10, 30, 20, 2, "a <b>"),
    Polyline(((0, 0), (50, 50)), 0, dashed=True),
    Dot(5, 5, 1, "five", "#step-5"),
    Label(20, 40, "text & more", "middle"),
    Label(8, 60, "upright", upright=True),
    Pixels(60, 10, 20, 20, np.full((2, 2, 3), 200, dtype=np.uint8)),
]


def test_svg_is_well_formed_and_escapes_text() -> None:
    root = ElementTree.fromstring(Drawing("d", "A <title>", 100, 80, SHAPES).svg())
    assert root.attrib["viewBox"] == "0 0 100 80"
    assert [one.tag for one in root] == ["title", "rect", "polyline", "a", "text", "text", "image"]
    assert root[1][0].text == "a <b>" and root[4].text == "text & more" and root[3].attrib["href"] == "#step-5"
    assert root[6].attrib["href"].startswith("data:image/png;base64,")


def test_a_control_character_is_shown_not_written() -> None:
    assert "\\x1b" in Drawing("d", "D", 10, 10, [Label(0, 0, "a\x1b[31m")]).svg()


def test_png_has_the_same_shapes_twice_as_large(tmp_path: Path) -> None:
    path = Drawing("d", "D", 100, 80, SHAPES).write_png(tmp_path / "charts")
    image = Image.open(path)
    assert path == tmp_path / "charts" / "d.png" and image.size == (200, 160)
    assert image.getpixel((50, 40)) == (0, 158, 115)  # the box, in its colour
    assert image.getpixel((140, 40)) == (200, 200, 200) and image.getpixel((190, 150)) == (255, 255, 255)


def config(tmp_path: Path, **more: str) -> dict[str, str]:
    Image.new("RGB", (400, 200), "red").save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat <b> is it?"}, {"from": "gpt", "value": "Red."}]
    rows = [{"image": "a.png", "conversations": turns}, {"image": "gone.png", "conversations": turns}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    prefix = "data.data_registry.shapes."
    return {
        f"{prefix}annotation_path": str(tmp_path / "a.json"),
        f"{prefix}data_path": str(tmp_path),
        f"{prefix}format": "auto",
        **more,
    }


def test_a_sample_is_its_picture_its_question_and_its_answer(tmp_path: Path) -> None:
    shown = Gallery(config(tmp_path)).sample("shapes", 0)
    assert f'width="{SIDE}" height="{SIDE // 2}"' in shown and "data:image/jpeg;base64," in shown
    assert "What &lt;b&gt; is it?" in shown and "<b>Red.</b>" in shown


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    gallery = Gallery(config(tmp_path))
    assert "a picture that cannot be read" in gallery.sample("shapes", 1)
    assert (gallery.sample("shapes", 2), gallery.sample("other", 0)) == ("", "")


def test_no_address_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "read_annotations", lambda *given: pytest.fail("it was opened"))
    found = config(tmp_path) | {"data.data_registry.shapes.annotation_path": "s3://bucket/a.json"}
    assert Gallery(found).sample("shapes", 0) == ""


def test_pictures_end_where_the_page_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_BYTES", 1)
    gallery = Gallery(config(tmp_path))
    assert "<img" in gallery.images("shapes", 0) and gallery.images("shapes", 0) == ""


def test_large_annotations_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = config(tmp_path)
    monkeypatch.setattr(tables, "MOST_ANNOTATIONS", 10)
    monkeypatch.setattr(tables, "read_annotations", lambda *given: pytest.fail("it was opened"))
    assert Gallery(found).sample("shapes", 0) == ""
