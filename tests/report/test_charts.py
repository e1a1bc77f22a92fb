"""Charts: ticks, thinning of many steps, pieces of bars, colours of a heat map."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dhp.report.charts import (
    HEIGHT,
    INK,
    MOST_POINTS,
    Bar,
    Box,
    Dot,
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
