"""Peaks of plans, against schedules walked through by hand. MiB."""

from __future__ import annotations

import json

import pytest

from dhp.plan.count.costs import Arrangement, StageCosts, predicted_bytes
from tests.plan.made import MIB, arrangement, costs


def test_with_everything_kept_the_peak_is_at_the_end_of_forward() -> None:
    known, choices = costs(3), ("none",) * 3
    assert known.held_bytes(choices) == (3 + 3 * 23 + 2) * MIB
    assert known.peak_bytes(choices) == known.held_bytes(choices)


def test_with_everything_recomputed_it_is_when_the_last_layer_runs_again() -> None:
    known, choices = costs(3), ("all",) * 3
    # What comes after the layers has gone by then: 3 before, 3 inputs, 22 of the last layer.
    assert known.peak_bytes(choices) == (3 + 3 + 22) * MIB


def test_what_the_last_layer_keeps_has_gone_when_others_recompute() -> None:
    known = costs(3)
    assert known.peak_bytes(("all", "all", "none")) == (3 + 2 + 23 + 2) * MIB  # the end of forward
    assert known.peak_bytes(("none", "all", "all")) == (3 + 23 + 2 + 22) * MIB  # the last layer's second run


@pytest.mark.parametrize(
    ("arrangement", "expected"),
    [
        # Vision holds 28 and peaks at 28 or, with two micro-batches, 56; text peaks at 51.
        (arrangement(shared=False, outstanding=1, together=False), 51),
        (arrangement(shared=False, outstanding=2, together=True), 56),
        (arrangement(shared=True, outstanding=1, together=False), 28 + 51),
        (arrangement(shared=True, outstanding=2, together=True), 56 + 51),
    ],
)
def test_the_fullest_device(arrangement: Arrangement, expected: int) -> None:
    parts = {"vision": costs(1), "text": costs(2)}
    plan = {"vision": ("none",), "text": ("none", "none")}
    assert predicted_bytes(parts, plan, arrangement) == expected * MIB


def test_as_json_and_back() -> None:
    known = costs(3, kinds=("slow", "only", "slow"))
    assert StageCosts.from_json(json.loads(json.dumps(known.to_json()))) == known
