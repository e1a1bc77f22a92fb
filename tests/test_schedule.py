"""Schedules as values: their order, and the drawing that names them."""

from dhp.schedule import TEXT, VISION, Backward, Forward, sequential


def drawn(micro_batches: int) -> str:
    return " ".join(map(str, sequential(micro_batches)))


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
