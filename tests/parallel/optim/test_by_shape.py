"""Muon and Adafactor beside implementations of others, on matrices of all shapes and what is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import Adafactor

from dhp.core.parameters import ParameterGroup
from dhp.parallel.optim.adafactor import make_adafactor
from dhp.parallel.optim.muon import make_muon

SHAPES = {"wide": (4, 12), "tall": (12, 4), "square": (6, 6), "thin": (1, 9), "vector": (7,), "stack": (3, 4, 5)}
MATRICES = {name for name, shape in SHAPES.items() if len(shape) == 2}
RATE, BETAS, EPS = 1e-2, (0.9, 0.99), 1e-8
Named = list[tuple[str, torch.nn.Parameter]]


def weights(dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(1)
    return [(name, torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype))) for name, s in SHAPES.items()]


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
    assert {name for name in SHAPES if not torch.equal(own[name], expected[name])} == set()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_transformers(decay: float) -> None:
    group = lambda _: ParameterGroup("all", RATE, decay, 0)
    how = {"scale_parameter": False, "relative_step": False, "lr": RATE, "weight_decay": decay}
    own = after_steps(lambda named: [make_adafactor(named, group)], torch.float64)
    expected = after_steps(lambda named: [Adafactor([weight for _, weight in named], **how)], torch.float64)
    start = dict(weights(torch.float64))
    for name in SHAPES:
        moved = float((expected[name] - start[name]).norm().detach())
        assert float((own[name] - expected[name]).norm()) < 1e-12 * moved, name
