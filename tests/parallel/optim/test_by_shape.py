"""Muon and Adafactor over layouts, and shapes they need."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Adafactor
from transformers.optimization import Adafactor as LibraryAdafactor

from dhp.core.parameters import ParameterGroup
from dhp.parallel.optim.adafactor import make_adafactor
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

MATRIX_SHAPES = {"wide": (4, 12), "tall": (12, 4), "square": (6, 6), "thin": (1, 9), "vector": (7,), "stack": (3, 4, 5)}
MATRICES = {name for name, shape in MATRIX_SHAPES.items() if len(shape) == 2}
RATE, BETAS, EPS = 1e-2, (0.9, 0.99), 1e-8
Named = list[tuple[str, torch.nn.Parameter]]


def weights(dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(1)
    return [
        (name, torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)))
        for name, s in MATRIX_SHAPES.items()
    ]


def after_steps(make: Callable[[Named], list[torch.optim.Optimizer]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    named, generator = weights(dtype), torch.Generator().manual_seed(2)
    optimizers = make(named)
    for _ in range(5):
        for _, weight in named:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=dtype)
        for optimizer in optimizers:
            optimizer.step()
    return {name: weight.detach() for name, weight in named}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_is_torchs_to_the_bit(adjust: str, decay: float) -> None:
    group = lambda _: ParameterGroup("all", RATE, decay, 0)

    def plain(named: Named) -> list[torch.optim.Optimizer]:
        how = {"lr": RATE, "weight_decay": decay}
        hidden, others = ([w for n, w in named if (n in MATRICES) == kind] for kind in (True, False))
        muon = torch.optim.Muon(hidden, momentum=0.95, adjust_lr_fn=adjust, **how)
        return [muon, torch.optim.AdamW(others, betas=BETAS, eps=EPS, fused=True, **how)]

    own = after_steps(lambda named: [make_muon(named, group, BETAS, EPS, MATRICES, 0.95, adjust)], torch.float32)
    expected = after_steps(plain, torch.float32)
    assert {name for name in MATRIX_SHAPES if not torch.equal(own[name], expected[name])} == set()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_transformers(decay: float) -> None:
    group = lambda _: ParameterGroup("all", RATE, decay, 0)
    how = {"scale_parameter": False, "relative_step": False, "lr": RATE, "weight_decay": decay}
    own = after_steps(lambda named: [make_adafactor(named, group)], torch.float64)
    expected = after_steps(lambda named: [Adafactor([weight for _, weight in named], **how)], torch.float64)
    start = dict(weights(torch.float64))
    for name in MATRIX_SHAPES:
        moved = float((expected[name] - start[name]).norm().detach())
        assert float((own[name] - expected[name]).norm()) < 1e-12 * moved, name


def maker() -> Any:
    return partial(make_adafactor, group=group_of)


def plain(net: Net) -> list[torch.optim.Optimizer]:
    """As transformers' Trainer makes it."""
    how = {"lr": 1e-3, "scale_parameter": False, "relative_step": False}
    made = []
    for name, parameter in net.named_parameters():
        of = group_of(name)
        made.append(LibraryAdafactor([{"params": [parameter], "group": of, "weight_decay": of.weight_decay}], **how))
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
    theirs = LibraryAdafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    ours = make_adafactor([("weight", weight)], group_of)
    for size in (1e-6, 1e3):
        for one in (weight, own):
            one.grad = torch.full((2, 3), size, dtype=torch.float64)
        theirs.step()
        ours.step()
    torch.testing.assert_close(weight, own, rtol=1e-14, atol=0)
    assert float(weight.detach()[0, 0]) > 1 - 2 * 1e-2 * (1 + 0.1)  # no step is larger than the rate, beside the decay


# Of those with two axes, all but layer 6, which embeds.
MUON_MATRICES = {"layers.0.weight", "layers.2.weight", "layers.3.weight", "layers.7.weight"}
MUON_BETAS, MUON_EPS, MOMENTUM = (0.85, 0.97), 1e-7, 0.9


