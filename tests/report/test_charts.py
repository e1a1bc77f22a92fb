"""Charts, drawings and pictures of a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from dhp.report import tables
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
from dhp.report.tables import SIDE, Gallery


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
