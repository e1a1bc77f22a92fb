"""Where a chain of units can be cut, and what its cuts are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dhp.plan.cut.units import FREE, Positions, StageLink, first_trained, layer_cuts
from tests.plan.cut.made import unit

TOWER = (
    unit("patches", part="vision", layers=0, cut="never"),
    unit("v0", part="vision"),
    unit("v1", part="vision", cut="never"),
    unit("merger", part="vision", layers=0),
)
DECODER = (
    unit("embedding", layers=0, cut="never"),
    unit("t0"),
    unit("t1", cut="never"),
    unit("head", layers=0),
)


def test_a_cut_is_nowhere_inside_of_a_unit_and_its_companion() -> None:
    assert Positions((*TOWER, *DECODER)).at.tolist() == [0, 2, 4, 6, 8]


def test_stages_are_of_any_length_but_none() -> None:
    allowed = Positions(DECODER).allowed
    assert allowed.tolist() == [[False, True, True], [False, False, True], [False] * 3]


def test_no_stage_goes_over_a_cut_that_is_always_there() -> None:
    positions = Positions((*TOWER[:-1], replace(TOWER[-1], cut="always"), *DECODER))
    spans = {(int(positions.at[a]), int(positions.at[b])) for a, b in np.argwhere(positions.allowed)}
    assert spans == {(0, 2), (0, 4), (2, 4), (4, 6), (4, 8), (6, 8)}


def test_sums_between_positions() -> None:
    positions = Positions(DECODER)
    assert positions.sums([1.0, 2.0, 4.0, 8.0])[0].tolist() == [0.0, 3.0, 15.0]
    assert positions.before([1.0, 2.0, 4.0, 8.0]).tolist() == [0.0, 3.0, 15.0]


def test_cuts_as_a_configuration_has_them() -> None:
    units = (*TOWER, *DECODER)
    assert layer_cuts(units, (2, 4, 6)) == {"vision": [1], "text": [1]}
    assert layer_cuts(DECODER, (2,)) == {"text": [1]}
    assert layer_cuts(units, (4,)) == {}


def test_a_backward_goes_to_the_first_that_trains() -> None:
    frozen = tuple(replace(one, trains=False) for one in TOWER)
    assert first_trained((*frozen, *DECODER)) == 4
    assert first_trained((*frozen, *DECODER), trained_before=True) == 0
    assert first_trained(frozen) == 4


def test_a_hand_over_takes_its_bytes_and_a_latency() -> None:
    assert StageLink(10.0, 0.5).seconds(20.0) == 2.5 and FREE.seconds(1e9) == 0.0