def muon_maker(adjust: str = "match_rms_adamw") -> Any:
    how = {"matrices": MUON_MATRICES, "momentum": MOMENTUM, "adjust": adjust}
    return partial(make_muon, group=group_of, betas=MUON_BETAS, eps=MUON_EPS, **how)


def plain_muon(adjust: str, net: Net) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = []
    for name, parameter in net.named_parameters():
        of = group_of(name)
        groups = [{"params": [parameter], "group": of, "weight_decay": of.weight_decay}]
        if name in MUON_MATRICES:
            made.append(torch.optim.Muon(groups, momentum=MOMENTUM, adjust_lr_fn=adjust))
        else:
            made.append(torch.optim.AdamW(groups, betas=MUON_BETAS, eps=MUON_EPS))
    return made


@pytest.mark.parametrize("adjust", ["match_rms_adamw", on_demand("original")])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_every_layout_takes_torchs_steps(layout: Layout, adjust: str, tmp_path: Path) -> None:
    run_on_ranks(train, layout.ranks, layout, muon_maker(adjust), range(3), str(tmp_path))
    assert deviation(read(tmp_path), train_plain(partial(plain_muon, adjust), range(3))) < 1e-12


@pytest.mark.parametrize("layout", [Layout(0, 2, 2), Layout(3, 3)], ids=str)
def test_parts_that_are_orthogonalized_by_themselves_show(layout: Layout, tmp_path: Path) -> None:
    run_on_ranks(train, layout.ranks, layout, muon_maker(), range(3), str(tmp_path), None, True)
    assert deviation(read(tmp_path), train_plain(partial(plain_muon, "match_rms_adamw"), range(3))) > 0.05


@pytest.mark.parametrize(("before", "after"), RESUMED, ids=str)
def test_muon_goes_on_in_any_layout(before: Layout, after: Layout, tmp_path: Path) -> None:
    straight, half, again, resumed = (tmp_path / name for name in ("straight", "half", "again", "resumed"))
    run_on_ranks(train, before.ranks, before, muon_maker(), range(2), str(half))
    run_on_ranks(train, after.ranks, after, muon_maker(), range(0), str(again), str(half))
    assert_equal(read(again, "states"), read(half, "states"))
    run_on_ranks(train, after.ranks, after, muon_maker(), range(2, 4), str(resumed), str(half))
    run_on_ranks(train, before.ranks, before, muon_maker(), range(4), str(straight))
    if before == after:
        assert_equal(read(resumed), read(straight))
        assert_equal(read(resumed, "states"), read(straight, "states"))
    assert deviation(read(resumed), read(straight)) < 1e-12


def test_a_matrix_has_one_state_and_what_else_there_is_adamws(tmp_path: Path) -> None:
    run_on_ranks(train, 1, Layout(0, 1), muon_maker(), range(1), str(tmp_path))
    kinds = {name: {"momentum_buffer"} if name in MUON_MATRICES else {"exp_avg", "exp_avg_sq"} for name in SHAPES}
    assert read(tmp_path, "states").keys() == {"step", *(f"{name}.{kind}" for name in SHAPES for kind in kinds[name])}


@pytest.mark.parametrize(("matrices", "kind"), [(("weight",), "momentum_buffer"), ((), "exp_avg")])
def test_matrices_alone_and_others_alone(matrices: tuple[str, ...], kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = make_muon([("weight", weight)], group_of, MUON_BETAS, MUON_EPS, matrices, MOMENTUM, "original")
    weight.grad = torch.ones(3, 2)
    optimizer.step()
    assert (
        isinstance(optimizer, Muon) and kind in optimizer.state[weight] and float(optimizer.state[weight]["step"]) == 1
    )
    assert len(optimizer.param_groups) == 1 and (weight < 1).all()
