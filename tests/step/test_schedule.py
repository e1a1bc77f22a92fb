"""Schedules as values: their order, and the drawing that names them."""

from collections.abc import Callable

import pytest

from dhp.step.schedule import SCHEDULES, TEXT, VISION, Backward, Forward, Schedule, sequential, vision_ahead


def drawn(micro_batches: int, schedule: Callable[[int], Schedule] = sequential) -> str:
    return " ".join(map(str, schedule(micro_batches)))


def test_an_action_is_drawn_by_direction_part_and_micro_batch() -> None:
    assert str(Forward(VISION, 3)) == "F0.3"
    assert str(Backward(TEXT, 0)) == "B1.0"


def test_sequential_takes_each_micro_batch_there_and_back() -> None:
    assert drawn(1) == "F0.0 F1.0 B1.0 B0.0"
    assert drawn(3) == "F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1 F0.2 F1.2 B1.2 B0.2"


def test_actions_compare_by_value_and_never_across_directions() -> None:
    assert sequential(2) == sequential(2)
    assert sequential(1) == (Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0))
    assert Forward(0, 0) != Backward(0, 0)


def test_vision_ahead_encodes_the_next_micro_batch_first() -> None:
    assert drawn(1, vision_ahead) == "F0.0 F1.0 B1.0 B0.0"
    assert drawn(3, vision_ahead) == "F0.0 F0.1 F1.0 B1.0 B0.0 F0.2 F1.1 B1.1 B0.1 F1.2 B1.2 B0.2"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_every_schedule_visits_all_once_and_in_a_possible_order(name: str, micro_batches: int) -> None:
    actions = SCHEDULES[name](micro_batches)
    assert len(set(actions)) == len(actions) == 4 * micro_batches
    place = {action: number for number, action in enumerate(actions)}
    for m in range(micro_batches):
        way = [Forward(VISION, m), Forward(TEXT, m), Backward(TEXT, m), Backward(VISION, m)]
        assert [place[action] for action in way] == sorted(place[action] for action in way)
