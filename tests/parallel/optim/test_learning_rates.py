"""Schedules against transformers' own, step by step."""

from typing import Any

import pytest
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler

from dhp.core.errors import ConfigError
from dhp.parallel.optim.learning_rates import KINDS, RateCurve, learning_rate_at

PEAK = 3e-3
LENGTHS = [(20, 5), (20, 0), (7, 7), (1, 0), (3, 10)]  # of the run, of the warm-up


def reference_rates(name: str, total: int, warmup: int, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    name = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=kwargs
    )
    return taken(optimizer, scheduler, total)


def taken(optimizer: Any, scheduler: Any, total: int) -> list[float]:
    rates = []
    for _ in range(total + 2):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def own_rates(warmup: int, curve: RateCurve) -> list[float]:
    return [learning_rate_at(step, PEAK, warmup, curve) for step in range(curve.total_steps + 2)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), LENGTHS)
def test_rates_equal_transformers_at_every_step(kind, total, warmup):
    assert own_rates(warmup, RateCurve(kind, total)) == reference_rates(kind, total, warmup)


@pytest.mark.parametrize("cycles", [1, 2, 3])
@pytest.mark.parametrize(("total", "warmup"), LENGTHS)
def test_restarts_equal_transformers(cycles, total, warmup):
    own = own_rates(warmup, RateCurve("cosine_with_restarts", total, cycles=cycles))
    assert own == reference_rates("cosine_with_restarts", total, warmup, num_cycles=cycles)


@pytest.mark.parametrize("lowest", [3e-4, PEAK, 0.0])
@pytest.mark.parametrize(("total", "warmup"), LENGTHS)
def test_a_cosine_with_a_lowest_rate_equals_transformers(lowest, total, warmup):
    own = own_rates(warmup, RateCurve("cosine", total, lowest / PEAK))
    assert own == reference_rates("cosine_with_min_lr", total, warmup, min_lr=lowest)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    named = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr=lowest)
    assert own == taken(optimizer, named, total)


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("lowest", [0.0, 0.1])
@pytest.mark.parametrize(("total", "warmup", "decay"), [(20, 5, 4), (20, 0, 20), (20, 5, 0), (7, 3, 4), (1, 0, 1)])
def test_warmup_stable_decay_equals_transformers(decay_type, lowest, total, warmup, decay):
    own = own_rates(warmup, RateCurve("warmup_stable_decay", total, lowest, decay_steps=decay, decay_type=decay_type))
    how = {"num_decay_steps": decay, "decay_type": decay_type, "min_lr_ratio": lowest}
    assert own == reference_rates("warmup_stable_decay", total, warmup, **how)


def test_the_lowest_rate_of_schedules_that_have_none_in_transformers():
    assert own_rates(0, RateCurve("linear", 4, 0.5)) == pytest.approx(
        [PEAK * s for s in (1, 0.875, 0.75, 0.625, *[0.5] * 2)]
    )
    again = own_rates(0, RateCurve("cosine_with_restarts", 4, 0.5, cycles=2))
    assert again == pytest.approx([PEAK * share for share in (1, 0.75, 1, 0.75, 0.5, 0.5)])


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match="lr_scheduler_type=polynomial.*constant, linear, cosine"):
        learning_rate_at(0, 1.0, 0, RateCurve("polynomial", 1))
    assert len(KINDS) == 5
