"""A run whose plan is made while it trains: real entry, real actors, a budget that admits some of the layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.recompute import arrange
from dhp.schedule import sequential, vision_ahead
from tests.helpers.runs import tiny, train

BUDGET_GIB = 0.008  # between what all of it takes and what inputs of layers alone take
SETTINGS = [
    "training.warmup_ratio=0",
    "training.log_interval=1",
    "data.min_pixels=12544",  # all pictures alike
    "data.max_pixels=12544",
    "vision.recompute=auto",
    "text.recompute=auto",
    f"memory.budget_gib={BUDGET_GIB}",
]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_measured_tried_and_kept_for_the_next_run(tiny_assets: Path, tmp_path: Path) -> None:
    own = [*SETTINGS, f"memory.cache_dir={tmp_path / 'cache'}"]
    measured = train(*tiny(tiny_assets, tmp_path / "measured", *own, "training.max_steps=15"))
    assert measured.status == 0, measured.stderr
    said = measured.stdout + measured.stderr
    assert "expected on the fullest device" in said and "text.recompute=" in said
    last = metrics(tmp_path / "measured")[-1]["activation_bytes"]
    assert max(last.values()) <= BUDGET_GIB * 2**30
    assert (tmp_path / "cache" / "recompute.json").is_file()

    known = train(*tiny(tiny_assets, tmp_path / "known", *own, "training.max_steps=3"))
    assert known.status == 0, known.stderr
    assert "measured before" in known.stdout + known.stderr
    # One recomputed everything and the other what the plan says: the same to the bit, but other bytes.
    for theirs, ours in zip(metrics(tmp_path / "measured"), metrics(tmp_path / "known"), strict=False):
        assert (ours["step"], ours["loss"], ours["grad_norm"]) == (theirs["step"], theirs["loss"], theirs["grad_norm"])
        assert ours["activation_bytes"] != theirs["activation_bytes"]


def test_what_is_alive_together() -> None:
    one, two = sequential(4), vision_ahead(4)
    assert (arrange(one, True, "cpu").outstanding, arrange(two, True, "cpu").outstanding) == (1, 2)
    assert not arrange(one, True, "cpu").together and arrange(two, True, "cpu").together
    assert arrange(one, True, "cuda").together  # freed memory stays with the process that had it
    assert not arrange(one, False, "cpu").shared
