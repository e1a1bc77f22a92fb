"""Parts whose layers are computed otherwise train the same: by flash-attn, and compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.core.errors import ConfigError
from dhp.engine import stage
from dhp.models.registry import load_family
from dhp.parallel.attention import choose
from experiments.loops import Ours
from experiments.pair import join_alone
from tests.helpers.families import Maker
from tests.helpers.flash_attention import flash_attn_interface
from tests.helpers.rows import slow
from tests.helpers.tiny_families import FAMILIES, save_family

EXACT = 1e-9  # of each gradient's norm, in float64


def gradients(model: str, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step of two micro-batches with samples and pictures of several lengths, in float64."""
    data: Any = SimpleNamespace(family=load_family(model))
    with join_alone():
        ours = Ours(model, data, dtype="float64", **changes)
        found: dict[str, Tensor] = {}
        for trainer in ours.trainers.values():
            trainer.grad_norm_sq = partial(_noting, trainer, found, trainer.grad_norm_sq)
        first, second, _ = Maker(model).steps()
        return ours.step(ours.shard((tuple(first), tuple(second))))[1], found


def _noting(trainer: Any, found: dict[str, Tensor], measure: Any, *arguments: Any) -> float:
    named = trainer.model.named_parameters()
    found |= {name: p.grad.clone() for name, p in named if p.grad is not None}
    return measure(*arguments)


def assert_same(own: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]]) -> None:
    assert own[0] == pytest.approx(wanted[0], rel=1e-12)
    assert own[1].keys() == wanted[1].keys()
    largest = max(float(gradient.norm()) for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        error = float((own[1][name] - gradient).norm()) / max(float(gradient.norm()), 1e-6 * largest)
        assert error < EXACT, f"{name}: {error}"


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made, and run operation by operation: compiling them to kernels would take minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()


QUICK = "qwen2_5_vl"
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in FAMILIES if name != QUICK]


@pytest.mark.parametrize("name", [slow(QUICK), *OTHERS])
def test_compiled_layers_give_the_same_gradients(name: str, tmp_path: Path, uncompiled_kernels: None) -> None:
    model = str(save_family(name, tmp_path))
    wanted = gradients(model)
    assert_same(gradients(model, compiled=True), wanted)


def test_a_step_by_flash_attn_gives_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(save_family("qwen2_5_vl", tmp_path))
    wanted = gradients(model)
    calls: list[str] = []
    fake = flash_attn_interface(calls)
    monkeypatch.setattr(choose, "_package", lambda: fake)
    monkeypatch.setattr(stage, "require", lambda key, device: None)
    for packing in (True, False):
        calls.clear()
        assert_same(gradients(model, attention_backend="flash_attention_2", packing=packing), wanted)
        assert len(calls) == 2 * 3 + 3  # a call a layer: both micro-batches of the decoder, one has pictures


def test_a_rank_without_flash_attn_refuses(tmp_path: Path) -> None:
    model = str(save_family("qwen2_5_vl", tmp_path))
    with pytest.raises(ConfigError, match=r"vision.attention_backend=flash_attention_2: flash-attn is not installed"):
        gradients(model, attention_backend="flash_attention_2")
