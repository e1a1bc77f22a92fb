"""Which layout a run's next attempt has, by the devices that there are."""

from __future__ import annotations

import json

import pytest

from dhp.supervise.elastic import Layout, Layouts, read_layouts, written

OWN, HALF, ONE = Layout(8), Layout(4, ("text.num_actors=4",)), Layout(1, ("text.num_actors=1",))
ALL = Layouts(OWN, (HALF, ONE))


@pytest.mark.parametrize(("there", "layout"), [(9, OWN), (8, OWN), (7, HALF), (4, HALF), (3, ONE), (1, ONE), (0, None)])
def test_the_largest_for_which_there_are_devices(there: int, layout: Layout | None) -> None:
    assert ALL.for_devices(there) == layout


def test_what_is_larger() -> None:
    assert (ALL.larger_than(OWN), ALL.larger_than(HALF), ALL.larger_than(ONE)) == ((), (8,), (8, 4))


def test_layouts_are_read_back() -> None:
    assert read_layouts(json.loads(json.dumps(written(ALL)))) == ALL
