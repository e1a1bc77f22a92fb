"""One step with recorded calls: every ref goes to the rank it belongs to, and to no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dhp.cluster.dispatch import PerRank, spread
from dhp.base.degrees import Degrees
from dhp.step.schedule import TEXT, VISION, sequential
from dhp.step.stages import Batch, TextPart, make_parts
from dhp.step.step import StepRefs, train_step


@dataclass(frozen=True)
class Call:
    """One call as one rank got it."""

    part: str
    rank: int
    method: str
    arguments: tuple[Any, ...]
    returns: int


class FakeGroup:
    """Stands in for an actor group: writes down what each rank gets, answers with names for refs."""

    def __init__(self, part: str, size: int, log: list[Call]):
        self.part, self.size, self.log = part, size, log

    def execute_all_async(self, method: str, *arguments: Any, returns: int | PerRank = 1) -> list[list[str]]:
        counts = [count for (count,) in spread((returns,), self.size)]
        given = spread(arguments, self.size)
        self.log += [Call(self.part, rank, method, given[rank], counts[rank]) for rank in range(self.size)]
        micro = f"{given[0][0]}" if method in ("forward_step", "backward_step") else ""
        name = {"forward_step": "e", "backward_step": "g"}.get(method, method)
        return [[f"{name}{micro}:{self.part}{rank}->{k}" for k in range(counts[rank])] for rank in range(self.size)]


@dataclass(frozen=True)
class Recorded:
    calls: list[Call]
    refs: StepRefs

    def of(self, part: str, method: str) -> list[tuple[Any, ...]]:
        """Arguments of that method, rank after rank, call after call."""
        return [call.arguments for call in self.calls if (call.part, call.method) == (part, method)]


def step(vision: int, text: Degrees, micro_batches: int = 1, vision_tensor: int = 1) -> Recorded:
    """vision: places that get windows of their own, each of `vision_tensor` ranks."""
    calls: list[Call] = []
    tower = Degrees(ulysses=vision, tensor=vision_tensor)
    groups = FakeGroup("v", tower.world, calls), FakeGroup("t", text.world, calls)
    parts = make_parts(*groups, tower, text, micro_batches)
    batch = Batch(
        "info",
        [[f"pixels{m}:{v}" for v in range(vision)] for m in range(micro_batches)],
        [[f"rows{m}:{d}" for d in range(text.data)] for m in range(micro_batches)],
    )
    return Recorded(calls, train_step(parts, sequential(micro_batches), batch))


def test_each_vision_rank_gets_its_own_pixels() -> None:
    recorded = step(vision=2, text=Degrees(tensor=2), micro_batches=2)
    assert recorded.of("v", "forward_step") == [(m, f"pixels{m}:{v}", True) for m in (0, 1) for v in (0, 1)]


def test_tensor_ranks_of_vision_get_the_same_pixels_and_gradients_and_the_first_hands_over() -> None:
    recorded = step(vision=2, text=Degrees(data=2), vision_tensor=2)
    places = [(0, True), (0, False), (1, True), (1, False)]
    assert recorded.of("v", "forward_step") == [(0, f"pixels0:{v}", lead) for v, lead in places]
    assert recorded.of("t", "forward_step") == [(0, f"rows0:{d}", f"e0:v0->{d}", f"e0:v2->{d}") for d in (0, 1)]
    assert recorded.of("v", "backward_step") == [(0, f"pixels0:{v}", f"g0:t0->{v}", f"g0:t1->{v}") for v, _ in places]


def test_a_replica_gets_its_rows_and_its_embeddings_from_every_vision_rank_on_all_its_tensor_ranks() -> None:
    recorded = step(vision=3, text=Degrees(data=2, tensor=2))
    of_replica = [(0, f"rows0:{d}", *(f"e0:v{v}->{d}" for v in range(3))) for d in (0, 1)]
    assert recorded.of("t", "forward_step") == [of_replica[0], of_replica[0], of_replica[1], of_replica[1]]


def test_only_the_first_tensor_rank_hands_over_and_gradients_return_to_who_sent_the_embeddings() -> None:
    recorded = step(vision=2, text=Degrees(data=2, tensor=2))
    assert recorded.of("t", "backward_step") == [(0, True, lead) for lead in (True, False, True, False)]
    # Text ranks 0 and 2 lead replicas 0 and 1; result number v is vision rank v's.
    expected = [(0, f"pixels0:{v}", f"g0:t0->{v}", f"g0:t2->{v}") for v in (0, 1)]
    assert recorded.of("v", "backward_step") == expected


def test_each_rank_is_expected_to_return_what_it_hands_over() -> None:
    """Ray fails a call that returns another number of values."""
    recorded = step(vision=2, text=Degrees(data=3, tensor=2), vision_tensor=2)
    found = {(c.part, c.method, c.rank): c.returns for c in recorded.calls}
    assert [found["v", "forward_step", rank] for rank in range(4)] == [3, 0, 3, 0]
    assert [found["t", "backward_step", rank] for rank in range(6)] == [2, 0] * 3
    for part, method in (("t", "forward_step"), ("v", "backward_step")):
        assert {n for (p, m, _), n in found.items() if (p, m) == (part, method)} == {0}
    assert {n for (_, method, _), n in found.items() if method in ("grad_norm_sq", "optimizer_step")} == {1}


def test_text_sums_its_gradients_after_the_last_micro_batch_only() -> None:
    recorded = step(vision=1, text=Degrees(), micro_batches=3)
    assert [arguments[:2] for arguments in recorded.of("t", "backward_step")] == [(0, False), (1, False), (2, True)]


def test_the_norm_of_a_part_goes_to_every_rank_of_the_other() -> None:
    recorded = step(vision=2, text=Degrees(tensor=2))
    assert recorded.of("v", "grad_norm_sq") == recorded.of("t", "grad_norm_sq") == [("info",)] * 2
    assert recorded.of("v", "optimizer_step") == [("info", "grad_norm_sq:t0->0")] * 2
    assert recorded.of("t", "optimizer_step") == [("info", "grad_norm_sq:v0->0")] * 2


def test_a_step_answers_with_the_report_of_every_rank() -> None:
    recorded = step(vision=1, text=Degrees(tensor=2))
    assert recorded.refs == StepRefs(
        "info", {VISION: ["optimizer_step:v0->0"], TEXT: ["optimizer_step:t0->0", "optimizer_step:t1->0"]}
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_calls_are_submitted_in_the_order_of_the_schedule(micro_batches: int) -> None:
    recorded = step(vision=1, text=Degrees(), micro_batches=micro_batches)
    there_and_back = [("v", "forward_step"), ("t", "forward_step"), ("t", "backward_step"), ("v", "backward_step")]
    update = [("v", "grad_norm_sq"), ("t", "grad_norm_sq"), ("v", "optimizer_step"), ("t", "optimizer_step")]
    assert [(c.part, c.method) for c in recorded.calls] == there_and_back * micro_batches + update


def test_leaders_are_the_first_tensor_ranks() -> None:
    part = TextPart(FakeGroup("t", 4, []), Degrees(data=2, tensor=2), vision_ranks=1, micro_batches=1)
    assert part.leaders(["r0", "r1", "r2", "r3"]) == ["r0", "r2"]
