"""Dropout of adapters beside both parts of every declared family: alike in every layout."""

from __future__ import annotations

import pytest

from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings
from dhp.models import lora as adapters
from tests.engine.test_declared_families import EXACTLY, Made, made, run, staying_double
from tests.engine.test_parity import assert_exact
from tests.helpers.alike import assert_alike
from tests.helpers.layouts import FIRST_OUT, Case, train
from tests.helpers.rows import slow_but
from tests.helpers.tiny_families import FAMILIES

__all__ = ["made"]  # a fixture
ONE = Degrees()
TEXT = (("text", AdapterSettings(4, 8.0, dropout=0.2)),)
VISION = (("vision", AdapterSettings(2, 4.0, dropout=0.2)),)
ALWAYS = ["qwen3_5_moe", "kimi_k25"]  # gated delta nets and a shared expert; latent attention
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in FAMILIES if name not in ALWAYS]


@pytest.fixture(autouse=True)
def from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `tests.engine.test_adapters`."""
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)


@pytest.mark.parametrize("name", [*slow_but(ALWAYS, "kimi_k25"), *OTHERS])
def test_decoders_equal_the_plain_model(name: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], Case(ONE, Degrees(tensor=2), 2, packing=True, lora=TEXT, recompute="mlp")))


LAYOUTS = {"sequence": Degrees(ulysses=2), "data": Degrees(data=2)}


@pytest.mark.families
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_towers_are_alike(name: str, layout: str, made: dict[str, Made]) -> None:
    """Of a tower that takes pictures whole, the plain model takes several at once, so that a row has no picture."""
    with staying_double():
        plain = train(made[name].folder, Case(ONE, ONE, 1, packing=True, lora=VISION), made[name].steps, EXACTLY)
        case = Case(LAYOUTS[layout], Degrees(data=2), 2, lora=VISION)
        other = train(made[name].folder, case, made[name].steps, EXACTLY)
    assert_alike(plain, other)
