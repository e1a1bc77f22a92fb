"""Adafactor in every layout, against transformers' own of whole weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from dhp.parallel.optim.adafactor import make_adafactor
from tests.helpers.ranks import run_on_ranks
from tests.parallel.optim.given_net import (
    RESUMED,
    SHAPES,
    SOME_LAYOUTS,
    Layout,
    Net,
    assert_equal,
    deviation,
    group_of,
    read,
    train,
    train_plain,
)


def maker() -> Any:
    return partial(make_adafactor, group=group_of)


def plain(net: Net) -> list[torch.optim.Optimizer]:
    """As transformers' Trainer makes it."""
    how = {"lr": 1e-3, "scale_parameter": False, "relative_step": False}
    made = []
    for name, parameter in net.named_parameters():
        of = group_of(name)
        made.append(Adafactor([{"params": [parameter], "group": of, "weight_decay": of.weight_decay}], **how))
    return made


@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_every_layout_takes_transformers_steps(layout: Layout, tmp_path: Path) -> None:
    run_on_ranks(train, layout.ranks, layout, maker(), range(3), str(tmp_path))
    assert deviation(read(tmp_path), train_plain(plain, range(3))) < 1e-12


@pytest.mark.parametrize("layout", [Layout(0, 2, 2)], ids=str)
def test_parts_that_are_updated_by_themselves_show(layout: Layout, tmp_path: Path) -> None:
    run_on_ranks(train, layout.ranks, layout, maker(), range(3), str(tmp_path), None, True)
    assert deviation(read(tmp_path), train_plain(plain, range(3))) > 0.01


@pytest.mark.parametrize(("before", "after"), RESUMED, ids=str)
def test_a_run_goes_on_in_any_layout(before: Layout, after: Layout, tmp_path: Path) -> None:
    straight, half, again, resumed = (tmp_path / name for name in ("straight", "half", "again", "resumed"))
    run_on_ranks(train, before.ranks, before, maker(), range(2), str(half))
    run_on_ranks(train, after.ranks, after, maker(), range(0), str(again), str(half))
    assert_equal(read(again, "states"), read(half, "states"))
    run_on_ranks(train, after.ranks, after, maker(), range(2, 4), str(resumed), str(half))
    run_on_ranks(train, before.ranks, before, maker(), range(4), str(straight))
    if before == after:
        assert_equal(read(resumed), read(straight))
        assert_equal(read(resumed, "states"), read(straight, "states"))
    assert deviation(read(resumed), read(straight)) < 1e-12


def test_states_are_of_rows_and_columns(tmp_path: Path) -> None:
    run_on_ranks(train, 2, Layout(3, 2), maker(), range(1), str(tmp_path))
    states = read(tmp_path, "states")
    expected = {"step": ()}
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            expected[f"{name}.exp_avg_sq"] = shape
        else:
            expected |= {f"{name}.exp_avg_sq_row": shape[:-1], f"{name}.exp_avg_sq_col": (*shape[:-2], shape[-1])}
    assert {name: tuple(values.shape) for name, values in states.items()} == expected


def test_an_update_far_beyond_the_average_is_scaled() -> None:
    weight, own = (torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [own], "weight_decay": 0.1}]
    theirs = Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    ours = make_adafactor([("weight", weight)], group_of)
    for size in (1e-6, 1e3):
        for one in (weight, own):
            one.grad = torch.full((2, 3), size, dtype=torch.float64)
        theirs.step()
        ours.step()
    torch.testing.assert_close(weight, own, rtol=1e-14, atol=0)
    assert float(weight.detach()[0, 0]) > 1 - 2 * 1e-2 * (1 + 0.1)  # no step is larger than the rate, beside the decay
