"""From usages to costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.plan.recompute.profile import Profile, fullest
from tests.plan.made import MIB, ROWS, costs, probed, usage

KINDS = ("window", "full", "window", "full", "window", "full")


def test_costs_come_back() -> None:
    known = costs(6, kinds=KINDS)
    profile = Profile()
    for choices in (("all",) * 6, *probed(KINDS)):
        profile.add(usage(known, choices), timed=True)
    found = profile.costs()
    for choices in (("none",) * 6, ("all", "light", "mlp", "none", "none", "linear")):
        assert found.peak_bytes(choices) == pytest.approx(known.peak_bytes(choices), abs=0.01)  # not a byte off
        assert found.replay_s(choices) == pytest.approx(known.replay_s(choices))


def test_larger_micro_batches_scale_what_smaller_ones_showed() -> None:
    known = costs(4)
    profile = Profile()
    profile.add(usage(known, ("all",) * 4), timed=True)
    for choices in probed(known.kinds):
        profile.add(usage(known, choices, rows=ROWS // 2), timed=True)
    found = profile.costs()
    assert found.rows == ROWS
    assert found.peak_bytes(("none",) * 4) == pytest.approx(known.peak_bytes(("none",) * 4))


def test_what_all_layers_share_is_counted_once() -> None:
    known = costs(4)
    seen = usage(known, ("all",) * 4)
    first = replace(seen.layers[0], held_bytes=seen.layers[0].held_bytes + 7 * MIB)
    profile = Profile()
    profile.add(replace(seen, layers=(first, *seen.layers[1:])), timed=True)
    found = profile.costs()
    assert found.before_bytes == pytest.approx(known.before_bytes + 7 * MIB, abs=0.01)
    assert found.layer(0, "all").held_bytes == pytest.approx(known.layer(0, "all").held_bytes, abs=0.01)


def test_what_any_layer_holds_beyond_others_alike_counts_once() -> None:
    """As the merger of an inner layer's states: were it its kind's, each layer would be taken to hold it."""
    known = costs(3)
    seen = usage(known, ("all",) * 3)
    more = [replace(one, held_bytes=one.held_bytes + extra) for one, extra in zip(seen.layers, (7, 0, 5), strict=True)]
    profile = Profile()
    profile.add(replace(seen, layers=tuple(more)), timed=True)
    found = profile.costs()
    assert found.before_bytes == pytest.approx(known.before_bytes + 7 + 5, abs=0.01)
    assert found.layer(2, "all").held_bytes == pytest.approx(known.layer(2, "all").held_bytes, abs=0.01)


def test_a_layer_alone_with_its_choice_has_all_that_it_holds() -> None:
    known = costs(3)
    seen = usage(known, ("all", "none", "all"))
    more = [replace(one, held_bytes=one.held_bytes + extra) for one, extra in zip(seen.layers, (7, 4, 0), strict=True)]
    profile = Profile()
    profile.add(replace(seen, layers=tuple(more)), timed=True)
    found = profile.costs()
    assert found.before_bytes == pytest.approx(known.before_bytes + 7, abs=0.01)
    assert found.layer(1, "none").held_bytes == pytest.approx(known.layer(1, "none").held_bytes + 4, abs=0.01)


def test_seconds_of_a_first_step_do_not_count() -> None:
    known = costs(2)
    profile = Profile()
    slow = usage(known, ("all", "all"))
    profile.add(replace(slow, layers=tuple(replace(one, replay_s=100.0) for one in slow.layers)), timed=False)
    profile.add(slow, timed=True)
    assert profile.costs().layer(0, "all").replay_s == pytest.approx(1.0)


def test_nothing_seen_costs_nothing() -> None:
    assert Profile().costs() is None


def test_known_costs_are_refined_by_what_comes() -> None:
    known = costs(4)
    profile = Profile(known)
    assert profile.costs().peak_bytes(("mlp",) * 4) == pytest.approx(known.peak_bytes(("mlp",) * 4))
    profile.add(usage(known, ("mlp",) * 4, rows=2 * ROWS), timed=True)
    assert profile.costs().peak_bytes(("mlp",) * 4) == pytest.approx(2 * known.peak_bytes(("mlp",) * 4))


def test_seconds_that_are_known_are_of_a_step_whatever_its_micro_batches() -> None:
    known = costs(4)
    profile = Profile(known)
    profile.add(usage(known, ("mlp",) * 4, rows=2 * ROWS), timed=True)
    assert profile.costs().layer(0, "all").replay_s == known.layer(0, "all").replay_s > 0
    assert profile.costs().layer(0, "all").held_bytes == 2 * known.layer(0, "all").held_bytes


def test_the_fullest_rank_decides() -> None:
    small, large = (usage(costs(1), ("all",), rows=rows) for rows in (ROWS, 2 * ROWS))
    assert fullest([small, large, small]) is large
