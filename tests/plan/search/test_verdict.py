"""What is said of a run that has no room."""

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config, with_words
from dhp.config.resolve import resolve
from dhp.core.text import binary_size
from dhp.plan.run_plan import RunPlan, plan_run
from dhp.plan.search import verdict
from dhp.plan.search.verdict import expect, relief
from tests.helpers.runs import tiny

BF16 = ("text.dtype=bfloat16", "vision.dtype=bfloat16", "training.micro_batch_size=2", "training.batch_size=4")


def plan_of(tiny_assets: Path, run_dir: Path, *more: str) -> RunPlan:
    _, *words = tiny(tiny_assets, run_dir, *BF16, *more)
    return plan_run(resolve(compose_config("tiny", overrides=words)))


def test_each_change_is_told_with_what_its_forecast_has_less(tiny_assets: Path, tmp_path: Path) -> None:
    plan = plan_of(tiny_assets, tmp_path / "run")
    told = relief(plan, "text")
    head, _, changes = told.partition(": ")
    assert head == "By the forecast of this run, on the fullest device would free"
    found = dict(change.split(" ", 1) for change in changes.split(", "))
    assert {"text.recompute=full", "training.micro_batch_size=1"} <= found.keys(), told
    now = expect(plan).forecast
    for change, less in found.items():
        made = expect(plan_run(resolve(with_words(plan.config, [change])))).forecast
        assert now is not None and made is not None
        assert less == binary_size(now.peak.total - made.peak.total)


def test_a_tower_out_of_memory_is_offered_smaller_passes(tiny_assets: Path, tmp_path: Path) -> None:
    whole = plan_of(tiny_assets, tmp_path / "run", "training.batch_size=8", "training.vision_batch=null")
    count = max(edge.batch for edge in whole.graph.edges)
    assert count > 1 and f"training.vision_batch={count // 2} " in relief(whole, "vision")
    assert "vision_batch" not in relief(whole, "text")
    each = plan_of(tiny_assets, tmp_path / "run", "training.batch_size=8")
    assert "vision_batch" not in relief(each, "vision")


def test_what_is_in_force_or_cannot_be_is_not_told(tiny_assets: Path, tmp_path: Path) -> None:
    least = ("text.recompute=full", "text.state_bytes=10", "training.micro_batch_size=1")
    assert relief(plan_of(tiny_assets, tmp_path / "run", *least), "text") == ""
    zero = plan_of(tiny_assets, tmp_path / "run", "vision.zero_stage=1", "vision.num_actors=2")
    assert "state_bytes" not in relief(zero, "vision")  # DeepSpeed has its own states


def test_where_nothing_is_forecast_nothing_is_told(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "is_quick", lambda _: False)
    assert relief(plan_of(tiny_assets, tmp_path / "run"), "text") == ""
