"""Schedules as their clock tables draw them, and what every one of them must satisfy."""

from __future__ import annotations

from itertools import product
from textwrap import dedent

import pytest

from dhp.config.ranges import SCHEDULES
from dhp.core.errors import ConfigError
from dhp.core.graph import Node, StageGraph
from dhp.step.schedule import (
    Backward,
    Forward,
    Schedule,
    clock,
    draw,
    last_backwards,
    make_programs,
    make_schedule,
    outstanding,
    without_idle,
)
from tests.helpers.graphs import make_graph

PAIR = make_graph()
TWO, FOUR = make_graph(stages=2), make_graph(stages=4)
TWICE = make_graph(stages=2, chunks=2)
FROZEN_TOWER = make_graph(stages=2, vision_trains=False)
FROZEN_TEXT = make_graph(stages=2, text_trains=False)

DRAWINGS = [
    (
        "sequential",
        PAIR,
        2,
        """
        vision 0 . .  0' 1 . .  1'
        text   . 0 0' .  . 1 1' .
        """,
    ),
    (
        "vision_ahead",
        PAIR,
        3,
        """
        vision 0 1 .  0' 2  1' .  2'
        text   . 0 0' 1  1' 2  2' .
        """,
    ),
    (
        "gpipe",
        TWO,
        3,
        """
        vision 0 1 2 . . .  .  0' 1' 2'
        text.0 . 0 1 2 . .  0' 1' 2' .
        text.1 . . 0 1 2 0' 1' 2' .  .
        """,
    ),
    (
        "1f1b",
        TWO,
        4,
        """
        vision 0 1 2 .  .  0' 3  1' .  2' .  3'
        text.0 . 0 1 .  0' 2  1' 3  2' .  3' .
        text.1 . . 0 0' 1  1' 2  2' 3  3' .  .
        """,
    ),
    (
        "1f1b",
        FOUR,
        5,
        """
        vision 0 1 2 3 4 .  .  .  .  0' .  1' .  2' .  3' .  4'
        text.0 . 0 1 2 3 .  .  .  0' 4  1' .  2' .  3' .  4' .
        text.1 . . 0 1 2 .  .  0' 3  1' 4  2' .  3' .  4' .  .
        text.2 . . . 0 1 .  0' 2  1' 3  2' 4  3' .  4' .  .  .
        text.3 . . . . 0 0' 1  1' 2  2' 3  3' 4  4' .  .  .  .
        """,
    ),
    (
        "interleaved",
        TWICE,
        4,
        """
        vision 0 1 2 3  .  .   .   .   .   .  .  0' .  1'  .   .   .   .  2' 3'
        text.0 . 0 1 0b 1b 2   0b' 3   1b' 2b 0' 3b 1' .   2b' .   3b' 2' 3' .
        text.1 . . 0 1  0b 0b' 1b  1b' 2   0' 3  1' 2b 2b' 3b  3b' 2'  3' .  .
        """,
    ),
    (
        "1f1b",
        FROZEN_TOWER,
        4,
        """
        vision 0 1 2 3  .  .  .  .  .  .  .
        text.0 . 0 1 .  0' 2  1' 3  2' .  3'
        text.1 . . 0 0' 1  1' 2  2' 3  3' .
        """,
    ),
    (
        "sequential",
        FROZEN_TEXT,
        1,
        """
        vision 0 . . .  .  0'
        text.0 . 0 . .  0' .
        text.1 . . 0 0' .  .
        """,
    ),
]


@pytest.mark.parametrize(
    ("kind", "graph", "micro_batches", "drawing"), DRAWINGS, ids=[f"{d[0]}-{len(d[1].stages)}-{d[2]}" for d in DRAWINGS]
)
def test_the_clock_table(kind: str, graph: StageGraph, micro_batches: int, drawing: str) -> None:
    assert draw(make_schedule(kind, graph, micro_batches), graph) == dedent(drawing).strip("\n").rstrip()


def all_schedules() -> list[tuple[str, StageGraph, int]]:
    """Every kind over graphs of one to four text stages, what trains, and micro-batches."""
    graphs = [
        make_graph(stages=stages, chunks=chunks, layers=stages * chunks, vision_trains=vision, text_trains=text)
        for stages, chunks in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 3)]
        for vision, text in [(True, True), (False, True), (True, False)]
    ]
    found = []
    for kind, graph, micro_batches in product(SCHEDULES, graphs, (1, 2, 3, 4, 8, 12)):
        (chunks,) = {len(stage.chunks) for stage in graph.of_part("text")}
        if kind != "sequential" and (kind == "interleaved") != (chunks > 1):
            continue
        if kind != "interleaved" or micro_batches % len(graph.of_part("text")) == 0:
            found.append((kind, graph, micro_batches))
    return found


