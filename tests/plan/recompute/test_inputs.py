"""A cost reaches the plan by its field's name: what docs/developers/adding-a-planner-input.md adds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from dhp.core.reports import LayerUsage, StageUsage
from dhp.plan.count import costs
from dhp.plan.count.costs import LayerCost, StageCosts, read_costs, write_costs
from dhp.plan.recompute import profile
from dhp.plan.recompute.profile import Profile

SHAPE = {"model": "small"}


@dataclass(frozen=True)
class WiderUsage(LayerUsage):
    """What a rank measures, and the bytes that its layer sends."""

    sent_bytes: int = 0
    sent_s: float = 0.0


@dataclass(frozen=True)
class WiderCost(LayerCost):
    sent_bytes: float = 0.0
    sent_s: float = 0.0


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lists as `dhp.plan.recompute.profile` makes of the class."""
    names = [field.name for field in fields(WiderCost)]
    for module in (costs, profile):
        monkeypatch.setattr(module, "LayerCost", WiderCost)
    monkeypatch.setattr(profile, "BYTES", tuple(name for name in names if name.endswith("_bytes")))
    monkeypatch.setattr(profile, "SECONDS", tuple(name for name in names if name.endswith("_s")))


def step(sent_bytes: int, sent_s: float) -> StageUsage:
    layer = WiderUsage("full", "none", 80, 40, 0.5, sent_bytes, sent_s)
    return StageUsage(
        peak_bytes=200,
        before_bytes=8,
        after_bytes=4,
        rows=4,
        all_rows=8,
        forward_s=1.0,
        backward_s=2.0,
        layers=(layer,),
    )


def test_a_cost_that_is_measured_is_the_plans(wider: None, tmp_path: Path) -> None:
    seen = Profile()
    for sent_bytes, sent_s in ((16, 1.0), (24, 2.0), (8, 9.0)):
        seen.add(step(sent_bytes, sent_s), timed=True)
    found = seen.costs()
    assert found is not None
    assert found.layer(0, "none") == WiderCost(80.0, 40.0, 0.5, 24.0, 2.0)  # the most, and the median
    write_costs(tmp_path, SHAPE, {"text": found})
    assert read_costs(tmp_path, SHAPE) == {"text": found}
    assert Profile(found).costs() == found


def test_a_file_that_lacks_a_cost_or_has_another_is_measured_anew(tmp_path: Path) -> None:
    known = StageCosts(4, ("full",), 8.0, 4.0, {"full": {"none": LayerCost(80.0, 40.0, 0.5)}})
    write_costs(tmp_path, SHAPE, {"text": known})
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("replay_s", "replays_s"))
    assert read_costs(tmp_path, SHAPE) is None
