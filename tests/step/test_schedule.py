"""Programs of stages, drawn and timed."""

from dataclasses import replace
from itertools import product
from textwrap import dedent

import pytest

from dhp.config.ranges import SCHEDULES
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec
from dhp.step.schedule import (
    Action,
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
from dhp.step.timed import Timeline, draw_timeline, play
from tests.helpers.graphs import make_graph

PAIR = make_graph()
TWO, FOUR = make_graph(stages=2), make_graph(stages=4)
TWICE = make_graph(stages=2, chunks=2)
FROZEN_TOWER = make_graph(stages=2, vision_trains=False)
FROZEN_TEXT = make_graph(stages=2, text_trains=False)
TWO_AT_A_TIME = make_graph(batch=2)  # pictures of two micro-batches in each pass of the tower

DRAWINGS = [
    (
        "sequential",
        TWO_AT_A_TIME,
        4,
        """
        vision 0 . .  . .  0' 1 . .  . .  1'
        text   . 0 0' 1 1' .  . 2 2' 3 3' .
        """,
    ),
    (
        "vision_ahead",
        TWO_AT_A_TIME,
        4,
        """
        vision 0 1 .  . .  0' .  . .  1'
        text   . 0 0' 1 1' 2  2' 3 3' .
        """,
    ),
    (
        "vision_ahead",
        make_graph(batch=4),
        4,
        """
        vision 0 . .  . .  . .  . .  0'
        text   . 0 0' 1 1' 2 2' 3 3' .
        """,
    ),
    (
        "1f1b",
        make_graph(stages=2, tower_stages=2, batch=2),
        6,
        """
        vision.0 0 1 2 . .  .  .  .  .  0' .  .  .  1' .  .  .  2'
        vision.1 . 0 1 . .  .  .  .  0' 2  .  .  1' .  .  .  2' .
        text.0   . . 0 1 .  0' 2  1' 3  2' 4  3' 5  4' .  5' .  .
        text.1   . . . 0 0' 1  1' 2  2' 3  3' 4  4' 5  5' .  .  .
        """,
    ),
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
        make_graph(
            stages=stages, chunks=chunks, layers=stages * chunks, vision_trains=vision, text_trains=text, batch=batch
        )
        for stages, chunks in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 3)]
        for vision, text in [(True, True), (False, True), (True, False)]
        for batch in (1, 2, 3, 4)
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
        each = {node: graph.batch_of(graph.stage(node.stage).part) for node in graph.nodes()}
        numbers = {node: range(-(-micro_batches // batch)) for node, batch in each.items()}
        wanted = {Forward(node, m) for node in graph.nodes() for m in numbers[node]}
        wanted |= {Backward(node, m) for node in graph.nodes() for m in numbers[node] if graph.goes_back(node)}
        assert len(schedule) == len(wanted) and set(schedule) == wanted
        _assert_in_order(schedule, graph)


def _assert_in_order(schedule: Schedule, graph: StageGraph) -> None:
    at = {action: place for place, action in enumerate(schedule)}
    for edge in graph.edges:
        for m in {action.micro_batch for action in schedule if action.node == edge.target}:
            assert at[Forward(edge.source, m // edge.batch)] < at[Forward(edge.target, m)]
            if edge.gradients:
                assert at[Backward(edge.target, m)] < at[Backward(edge.source, m // edge.batch)]
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


def test_an_encoder_counts_passes_of_its_own() -> None:
    assert outstanding(make_schedule("vision_ahead", TWO_AT_A_TIME, 8), TWO_AT_A_TIME)["text"]["vision"] == 2
    whole = make_graph(stages=4, batch=8)
    held = outstanding(make_schedule("1f1b", whole, 8), whole)["text.0"]
    assert held == {"vision": 1, "text.0": 4, "text.1": 3, "text.2": 2, "text.3": 1}


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


TIMED_PAIR, TIMED_TWO = make_graph(), make_graph(stages=2)


def one(action: Action) -> float:
    return 1.0


def apart(graph: StageGraph) -> StageGraph:
    """Each stage on a device of its own."""
    own = (replace(stage, devices=range(at, at + 1)) for at, stage in enumerate(graph.stages))
    return replace(graph, stages=tuple(own))


def of_schedule(kind: str, graph: StageGraph, micro_batches: int) -> dict[str, list[Action]]:
    """Each stage's program, also of a schedule that is made as a whole."""
    schedule = make_schedule(kind, graph, micro_batches)
    return {stage.name: [a for a in schedule if a.node.stage == stage.name] for stage in graph.stages}


def both_parts(tower: int, decoder: int) -> StageGraph:
    """A chain over stages of both parts, as one pipeline of the last one's schedule needs it."""
    names = [f"vision.{at}" for at in range(tower)] + [f"text.{at}" for at in range(decoder)]
    stages = tuple(
        StageSpec(name, name.partition(".")[0], (range(1),), Degrees(), True, range(at, at + 1))
        for at, name in enumerate(names)
    )
    edges = tuple(Edge(Node(a), Node(b), (HIDDEN_STATES,), True) for a, b in zip(names, names[1:]))
    return StageGraph(stages, edges)


def test_unit_seconds_give_the_clock_table_of_every_schedule() -> None:
    cases = all_schedules()
    assert len(cases) > 200
    for kind, graph, micro_batches in cases:
        programs = of_schedule(kind, graph, micro_batches)
        timeline = play(programs, graph, one, apart=True)
        ticks: list[set[Action]] = [set() for _ in range(round(timeline.step_s))]
        for span in timeline.spans:
            assert span.end_s == span.start_s + 1
            ticks[round(span.start_s)].add(span.action)
        assert ticks == [set(tick) for tick in clock(programs, graph)], (kind, micro_batches)
        names = [stage.name for stage in graph.stages]
        assert draw_timeline(timeline, names, 1.0) == draw(make_schedule(kind, graph, micro_batches), graph)


def test_other_seconds_give_another_table() -> None:
    """The negative control of the one above."""
    programs = make_programs("1f1b", TIMED_TWO, 4)
    slow = play(programs, TIMED_TWO, lambda action: 2.0 if action.node.stage == "text.1" else 1.0, apart=True)
    assert slow.step_s > len(clock(programs, TIMED_TWO))


def test_stages_of_one_device_take_turns() -> None:
    programs = make_programs("vision_ahead", TIMED_PAIR, 3)
    assert play(programs, apart(TIMED_PAIR), one).step_s == 8
    shared = play(programs, TIMED_PAIR, one)
    assert shared.step_s == 12 and shared.busy_s == {0: 12.0} and shared.bubble == 0.0


def test_a_stage_over_several_devices_waits_for_the_last_of_them() -> None:
    """Text is on both devices, vision on the first alone."""
    vision, text = TIMED_PAIR.stages
    graph = replace(TIMED_PAIR, stages=(replace(vision, devices=range(1)), replace(text, devices=range(2))))
    own = play(make_programs("vision_ahead", graph, 3), graph, one)
    assert own.step_s == 12 and own.busy_s == {0: 12.0, 1: 6.0} and own.bubble == 0.25


def hops(edge: Edge, back: bool) -> float:
    return 0.25 if back else 0.5


def test_hand_overs_keep_the_receiver_waiting() -> None:
    """Vision forward 1, backward 2; text 3 and 4; half a second there, a quarter back; by hand."""
    seconds = {"vision": (1.0, 2.0), "text": (3.0, 4.0)}
    graph = apart(TIMED_PAIR)
    own = play(
        make_programs("vision_ahead", graph, 2),
        graph,
        lambda action: seconds[action.node.stage][isinstance(action, Backward)],
        hops,
    )
    spans = {span.action: (span.start_s, span.end_s) for span in own.spans}
    assert spans == {
        Forward(Node("vision"), 0): (0.0, 1.0),
        Forward(Node("vision"), 1): (1.0, 2.0),
        Forward(Node("text"), 0): (1.5, 4.5),
        Backward(Node("text"), 0): (4.5, 8.5),
        Backward(Node("vision"), 0): (8.75, 10.75),
        Forward(Node("text"), 1): (8.5, 11.5),
        Backward(Node("text"), 1): (11.5, 15.5),
        Backward(Node("vision"), 1): (15.75, 17.75),
    }
    assert own.step_s == 17.75 and own.busy_s == {0: 6.0, 1: 14.0}
    assert own.waits() == {"vision": {"text": 6.75 + 5.0}, "text": {"vision": 1.5 + 2.25}}
    assert own.idle(0) == pytest.approx(11.75 / 17.75) and own.bubble == pytest.approx(15.5 / 35.5)


def test_all_that_a_device_does_not_work_is_waited_for_someone() -> None:
    for kind, graph, micro_batches in all_schedules()[::7]:
        graph = apart(graph)
        own = play(
            of_schedule(kind, graph, micro_batches), graph, lambda a: 1.0 + a.micro_batch % 3, lambda edge, back: 0.5
        )
        for stage, waited in own.waits().items():
            (device,) = own.on[stage]
            assert sum(waited.values()) == pytest.approx(own.step_s - own.busy_s[device])


def test_a_frozen_tower_never_waits_for_the_decoder() -> None:
    graph = apart(FROZEN_TOWER)
    own = play(make_programs("1f1b", graph, 4), graph, one)
    assert [span.start_s for span in own.spans if span.action.node.stage == "vision"] == [0, 1, 2, 3]
    assert own.waits()["vision"] == {"text.0": 7.0}  # it is done, and the step is not


def test_programs_that_wait_for_one_another_are_named_of_timed() -> None:
    programs = make_programs("1f1b", TIMED_TWO, 2)
    programs["vision"] = [*programs["vision"]][::-1]
    with pytest.raises(ValueError, match=r"vision before B vision 1, text.0 before F text.0 0"):
        play(programs, TIMED_TWO, one)


def drawn(timeline: Timeline, graph: StageGraph, column_s: float, again: tuple[str, ...] = ()) -> str:
    return draw_timeline(timeline, [stage.name for stage in graph.stages], column_s, again)


def test_longer_actions_fill_their_columns() -> None:
    graph = apart(TIMED_PAIR)
    own = play(make_programs("vision_ahead", graph, 2), graph, lambda a: 2.0 if a.node.stage == "text" else 1.0)
    table = """
    vision 0 1 .  . .  0' . . .  1'
    text   . 0 -  0' - 1  - 1' - .
    """
    assert drawn(own, graph, 1.0).split() == dedent(table).split()


def test_recomputed_forwards_are_marked_in_stages_of_both_parts() -> None:
    graph = both_parts(2, 2)
    table = """
    vision.0 0 1 2 3  .  .  .  0" .  1" .  2" .  3"
    vision.1 . 0 1 2  .  .  0' 3  1' .  2' .  3' .
    text.0   . . 0 1  .  0" 2  1" 3  2" .  3" .  .
    text.1   . . . 0  0' 1  1' 2  2' 3  3' .  .  .
    """
    programs = one_pipeline(graph, 4)
    timeline = play(programs, graph, one)
    again = ("vision.0", "text.0")
    assert drawn(timeline, graph, 1.0, again).split() == table.split()
    schedule = tuple(action for tick in clock(programs, graph) for action in tick)
    assert draw(schedule, graph, again) == drawn(timeline, graph, 1.0, again)
    assert '"' not in draw(schedule, graph)


def one_pipeline(graph: StageGraph, micro_batches: int) -> dict[str, list[Action]]:
    """1F1B over all stages, whatever their part."""
    of_one = replace(graph, stages=tuple(replace(stage, part="text") for stage in graph.stages))
    return make_programs("1f1b", of_one, micro_batches)
