"""Rates measured before a run: of real layers once, and of the cache from then on."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.errors import DhpError
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.plan.bench import rate_bench as measuring
from dhp.plan.bench.layer_bench import LayerSeconds, PassTimes
from dhp.plan.bench.rate_bench import FILE, RateRequest, measured_rates, observe, row_shape
from dhp.plan.bench.rate_fit import NO_CHANNEL, fit_rates
from dhp.plan.count.rates import Rates, spend
from tests.plan.bench.test_measured_rates import RATES

ASKED = RateRequest({"vision": "float32", "text": "float32"}, {"vision": 128, "text": 64})


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.mark.slow
def test_a_real_measurement(made_model: str, tmp_path: Path, idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LIMIT_S", 0.2)
    said: list[str] = []
    found = measured_rates(made_model, load_family(made_model), ASKED, tmp_path, said.append)
    assert len(said) == 1 and list(found.parts) == ["vision", "text"] and found.sums is not None
    for part in found.parts.values():
        figures = (part.products, part.attention, part.elementwise, part.host_s, part.update)
        assert all(0 <= one.value < math.inf and one.kind == "measured" for one in figures)
        assert all(one.value > 0 for one in figures if one is not part.host_s)
        assert "torch" in part.products.source and math.isfinite(part.residual)
    for channel in (found.sums, found.handover):
        assert channel.bytes_s.value > 0 and channel.latency_s.value >= 0


def counted(monkeypatch: pytest.MonkeyPatch) -> list[RateRequest]:
    """Calls that measure, which find made-up rates."""
    calls: list[RateRequest] = []

    def measure(source: str, family: Family, asked: RateRequest, origin: object) -> object:
        calls.append(asked)
        return RATES

    monkeypatch.setattr(measuring, "_measure", measure)
    return calls


def test_a_second_call_reads_what_the_first_measured(
    made_model: str, tmp_path: Path, idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, family = counted(monkeypatch), load_family(made_model)
    assert measured_rates(made_model, family, ASKED, tmp_path) == RATES
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))  # reading needs no idle machine
    assert measured_rates(made_model, family, ASKED, tmp_path) == RATES and len(calls) == 1


@pytest.mark.parametrize(
    "other", [{"threads": 2}, {"dtypes": {"text": "bfloat16"}}, {"rows": {"vision": 128, "text": 65}}], ids=str
)
def test_what_rates_depend_on_is_measured_anew(
    made_model: str, tmp_path: Path, idle: None, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    calls, family = counted(monkeypatch), load_family(made_model)
    for asked in (ASKED, replace(ASKED, **other), ASKED):
        measured_rates(made_model, family, asked, tmp_path)
    assert len(calls) == 2


def test_another_model_or_a_broken_file_is_measured_anew(
    made_model: str, few_keys_model: str, tmp_path: Path, idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    for model in (made_model, few_keys_model):
        measured_rates(model, load_family(model), ASKED, tmp_path)
    (tmp_path / FILE).write_text('{"half')
    measured_rates(made_model, load_family(made_model), ASKED, tmp_path)
    assert len(calls) == 3


def test_a_busy_machine_is_refused(made_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    with pytest.raises(DhpError, match=r"in the last minute 1000000\.0 processes .* wait a minute"):
        measured_rates(made_model, load_family(made_model), ASKED, tmp_path)
    assert not calls and not (tmp_path / FILE).exists()


@pytest.mark.parametrize("part", ["vision", "text"])
def test_seconds_of_given_rates_give_these_rates(made_model: str, part: str) -> None:
    """With the very works that a plan counts: layers of one kind do what is counted of them, and no other."""
    family, given = load_family(made_model), Rates(9e10, 4e10, 2e10, 8e-4, NO_CHANNEL, NO_CHANNEL)
    kinds = family.parts[part].layers.kinds
    one = PassTimes(1.0, 1.0)
    measured = [
        LayerSeconds(kinds.index(kind), kind, row_shape(family, part, count), one, (1e9, one), one, 1.0)
        for count in (256, 4096)
        for kind in dict.fromkeys(kinds)
    ]
    found = [own for every in observe(made_model, family, part, "float32", measured) for own in every]
    assert {own.seconds for own in found} == {1.0, 2.0}
    exact = [replace(own, seconds=spend(own.work, given).total) for own in found]
    rates = fit_rates(exact)
    assert (rates.products, rates.attention, rates.elementwise, rates.host_s) == pytest.approx(
        (given.products, given.attention, given.elementwise, given.host_s), rel=1e-3
    )


def test_a_picture_has_whole_windows(made_model: str) -> None:
    family = load_family(made_model)
    rows = row_shape(family, "vision", 1000)
    assert rows.patches % rows.windows == 0 and abs(rows.patches - 1000) < rows.patches // rows.windows
