"""Seconds of work by rates: what adds up, what goes on at once, what groups of ranks send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.config.devices import find_device, find_link
from dhp.core.errors import ConfigError
from dhp.plan.count.rates import Channel, Operations, Rates, Transfer, rates_of, soft_maximum, spend

RATES = Rates(100.0, 50.0, 10.0, 0.5, Channel(8.0), Channel(1.0), node=4)


def test_what_a_rank_waits_for_adds_up() -> None:
    work = Operations(200.0, 50.0, 30.0, 0.0, (Transfer("all-gather", 16.0, 2),))
    spent = spend(work, RATES)
    assert (spent.products, spent.attention, spent.elementwise, spent.sent) == (2.0, 1.0, 3.0, 1.0)
    assert spent.total == 7.0


def test_what_goes_on_at_once_is_a_soft_maximum() -> None:
    spent = spend(Operations(300.0, launched=6.0, hidden=(Transfer("send", 16.0, 2),)), RATES)
    assert (spent.host, spent.hidden) == (3.0, 2.0)
    assert spent.total == pytest.approx((27 + 27 + 8) ** (1 / 3))
    assert soft_maximum([5.0]) == 5.0 and soft_maximum([]) == 0.0
    assert soft_maximum([3.0, 3.0], 60) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize(
    ("operation", "nbytes"),
    [("all-reduce", 2 * 12.0), ("all-gather", 12.0), ("reduce-scatter", 12.0), ("all-to-all", 12.0), ("send", 16.0)],
)
def test_bytes_that_one_of_four_ranks_sends(operation: str, nbytes: float) -> None:
    sent = Transfer(operation, 16.0, 4, times=3.0)  # type: ignore[arg-type]
    assert sent.sent_bytes() == 3 * nbytes
    assert sent.seconds(RATES) == 3 * nbytes / 8


def test_a_cpus_library_scatters_sums_by_summing_all() -> None:
    scatter, total = (Transfer(operation, 16.0, 4) for operation in ("reduce-scatter", "all-reduce"))
    assert scatter.seconds(RATES) == total.seconds(RATES) / 2
    cpu = replace(RATES, ahead=False)
    assert scatter.seconds(cpu) == total.seconds(cpu) == total.seconds(RATES)


def test_one_rank_alone_sends_nothing() -> None:
    assert Transfer("all-reduce", 16.0, 1).seconds(RATES) == 0.0


def test_groups_over_several_nodes_go_by_the_links_between_them() -> None:
    assert RATES.channel(Transfer("all-reduce", 1.0, 4)).bytes_s == 8.0  # one node
    assert RATES.channel(Transfer("all-reduce", 1.0, 8)).bytes_s == 4.0  # four adapters a node
    assert RATES.channel(Transfer("all-reduce", 1.0, 2, stride=4)).bytes_s == 1.0  # one device of each node
    assert RATES.channel(Transfer("all-reduce", 1.0, 4, stride=2)).bytes_s == 2.0


def test_calls_wait_for_their_first_byte() -> None:
    slow = Rates(1.0, 1.0, 1.0, 0.0, Channel(1e9, 4.0), Channel(1e9, 4.0))
    assert Transfer("all-reduce", 0.0, 5, times=2).seconds(slow) == 2 * 2 * 4 / 4 * 4.0
    assert Transfer("all-to-all", 0.0, 5, times=2).seconds(slow) == 8.0


def test_works_add_and_repeat() -> None:
    one = Operations(1.0, 2.0, 3.0, 4.0, (Transfer("send", 5.0, 2),), (Transfer("send", 7.0, 2),))
    twice = one * 2
    assert spend(twice, RATES).sent == spend(one + one, RATES).sent == 2 * spend(one, RATES).sent
    assert (twice.products, twice.launched) == (2.0, 8.0)
    assert len((one + one).hidden) == 2


def test_an_all_to_all_over_nodes_leaves_each_by_the_devices_own_adapters() -> None:
    # Of 8 ranks on two nodes of 4, each sends 3 eighths inside its node and 4 eighths out of it.
    assert Transfer("all-to-all", 16.0, 8).seconds(RATES) == 16 / 8 * 3 / 8.0 + 16 / 8 * 4 / 1.0
    assert Transfer("all-to-all", 16.0, 4).seconds(RATES) == 12 / 8.0  # one node


def test_rates_of_a_device_are_the_shares_that_real_work_reaches() -> None:
    rates = rates_of(find_device("h100"), "bfloat16", 0.005, 8, find_link("ib400"))
    assert rates.products == pytest.approx(544.17e12) and rates.attention == pytest.approx(336.396e12)
    assert rates.elementwise == pytest.approx(2.412e12)
    assert rates.inner.bytes_s == pytest.approx(378e9) and rates.outer.bytes_s == pytest.approx(45e9)


def test_a_format_without_a_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match="device=t4 has no peak in bfloat16: known are float16, float32"):
        rates_of(find_device("t4"), "bfloat16", 0.0, 8, find_link("eth10"))


def test_a_host_that_does_not_launch_ahead_adds_to_the_rest() -> None:
    spent = spend(Operations(300.0, launched=6.0, hidden=(Transfer("send", 16.0, 2),)), replace(RATES, ahead=False))
    assert spent.total == pytest.approx(6 + 2)  # and so do its sends
