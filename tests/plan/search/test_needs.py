"""Axes that cross nodes, and operations that a model needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.plan.count.loads import even_loads
from dhp.plan.run_plan import plan_run
from dhp.plan.search.needs import crossing, useful_operations

LAYOUT = ("text.parallelism=data", "text.data=2", "text.tensor=2", "text.num_actors=4", "vision.num_actors=4")


@pytest.mark.parametrize(
    ("node", "across"), [(8, {}), (2, {"vision": ["ulysses"], "text": ["data"]}), (1, {"text": ["data", "tensor"]})]
)
def test_axes_over_several_nodes(tiny_assets: Path, node: int, across: dict[str, list[str]]) -> None:
    plan = plan_run(resolve(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", *LAYOUT])))
    found = crossing(plan, node)
    assert {name: found.get(name, []) for name in across} == across
    assert bool(found) == bool(across)


def test_operations_are_those_of_the_model(tiny_assets: Path) -> None:
    plan = plan_run(resolve(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", *LAYOUT])))
    loads = even_loads(2, tokens=100, features=0, targets=10, replicas=2, merge_unit=4)
    found = useful_operations(plan, loads, window=64.0)
    assert found["text"] == pytest.approx(plan.family.decoder.work.flops([100] * 4, 40))
    assert found["vision"] == 0
