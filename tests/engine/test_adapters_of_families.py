"""Adapters beside both parts of every declared family: sharded equals peft's own in the plain model, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings
from tests.engine.test_declared_families import Made, run
from tests.engine.test_declared_families import all_families as made
from tests.helpers.alike import assert_exact
from tests.helpers.layouts import Case
from tests.helpers.rows import slow_but
from tests.helpers.tiny_families import FAMILIES

__all__ = ["made"]  # a fixture
BOTH = (("vision", AdapterSettings(2, 4.0)), ("text", AdapterSettings(4, 8.0)))
CASE = Case(Degrees(), Degrees(tensor=2), 2, packing=True, lora=BOTH)
ALWAYS = ["qwen3_5_moe", "kimi_k25", "gemma3"]  # gated delta nets and a shared expert; latent attention; tied, windows
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in FAMILIES if name not in ALWAYS]


@pytest.mark.parametrize("name", [*slow_but(ALWAYS, "gemma3"), *OTHERS])
def test_equals_peft_on_the_plain_model(name: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], CASE))


@pytest.mark.slow
def test_experts_trained_whole_beside_adapters(made: dict[str, Made]) -> None:
    """Of a group of replicas that share experts out, each has all adapters, those of shared experts among them."""
    case = Case(Degrees(), Degrees(data=2, expert=2), 2, packing=True, lora=BOTH[1:], trainable=("mlp.experts",))
    assert_exact(run(made["kimi_k25"], case))


BY_EXPERT = Case(Degrees(data=2), Degrees(data=2, expert=2), 2, packing=True, lora=BOTH)
MORE = [
    *((name, BY_EXPERT) for name in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "gemma4_moe", "ernie4_5_vl_moe")),
    ("qwen3_omni", replace(BY_EXPERT, recompute="mlp")),
    ("kimi_k25", replace(CASE, trainable=("mlp.experts",))),  # of which each rank has a slice of the width
    ("qwen3_5", Case(Degrees(), Degrees(data=2), 2, packing=True, lora=BOTH, stages=2, recompute="light")),
    ("glm4v", Case(Degrees(tensor=2), Degrees(tensor=2), 2, packing=True, lora=BOTH, recompute="mlp")),
    ("qwen2_vl", Case(Degrees(tensor=2), Degrees(tensor=4), 2, lora=BOTH, recompute="light")),
]


@pytest.mark.families
@pytest.mark.parametrize(("name", "case"), MORE, ids=str)
def test_other_layouts(name: str, case: Case, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], case))