def test_every_schedule_visits_every_node_once_each_way_and_never_too_early() -> None:
    cases = all_schedules()
    assert len(cases) > 200
    for kind, graph, micro_batches in cases:
        schedule = make_schedule(kind, graph, micro_batches)
        wanted = {Forward(node, m) for node in graph.nodes() for m in range(micro_batches)}
        wanted |= {Backward(node, m) for node in graph.nodes() for m in range(micro_batches) if graph.goes_back(node)}
        assert len(schedule) == len(wanted) and set(schedule) == wanted
        _assert_in_order(schedule, graph)


def _assert_in_order(schedule: Schedule, graph: StageGraph) -> None:
    at = {action: place for place, action in enumerate(schedule)}
    for edge in graph.edges:
        for m in {action.micro_batch for action in schedule}:
            assert at[Forward(edge.source, m)] < at[Forward(edge.target, m)]
            if edge.gradients:
                assert at[Backward(edge.target, m)] < at[Backward(edge.source, m)]
    for action in schedule:
        if isinstance(action, Backward):
            assert at[Forward(action.node, action.micro_batch)] < at[action]


def test_programs_that_wait_for_one_another_are_named() -> None:
    programs = make_programs("1f1b", TWO, 2)
    programs["vision"] = [*programs["vision"]][::-1]
    with pytest.raises(ValueError, match=r"vision before B vision 1, text.0 before F text.0 0"):
        clock(programs, TWO)


def test_1f1b_of_one_text_stage_is_vision_ahead() -> None:
    assert make_schedule("1f1b", PAIR, 5) == make_schedule("vision_ahead", PAIR, 5)


def test_stages_of_a_tower_make_one_1f1b_with_those_of_the_decoder() -> None:
    graph = make_graph(tower_stages=2, stages=2)
    rows = draw(make_schedule("1f1b", graph, 4), graph).splitlines()
    assert [row.split() for row in rows] == [
        "vision.0 0 1 2 3  .  .  .  0' .  1' .  2' .  3'".split(),
        "vision.1 . 0 1 2  .  .  0' 3  1' .  2' .  3' .".split(),
        "text.0   . . 0 1  .  0' 2  1' 3  2' .  3' .  .".split(),
        "text.1   . . . 0  0' 1  1' 2  2' 3  3' .  .  .".split(),
    ]


def test_a_stage_of_1f1b_holds_a_micro_batch_for_each_stage_from_it_on() -> None:
    held = outstanding(make_schedule("1f1b", FOUR, 8), FOUR)
    assert held["text.0"] == {"vision": 5, "text.0": 4, "text.1": 3, "text.2": 2, "text.3": 1}


def test_gpipe_holds_all_and_sequential_one() -> None:
    assert outstanding(make_schedule("gpipe", TWO, 6), TWO)["text.1"] == {"vision": 6, "text.0": 6, "text.1": 6}
    sequential = outstanding(make_schedule("sequential", PAIR, 6), PAIR)
    assert sequential == {"vision": {"vision": 1, "text": 0}, "text": {"vision": 1, "text": 1}}


def test_a_stage_without_backward_holds_nothing() -> None:
    assert outstanding(make_schedule("gpipe", FROZEN_TOWER, 3), FROZEN_TOWER)["text.0"]["vision"] == 0


def test_interleaving_takes_whole_groups_of_micro_batches() -> None:
    told = r"micro-batches\(5\) % pipeline\(2\) = 1 != 0"
    with pytest.raises(ConfigError, match=told):
        make_schedule("interleaved", TWICE, 5)


def test_the_last_backward_of_each_stage_is_told_after_idle_ones_are_left_out() -> None:
    schedule = make_schedule("sequential", PAIR, 3)
    idle = without_idle(schedule, lambda action: action.node.stage == "vision" and action.micro_batch == 2)
    last = [str(idle[at]) for at in sorted(last_backwards(idle))]
    assert last == ["B vision 1", "B text 2"]


def test_actions_print_as_they_are() -> None:
    assert [str(Forward(Node("text.1", 1), 3)), str(Backward(Node("vision"), 0))] == ["F text.1/1 3", "B vision 0"]
