"""Bytes moment by moment: what is there together in a forward, in the loss, in each layer's backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.graph import StageSpec
from dhp.models.shape import PartShape
from dhp.plan.count.costs import LayerCost, StageCosts
from dhp.plan.count.row_bytes import InsideBytes, StageInsides
from dhp.plan.count.state_bytes import BUCKET_ELEMENTS, Units, gathered_moments
from dhp.plan.forecast.moments import BACKWARD, FORWARD, LOSS, Passing, stage_memory

PART = PartConfig(num_actors=1, tensor=1, data=1, dtype="float32")
SHAPE = PartShape(1000, 1000, 1000)
COSTS = StageCosts(10, ("one", "two"), 5.0, 50.0, {at: {"none": LayerCost(100.0, 0.0, 0.0)} for at in ("one", "two")})
LAYER, END = InsideBytes(300.0, 20.0, 25.0), InsideBytes(7.0, 3.0, 4.0)
UNITS = Units(400, 200, 150)
PASSING = Passing(COSTS, ("none", "none"), StageInsides((LAYER, LAYER), END, END), units=UNITS)


def spec(data: int = 1) -> StageSpec:
    return StageSpec("text", "text", (range(2),), Degrees(data=data), True, range(data))


def moments(passing: Passing, part: PartConfig = PART, data: int = 1) -> dict[str, float]:
    """The most of each name, beyond weights and optimizer."""
    found = stage_memory(part, spec(data), SHAPE, passing, False)
    kept = found.states.weights + found.states.optimizer
    assert found.peak.total == max(one.total for one in found.others)
    return {one.name: one.total - kept for one in found.others}


def test_gradients_that_come_one_by_one_are_not_there_before() -> None:
    grown = replace(PASSING, grown=(0.0, 40.0, 440.0, 840.0))
    found = moments(grown)
    assert found[FORWARD] == 5 + 100 + 300 and found[LOSS] == 205 + 7
    assert found[BACKWARD] == 840 + 5 + 4  # what precedes the layers comes last, when all gradients are there
    assert moments(PASSING)[BACKWARD] == 4000 + 255 + 3  # in buckets all have their room from the beginning


def test_a_later_micro_batch_finds_the_gradients_of_those_before_it() -> None:
    found = moments(replace(PASSING, micro_batches=2, grown=(0.0, 40.0, 440.0, 840.0)))
    assert found[LOSS] == 4000 + 205 + 7
    assert found[BACKWARD] == 4000 + 255 + 3


def test_micro_batches_under_way_keep_what_they_were_handed() -> None:
    one, three = moments(PASSING), moments(replace(PASSING, holds=3.0, micro_batches=3, flown=11.0))
    assert three[LOSS] - one[LOSS] == 2 * (255 + 11)


def test_no_backward_has_forwards_alone() -> None:
    found = stage_memory(PART, spec(), SHAPE, replace(PASSING, costs=None), False)
    assert {one.name for one in found.others} == {FORWARD, LOSS, "update"} and found.activations == 0


@pytest.mark.parametrize(("stage", "forward", "backward"), [(1, 0, 4000), (2, 0, 4000), (3, 8000 + 3200, 8000)])
def test_deepspeed_has_a_bucket_of_all_gradients_and_keeps_what_it_gathered(
    stage: int, forward: int, backward: int
) -> None:
    part = replace(PART, zero_stage=stage, zero_engine="deepspeed", data=2)
    found = gathered_moments(part, SHAPE, UNITS, 2)
    assert (found.forward, found.backward) == (forward, backward)
    # What is gathered ahead, of the layers, is there twice in a forward.
    large = PartShape(1 << 30, 1 << 30, 0)
    assert gathered_moments(replace(part, zero_stage=1), large, UNITS, 2).backward == 4 * BUCKET_ELEMENTS


def test_deepspeeds_third_stage_copies_a_bucket_that_it_sums() -> None:
    """Behind the layers, or amid their backward where they fill several; gloo copies it once more."""
    part = replace(PART, zero_stage=3, zero_engine="deepspeed", data=2)
    shape = replace(SHAPE, small=50)  # which are whole all the time
    found, of_gloo = (gathered_moments(part, shape, UNITS, 2, cuda) for cuda in (True, False))
    assert (found.idle, found.backward) == (4000 + 200, 8000)
    assert (found.ending, of_gloo.ending) == (4200 + 800 + 4000, 4200 + 800 + 8000)  # the layers' weights are gone
    large = gathered_moments(part, PartShape(1 << 27, 1 << 27, 0), UNITS, 2)
    assert large.backward == 4 * (2 * BUCKET_ELEMENTS + (1 << 27))
    assert gathered_moments(replace(part, zero_stage=2), SHAPE, UNITS, 2).ending == 0
    moments = stage_memory(part, spec(2), SHAPE, PASSING, False)
    assert moments.peak.taken["gathered"] == 12800 and "inside" not in moments.peak.taken
    forward = next(one for one in moments.others if one.name == FORWARD)
    assert forward.taken["gradients"] == 2000  # its buffer is there from the beginning


def test_fsdp_gathers_a_layer_beside_the_one_that_computes() -> None:
    part = replace(PART, zero_stage=3, zero_engine="fsdp", data=2)
    found = gathered_moments(part, SHAPE, UNITS, 2)
    assert (found.forward, found.loss, found.after) == (4 * (200 + 800), 4 * 200, 4 * (200 + 400))
    assert found.last == 4 * (200 + 800 + 400 + 150)  # with the layer's gradients, and those behind the layers
    assert found.backward == found.last + 4 * 400 + 2 * 4 * 200  # sent of the layer before, and what came of it
