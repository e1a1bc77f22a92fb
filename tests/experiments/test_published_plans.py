"""Plans at published lengths: what a search keeps, rates of a machine and rows."""

from __future__ import annotations

import pytest

from dhp.config.devices import GIB
from experiments.published import planned
from experiments.published.machine import Fitted, rates_of
from experiments.published.tables import PLANNED

CELLS = [
    {"row": "SP+TP", "patches": 64, "published": 5000, "predicted": 4000.0, "batch": 4},
    {"row": "ZeRO-3", "patches": 64, "published": "OOM", "predicted": "OOM", "batch": None},
    {"row": "SP+TP", "patches": 256, "published": 800, "predicted": 900.0, "batch": 4},
    {"row": "ZeRO-3", "patches": 256, "published": 1000, "predicted": 950.0, "batch": 8},
]


@pytest.fixture(scope="module")
def model(made_model: str) -> planned.Model:
    parts = ("vision", "text")
    settings = [f"{part}.{key}" for part in parts for key in (f"model_name={made_model}", "dtype=bfloat16")]
    free = [f"{part}.{key}=null" for part in parts for key in ("tensor", "data", "ulysses")]
    return planned.Model("tiny", None, (*settings, *free, "text.zero_stage=0", "vision.zero_stage=0"))


@pytest.fixture(scope="module")
def rows(model: planned.Model) -> list[dict]:
    return planned.planned_rows(CELLS, Fitted(), model, searches=("planned", "planned, larger batch"))


@pytest.mark.slow
def test_a_row_stands_beside_the_best_cell_of_its_length(rows: list[dict]) -> None:
    named = {(row["search"], row["state_bytes"], row["patches"]): row for row in rows}
    assert set(named) == {
        *(("planned", size, patches) for size in (16, 10) for patches in (64, 256)),
        *(("planned, larger batch", size, 64) for size in (16, 10)),  # the published batch of 256 is as large
    }
    assert named["planned", 16, 64]["beside"] == "SP+TP" and named["planned", 16, 256]["beside"] == "ZeRO-3"
    for (search, size, patches), row in named.items():
        assert row["role"] == PLANNED and row["error"] is None and row["fits"]
        assert row["batch"] == (4 if (search, patches) == ("planned", 64) else 8)
        assert row["predicted"] == pytest.approx(row["batch"] * patches / row["step_s"], rel=2e-3)
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"], abs=6e-4)
        goal = {"goal": {16: 1.2, 10: 1.35}[size], "met": patches == 256}  # 4 samples of 64 in 0.3 fixed seconds
        assert goal.items() <= row.items() if search == "planned" else "goal" not in row


def test_a_search_keeps_its_settings_and_the_form_of_states(model: planned.Model) -> None:
    kept = {"settings": ["text.tensor=2", "text.recompute=full", "training.micro_batch_size=BATCH"]}
    for state_bytes in (16, 10):
        one = planned.find_layout(model, Fitted(), kept, 256, 4, state_bytes)
        assert one is not None
        config = one.plan.config
        assert config.text.state_bytes == config.vision.state_bytes == state_bytes
        assert (config.text.tensor, config.training.micro_batch_size, config.training.batch_size) == (2, 4, 4)
        assert set(one.found.recompute["text"]) == {"all"}
        assert one.found.loads.step_tokens == 4 * (256 / 4 + 60)
        assert planned.layout_of(one, "text").startswith("tensor 2")


def test_a_machine_has_the_fitted_rates_and_a_searchs_factors() -> None:
    fitted = Fitted(device=2.0, host=3.0)
    plain, own = planned.machine_by(fitted, {}), rates_of("h100", "ib400", fitted)
    assert plain.rates["bfloat16"] == own
    assert plain.limit_bytes == 75 * GIB and plain.count == 8 and plain.step_s == 0.3
    slower = planned.machine_by(fitted, {"host": 2.0, "fixed": 2.0, "links": 0.5, "elementwise": 0.25})
    rates = slower.rates["bfloat16"]
    assert (rates.host_s, rates.elementwise) == pytest.approx((2 * own.host_s, own.elementwise / 4))
    assert rates.inner.bytes_s == own.inner.bytes_s / 2 and slower.step_s == 0.6
    assert rates.products == own.products


def test_layouts_in_words() -> None:
    assert planned.counts_of(("all", "none", "all")) == {"all": 2, "none": 1}
    assert list(planned.counts_of(("none", "all", "all", "light"))) == ["all", "light", "none"]


def test_a_length_without_a_layout_has_no_figure() -> None:
    row = planned.planned_row("planned", CELLS[:2], 16, None, patches=64, batch=4)
    assert (row["predicted"], row["ratio"], row["met"]) == (None, None, False)
