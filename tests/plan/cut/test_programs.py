"""Programs of a pipeline's stages as the search for cuts has them: those of the schedule."""

import pytest

from dhp.config.ranges import SCHEDULES
from dhp.core.errors import ConfigError
from dhp.plan.cut.simulate import Task, chain_programs, pipeline_programs
from dhp.step.schedule import Backward, make_schedule
from tests.helpers.graphs import make_graph


def test_programs_are_those_of_1f1b() -> None:
    first, second = pipeline_programs("1f1b", 2, 1, 2)
    assert first == (Task(0, False, 0), Task(0, False, 1), Task(0, True, 0), Task(0, True, 1))
    assert second == (Task(1, False, 0), Task(1, True, 0), Task(1, False, 1), Task(1, True, 1))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_they_are_what_the_stages_of_a_run_do(kind: str) -> None:
    chunks = 2 if kind == "interleaved" else 1
    graph = make_graph(stages=2, chunks=chunks)
    schedule = make_schedule(kind, graph, 4)
    for at, program in enumerate(pipeline_programs(kind, 2, chunks, 4)):
        own = [action for action in schedule if action.node.stage == f"text.{at}"]
        assert [(w.run // 2, w.run % 2, w.back, w.micro_batch) for w in program] == [
            (action.node.chunk, at, isinstance(action, Backward), action.micro_batch) for action in own
        ]


def test_interleaved_programs_need_whole_groups() -> None:
    with pytest.raises(ConfigError, match="% pipeline"):
        pipeline_programs("interleaved", 2, 2, 3)


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "interleaved"])
def test_a_chain_has_the_programs_of_all_stages_but_the_one_that_is_shared(kind: str) -> None:
    graph = make_graph(stages=3, tower_stages=2)
    schedule = make_schedule(kind, graph, 4)
    for at, (program, name) in enumerate(
        zip(chain_programs(kind, 2, 3, 4), ("vision.0", "text.0", "text.1", "text.2"), strict=True)
    ):
        own = [action for action in schedule if action.node.stage == name]
        assert program == tuple(Task(at, isinstance(one, Backward), one.micro_batch) for one in own)
