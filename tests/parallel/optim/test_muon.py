"""Muon in every layout, against torch's own of whole matrices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dhp.parallel.optim.muon import Muon, make_muon
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import on_demand
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

# Of those with two axes, all but layer 6, which embeds.
MATRICES = {"layers.0.weight", "layers.2.weight", "layers.3.weight", "layers.7.weight"}
BETAS, EPS, MOMENTUM = (0.85, 0.97), 1e-7, 0.9


def maker(adjust: str = "match_rms_adamw") -> Any:
    how = {"matrices": MATRICES, "momentum": MOMENTUM, "adjust": adjust}
    return partial(make_muon, group=group_of, betas=BETAS, eps=EPS, **how)


def plain(adjust: str, net: Net) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = []
    for name, parameter in net.named_parameters():
        of = group_of(name)
        groups = [{"params": [parameter], "group": of, "weight_decay": of.weight_decay}]
        if name in MATRICES:
            made.append(torch.optim.Muon(groups, momentum=MOMENTUM, adjust_lr_fn=adjust))
        else:
            made.append(torch.optim.AdamW(groups, betas=BETAS, eps=EPS))
    return made


@pytest.mark.parametrize("adjust", ["match_rms_adamw", on_demand("original")])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_every_layout_takes_torchs_steps(layout: Layout, adjust: str, tmp_path: Path) -> None:
    run_on_ranks(train, layout.ranks, layout, maker(adjust), range(3), str(tmp_path))
    assert deviation(read(tmp_path), train_plain(partial(plain, adjust), range(3))) < 1e-12


@pytest.mark.parametrize("layout", [Layout(0, 2, 2), Layout(3, 3)], ids=str)
def test_parts_that_are_orthogonalized_by_themselves_show(layout: Layout, tmp_path: Path) -> None:
    run_on_ranks(train, layout.ranks, layout, maker(), range(3), str(tmp_path), None, True)
    assert deviation(read(tmp_path), train_plain(partial(plain, "match_rms_adamw"), range(3))) > 0.05


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


def test_a_matrix_has_one_state_and_what_else_there_is_adamws(tmp_path: Path) -> None:
    run_on_ranks(train, 1, Layout(0, 1), maker(), range(1), str(tmp_path))
    kinds = {name: {"momentum_buffer"} if name in MATRICES else {"exp_avg", "exp_avg_sq"} for name in SHAPES}
    assert read(tmp_path, "states").keys() == {"step", *(f"{name}.{kind}" for name in SHAPES for kind in kinds[name])}


@pytest.mark.parametrize(("matrices", "kind"), [(("weight",), "momentum_buffer"), ((), "exp_avg")])
def test_matrices_alone_and_others_alone(matrices: tuple[str, ...], kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = make_muon([("weight", weight)], group_of, BETAS, EPS, matrices, MOMENTUM, "original")
    weight.grad = torch.ones(3, 2)
    optimizer.step()
    assert (
        isinstance(optimizer, Muon) and kind in optimizer.state[weight] and float(optimizer.state[weight]["step"]) == 1
    )
    assert len(optimizer.param_groups) == 1 and (weight < 1).all()
