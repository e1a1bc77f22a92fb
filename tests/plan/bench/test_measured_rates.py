"""Measured rates as plain values, and as those of a part."""

from __future__ import annotations

import json

import pytest

from dhp.config.devices import Figure
from dhp.plan.bench.rate_fit import MeasuredChannel, MeasuredRates, PartRates
from dhp.plan.count.rates import Channel


def figure(value: float) -> Figure:
    return Figure(value, "measured", "a test")


TEXT = PartRates(*map(figure, (9e10, 4e10, 2e10, 8e-4, 1e9)), rows=(64, 256), residual=0.02, ahead=False)
SUMS, HANDOVER = (MeasuredChannel(figure(bytes_s), figure(1e-4)) for bytes_s in (1e9, 8e9))
RATES = MeasuredRates({"text": TEXT}, SUMS, HANDOVER)


@pytest.mark.parametrize("rates", [RATES, MeasuredRates({"text": TEXT}, None, HANDOVER)])
def test_plain_values_are_read_again(rates: MeasuredRates) -> None:
    assert MeasuredRates.from_json(json.loads(json.dumps(rates.to_json()))) == rates


def test_rates_of_a_part_have_its_channels() -> None:
    found = RATES.rates("text", node=2)
    assert (found.products, found.attention, found.elementwise, found.host_s) == (9e10, 4e10, 2e10, 8e-4)
    assert found.inner == found.outer == Channel(1e9, 1e-4) and found.node == 2 and not found.ahead
    assert RATES.rates("text", outer=Channel(5.0)).outer == Channel(5.0)
    alone = MeasuredRates({"text": TEXT}, None, HANDOVER)
    assert alone.rates("text").inner == Channel(8e9, 1e-4)
