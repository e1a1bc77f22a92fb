"""Rates of a device: measured, fitted, told apart."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dhp.config.devices import Figure
from dhp.core.errors import DhpError, ModelError
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.plan.bench import layer_bench
from dhp.plan.bench import rate_bench as measuring
from dhp.plan.bench.layer_bench import Bench, LayerSeconds, PassTimes, measure_layers
from dhp.plan.bench.rate_bench import FILE, RateRequest, measured_rates, observe, row_shape
from dhp.plan.bench.rate_fit import (
    NO_CHANNEL,
    MeasuredChannel,
    MeasuredRates,
    Observation,
    PartRates,
    errors,
    fit_channel,
    fit_rates,
    residual,
)
from dhp.plan.bench.stopwatch import Stopwatch, measure_update, stopwatch
from dhp.plan.count.rates import Channel, Operations, Rates, Transfer, spend
from dhp.plan.count.row_bytes import TracedRows
from tests.helpers.tiny import save_llava_with_experts
from tests.helpers.tiny_families import save_family

TEXT = (TracedRows(16), TracedRows(48))
TOWER = (TracedRows(0, patches=64, windows=4), TracedRows(0, patches=128, windows=8))


@pytest.fixture
def watch() -> Iterator[Stopwatch]:
    with stopwatch("cpu", 1) as own:
        yield own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("part", "rows"), [("text", TEXT), ("vision", TOWER)])
def test_each_kind_of_layer_with_each_number_of_rows(
    made_model: str, part: str, rows: tuple[TracedRows, ...], dtype: str, watch: Stopwatch
) -> None:
    family = load_family(made_model)
    found = measure_layers(made_model, family, part, rows, dtype, watch, 0.5)
    kinds = dict.fromkeys(family.parts[part].layers.kinds)
    assert [(one.kind, one.rows) for one in found] == [(kind, own) for own in rows for kind in kinds]
    for one in found:
        assert one.attention is not None
        for seconds in (one.whole.forward, one.whole.backward, one.attention.forward, one.attention.backward):
            assert 0 < seconds < math.inf
        assert 0 < one.launch_s < math.inf
    assert sum(one.matrices is not None for one in found) == 1
    assert not dist.is_initialized()


def test_experts_and_deepstack_run_too(tmp_path: Path, watch: Stopwatch) -> None:
    model = str(save_family("qwen3_vl_moe", tmp_path))
    family = load_family(model)
    for part, rows in (("text", TEXT[:1]), ("vision", (TracedRows(0, patches=64),))):
        assert all(one.whole.backward > 0 for one in measure_layers(model, family, part, rows, "bfloat16", watch, 0.2))


def test_a_layer_runs_with_a_ranks_kernels_and_learns_all_of_it(made_model: str, watch: Stopwatch) -> None:
    with layer_bench._alone():
        bench = Bench(made_model, load_family(made_model), "text", "float32", watch)
        layer = bench.fill(0)
    replaced = [name for name, module in layer.named_modules() if "forward" in vars(module)]
    assert any("norm" in name for name in replaced)
    bench.passes(0, layer, TEXT[0])()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert bench.operations(0, layer, TEXT[0]) == 2 * 16 * sum(p.numel() for p in layer.parameters() if p.ndim > 1)


def test_less_time_than_it_takes_means_fewer_rows(made_model: str, watch: Stopwatch) -> None:
    rows = (TracedRows(256), TracedRows(1024))
    found = measure_layers(made_model, load_family(made_model), "text", rows, "float32", watch, 1e-3)
    assert all(one.rows.tokens < 1024 for one in found)


def test_a_part_that_looks_at_values_is_named(tmp_path_factory: pytest.TempPathFactory, watch: Stopwatch) -> None:
    model = str(save_llava_with_experts(tmp_path_factory.mktemp("experts")))
    with pytest.raises(ModelError, match="layers of the text part of .* cannot be measured by themselves"):
        measure_layers(model, load_family(model), "text", TEXT, "float32", watch, 0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_takes_time(dtype: str, watch: Stopwatch) -> None:
    assert 0 < measure_update(dtype, watch, 0.0) < 1e-3


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with stopwatch("cpu", before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def figure(value: float) -> Figure:
    return Figure(value, "measured", "a test")


TEXT_RATES = PartRates(*map(figure, (9e10, 4e10, 2e10, 8e-4, 1e9)), rows=(64, 256), residual=0.02, ahead=False)
SUMS, HANDOVER = (MeasuredChannel(figure(bytes_s), figure(1e-4)) for bytes_s in (1e9, 8e9))
RATES = MeasuredRates({"text": TEXT_RATES}, SUMS, HANDOVER)


@pytest.mark.parametrize("rates", [RATES, MeasuredRates({"text": TEXT_RATES}, None, HANDOVER)])
def test_plain_values_are_read_again(rates: MeasuredRates) -> None:
    assert MeasuredRates.from_json(json.loads(json.dumps(rates.to_json()))) == rates


def test_rates_of_a_part_have_its_channels() -> None:
    found = RATES.rates("text", node=2)
    assert (found.products, found.attention, found.elementwise, found.host_s) == (9e10, 4e10, 2e10, 8e-4)
    assert found.inner == found.outer == Channel(1e9, 1e-4) and found.node == 2 and not found.ahead
    assert RATES.rates("text", outer=Channel(5.0)).outer == Channel(5.0)
    alone = MeasuredRates({"text": TEXT_RATES}, None, HANDOVER)
    assert alone.rates("text").inner == Channel(8e9, 1e-4)


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
