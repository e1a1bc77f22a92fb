"""The fullest steps come first: a plan of what to recompute is made of them, and the user is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dhp.config.command_line import compose_config
from dhp.data.sampling.sampler import BatchLayout
from dhp.trainer.dry_run import dry_run
from dhp.trainer.preflight import prepare
from tests.data.sampling.test_balanced_sampler import Made, sampler
from tests.data.sampling.test_balanced_sampler import rows as rows_of
from tests.helpers.runs import tiny
from tests.trainer.test_recomputing import SETTINGS, plan


def balanced_loads(fullest_first: bool) -> list[dict[str, int]]:
    """Of each step of two balanced rows, image tokens of both, and tokens of the longer one. One sample is far longer
    than others, and another has far more pictures."""
    rng = np.random.default_rng(0)
    text = rng.integers(80, 120, 480)
    vision = text // 4
    text[300], text[400], vision[400] = 1000, 900, 900
    source = sampler(Made(vision, text), "isf", BatchLayout(1, 2, 4), fullest_first=fullest_first)
    found = []
    for step in range(source.steps(1) - 1):
        samples = [list(row) for row in rows_of(source.batch(step))]
        most = {"vision": sum(vision[row].sum() for row in samples), "text": max(text[row].sum() for row in samples)}
        found.append({part: int(tokens) for part, tokens in most.items()})
    return found


def test_a_plan_made_of_the_fullest_steps_is_never_exceeded(tiny_assets: Path, tmp_path: Path) -> None:
    """Where they come later, the budget is exceeded before more is recomputed."""
    too_much = "are more than the budget, so more is recomputed"
    uneven, planned = balanced_loads(False), balanced_loads(True)
    assert sorted(map(str, uneven)) == sorted(map(str, planned))  # the same steps
    late, _ = plan(tiny_assets, tmp_path / "late", 60, loads=uneven)
    early, parts = plan(tiny_assets, tmp_path / "early", 60, loads=planned)
    assert too_much in late and too_much not in early
    assert "does not fit" not in early and any(set(part.choices) != {"all"} for part in parts.values())


def test_a_dry_run_says_what_comes_first(tiny_assets: Path, tmp_path: Path) -> None:
    printed = [
        dry_run(
            prepare(compose_config("tiny", overrides=[*tiny(tiny_assets, tmp_path / "run")[1:], *SETTINGS, balance]))
        )
        for balance in ("data.balance=random", "data.balance=balanced")
    ]
    line = "data           the fullest steps come first (data.fullest_first)"
    assert [line in one.splitlines() for one in printed] == [False, True]
