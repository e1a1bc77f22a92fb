"""Which layout a run's next attempt has, by the devices that there are."""

from __future__ import annotations

import json

import pytest

from dhp.supervise.attempt import Choice, ElasticLayout, ElasticLayouts, read_layouts, written

OWN, HALF, ONE = ElasticLayout(8), ElasticLayout(4, ("text.num_actors=4",)), ElasticLayout(1, ("text.num_actors=1",))
ALL = ElasticLayouts(OWN, (HALF, ONE))


@pytest.mark.parametrize(("there", "layout"), [(9, OWN), (8, OWN), (7, HALF), (4, HALF), (3, ONE), (1, ONE), (0, None)])
def test_the_largest_for_which_there_are_devices(there: int, layout: ElasticLayout | None) -> None:
    assert ALL.for_devices(there) == layout


def test_what_is_larger() -> None:
    assert (ALL.larger_than(OWN), ALL.larger_than(HALF), ALL.larger_than(ONE)) == ((), (8,), (8, 4))


def test_a_run_follows_its_devices() -> None:
    choice = Choice(ALL, OWN)
    assert choice.larger == () and choice.after(None, True, False) == choice
    shrunk = choice.after(5, False, False)
    assert (shrunk.now, shrunk.before, shrunk.larger) == (HALF, None, (8,))
    grown = shrunk.after(8, True, False)
    assert (grown.now, grown.before) == (OWN, HALF)
    assert grown.after(None, True, False) == Choice(ALL, OWN)  # it has trained
    assert grown.after(None, False, False) == grown  # a fault before it has


@pytest.mark.parametrize(("there", "ended"), [(None, True), (7, False), (9, False)])
def test_a_layout_that_it_grew_to_and_cannot_train_in_is_not_tried_again(there: int | None, ended: bool) -> None:
    grown = Choice(ALL, ONE).after(8, True, False)
    back = grown.after(there, False, ended)
    assert back == Choice(ALL, ONE, None, frozenset({8})) and back.larger == (4,)
    assert Choice(ALL, HALF, None, frozenset({8})).larger == ()


def test_a_run_that_is_refused_in_the_layout_that_it_began_in_stays_so() -> None:
    choice = Choice(ALL, OWN)
    assert choice.after(None, False, True) == choice
    assert choice.after(0, False, False) == choice  # too few for any


def test_layouts_are_read_back() -> None:
    assert read_layouts(json.loads(json.dumps(written(ALL)))) == ALL
