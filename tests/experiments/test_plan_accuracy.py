"""The experiment that holds plans to runs: its counter, its tables, its scores."""

from pathlib import Path

import pytest
import torch

from dhp.parallel.recompute.meter import LiveStorages
from experiments.plan_accuracy.__main__ import (
    ALIKE,
    any_machine,
    draw,
    kendall,
    layout_of,
    memory_scores,
    orders,
    regret,
)
from experiments.plan_accuracy.layout import CASES, GROUPS, SHAPES, Layout, Load, make_samples, save_shape, settings_of
from tests.helpers.figures import ROOT, rows
from tests.helpers.rows import slow_but


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_live_storages_of_a_known_computation() -> None:
    live = LiveStorages()
    with live, live.during("first"):
        kept = torch.ones(1000)
        view = kept[10:20]
        more = kept + 1  # 8,000 bytes
        del more
    with live, live.during("second"):
        twice = torch.cat([kept, kept])  # 12,000 bytes
        twice.untyped_storage().resize_(0)
        last = kept * view.sum()  # 8,000, and the 4 of the sum
    assert (live.peak, live.peak_moment) == (12_000, "second")
    assert live.shared == {"first": 4000, "second": 8000}
    assert live.bytes == kept.nbytes + last.nbytes
    del kept, view, last
    assert live.bytes == 0


def test_what_was_there_is_counted_once_it_is_seen_and_meta_tensors_never() -> None:
    there, live = torch.ones(64), LiveStorages()
    live.add([there, there[1:], torch.empty(1 << 20, device="meta")])
    assert live.bytes == there.nbytes


def test_samples_have_what_their_load_says() -> None:
    load = Load(8, 16, 20, 12)
    (sample,) = make_samples(load, 1)
    assert len(sample.input_ids) == load.tokens == 1 + 32 + 20
    assert sample.target_tokens == load.targets and len(sample.pixels[0]) == 4 * load.features


TRIED = ["replicas", "chain", "experts, 16 bits", "LoRA, frozen tower", "offload", "FSDP2"]


@pytest.mark.parametrize("name", slow_but(TRIED, "offload"))
def test_a_case_resolves_and_a_plan_knows_its_bytes(name: str, models: Path) -> None:
    expected = layout_of(CASES[name], models).expected(any_machine())
    assert all(own.peak.total > own.states.weights > 0 or own.peak.total > 0 for own in expected.memory.values())


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_layouts_of_a_group_resolve_and_do_the_same_work(group: str, models: Path) -> None:
    own = GROUPS[group]
    model = save_shape(models, own.shape)
    layouts = [Layout(model, own.load, settings_of(own, name)) for name in own.layouts]
    assert len(layouts) >= 5
    assert len({layout.plan.config.training.batch_size for layout in layouts}) == 1
    assert all(layout.plan.graph.device_count() == 2 for layout in layouts)


def test_the_tables_name_shapes_and_enough_cases() -> None:
    assert len(CASES) >= 20 and {case.shape for case in CASES.values()} <= set(SHAPES)


def test_scores_of_an_order_and_of_a_choice() -> None:
    assert kendall([1, 2, 3], [10, 20, 30]) == 1 and kendall([3, 2, 1], [10, 20, 30]) == -1
    assert kendall([1, 3, 2], [10, 20, 20.1], alike=0.02) == 1
    assert regret([2.0, 1.0], [10.0, 12.0]) == pytest.approx(0.2) and regret([1.0, 2.0], [10.0, 12.0]) == 0


def test_the_page_says_how_often_the_order_is_right() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    found = {}
    for group in ("decoder-heavy", "tower-heavy", "frozen tower", "long rows"):
        own = [row for row in rows("plan_accuracy", group=group) if "layout" in row]
        found[group] = orders([row["predicted_s"] for row in own], [row["measured_s"] for row in own], ALIKE)
    heavy, long, every = found["decoder-heavy"], found["long rows"], sum(found.values(), [])
    right = {name: f"{of.count(1)} of {len(of)}" for name, of in (("all", every), ("heavy", heavy), ("long", long))}
    assert f"planned faster in {right['all']} pairs, with a heavy decoder in {right['heavy']}" in " ".join(page.split())
    assert f"long rows in {right['long']}" in " ".join(page.split())


def test_memory_counts_too_little_as_a_failure(tmp_path: Path) -> None:
    row = {"mode": "memory", "case": "one", "stage": "text", "moment_predicted": "loss", "moment_measured": "loss"}
    row |= {"saved_error": 0.0, "live_error": -0.02, "saved_measured": 5, "saved_predicted": 5}
    row |= {"live_measured": 100, "live_predicted": 98}
    saved, live, moment = memory_scores([row])
    assert saved["met"] and not live["met"] and moment["alike"] == 1
    draw([row], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
