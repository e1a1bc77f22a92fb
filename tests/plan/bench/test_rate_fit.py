"""Rates solved for from measured seconds of known work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dhp.core.errors import DhpError
from dhp.plan.bench.rate_fit import NO_CHANNEL, Observation, errors, fit_channel, fit_rates, residual
from dhp.plan.count.rates import Channel, Operations, Rates, Transfer, spend

GIVEN = Rates(9e10, 4e10, 2e10, 8e-4, NO_CHANNEL, NO_CHANNEL)
WORKS = [
    Operations(products=6e7 * rows, attention=3e3 * rows * rows, elementwise=4e4 * rows, launched=launched)
    for rows in (4, 128, 512)
    for launched in (1.0, 3.0)
] + [Operations(products=1e10), Operations(attention=1e9)]


def seen(rates: Rates, works: list[Operations]) -> list[Observation]:
    return [Observation(work, spend(work, rates).total) for work in works]


def speeds(rates: Rates) -> tuple[float, ...]:
    return rates.products, rates.attention, rates.elementwise, rates.host_s


@pytest.mark.parametrize("ahead", [True, False])
def test_given_rates_are_found_again(ahead: bool) -> None:
    observations = seen(replace(GIVEN, ahead=ahead), WORKS)
    found = fit_rates(observations, ahead)
    assert speeds(found) == pytest.approx(speeds(GIVEN), rel=1e-4) and found.ahead == ahead
    assert residual(found, observations) < 1e-6
    assert residual(fit_rates(observations, not ahead), observations) > 1e-3


@pytest.mark.parametrize("host_s", [0.0, 3e-3])
def test_whether_the_host_takes_no_time_or_most(host_s: float) -> None:
    given = replace(GIVEN, host_s=host_s)
    works = [*WORKS, Operations(launched=1.0)] if host_s else WORKS
    found = fit_rates(seen(given, works))
    assert found.host_s == pytest.approx(host_s, rel=1e-4, abs=1e-7)
    assert found.products == pytest.approx(GIVEN.products, rel=1e-3)


def test_other_seconds_give_other_rates_and_what_fits_no_rates_is_seen() -> None:
    """The negative control."""
    slower = [replace(one, seconds=2 * one.seconds) for one in seen(GIVEN, WORKS)]
    assert fit_rates(slower).products == pytest.approx(GIVEN.products / 2, rel=1e-4)
    mixed = [replace(one, seconds=one.seconds * (2 if at % 2 else 1)) for at, one in enumerate(seen(GIVEN, WORKS))]
    assert residual(fit_rates(mixed), mixed) > 0.1


def test_no_rate_is_negative_nor_infinite_where_seconds_ask_for_it() -> None:
    """Attention that takes less the more there is."""
    works = [Operations(products=1e9, attention=pairs) for pairs in (1e6, 1e9)]
    found = fit_rates([Observation(works[0], 1.0), Observation(works[1], 0.9)])
    assert 0 < found.products < math.inf and 0 < found.attention < math.inf
    assert errors(found, [Observation(works[0], 1.0)])[0] == pytest.approx(0.0, abs=0.1)


def test_weights_decide_between_seconds_that_contradict() -> None:
    work = Operations(products=1e9)
    found = fit_rates([Observation(work, 1.0), Observation(work, 2.0, 1e-6)])
    assert found.products == pytest.approx(1e9, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_seconds_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(DhpError, match="1 of 1 are not positive"):
        fit_rates([Observation(WORKS[0], seconds)])


@pytest.mark.parametrize("operation", ["all-reduce", "send"])
def test_a_channel_gives_the_seconds_of_both_sizes(operation: str) -> None:
    given = replace(GIVEN, inner=Channel(3e9, 2e-4))
    pairs = [(size, Transfer(operation, size, 2).seconds(given)) for size in (1 << 18, 1 << 25)]
    found = fit_channel(operation, 2, pairs)
    assert (found.bytes_s, found.latency_s) == pytest.approx((3e9, 2e-4))
    assert [Transfer(operation, size, 2).seconds(replace(GIVEN, inner=found)) for size, _ in pairs] == pytest.approx(
        [seconds for _, seconds in pairs]
    )


def test_a_latency_is_not_negative() -> None:
    found = fit_channel("send", 2, [(100, 0.1), (1000, 2.0)])
    assert (found.bytes_s, found.latency_s) == (500.0, 0.0)


def test_seconds_that_do_not_grow_are_no_rate() -> None:
    with pytest.raises(DhpError, match="measure again when it is idle"):
        fit_channel("send", 2, [(100, 0.1), (1000, 0.1)])
