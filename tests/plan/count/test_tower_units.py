"""A tower as units: what they sum up to, and what the layout makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dhp.models.empty import list_parameters
from dhp.models.flops import NO_BACKWARD
from dhp.models.registry import load_family
from dhp.plan.count.decoder_units import SPEED
from dhp.plan.count.tower_units import tower_units
from dhp.plan.count.units import Unit
from dhp.plan.trainable import adapters_of, training_rules
from tests.plan.cut.test_partition import config_of

ONE = ("vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0", "text.num_actors=1",
       "text.parallelism=none")  # fmt: skip
PICTURES, TOKENS, WINDOWS = 4, 1024, 64  # those of an assumed micro-batch


def units_of(model: str, *overrides: str) -> tuple[Unit, ...]:
    config = config_of(model, *ONE, *overrides)
    family, adapters = load_family(model).having(("vision", "text")), adapters_of(config)
    rules = training_rules(config.training, family, adapters)
    return tower_units(config, family, list_parameters(model, family, adapters), rules)


def total(units: tuple[Unit, ...]) -> float:
    return sum(unit.forward_s for unit in units)


def layout(model: str) -> Any:
    """The assumed picture."""
    unit = load_family(model).tower.merge_unit
    windows = (TOKENS * unit // WINDOWS,) * WINDOWS
    return SimpleNamespace(
        patches=TOKENS * unit, frame_lengths=(TOKENS * unit,), window_lengths=windows, order=range(TOKENS)
    )


@pytest.mark.parametrize("name", ["four_layers_model", "qwen3_vl_model"])
def test_they_sum_up_to_the_whole_tower(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    family, units = load_family(model).having(("vision", "text")), units_of(model)
    assert total(units) * SPEED == pytest.approx(family.tower.work.flops([layout(model)] * PICTURES, NO_BACKWARD))
    held = [one.size for one in list_parameters(model, family) if one.part == "vision"]
    assert sum(unit.parameters for unit in units) == sum(held)
    layers = len(family.tower.layers.kinds)
    assert [unit.layers for unit in units] == [0, *[1] * layers, 0]
    assert [unit.cut for unit in units] == ["never", *["may"] * (layers - 1), "never", "never"]


def test_each_way_to_split_halves_what_a_rank_computes(four_layers_model: str) -> None:
    one = units_of(four_layers_model)
    for degree in ("tensor", "ulysses", "ring"):
        half = units_of(
            four_layers_model, "vision.parallelism=sequence", "vision.num_actors=2", "vision.ulysses=1",
            f"vision.{degree}=2"
        )  # fmt: skip
        assert [u.forward_s for u in half] == pytest.approx([u.forward_s / 2 for u in one]), degree
        assert half[1].output_bytes == one[1].output_bytes / (1 if degree == "tensor" else 2)
    two = units_of(four_layers_model, "vision.parallelism=data", "vision.num_actors=2")
    assert total(two) == pytest.approx(total(one) / 2)


def test_layers_with_windows_take_less_than_those_without(four_layers_model: str) -> None:
    kinds = load_family(four_layers_model).tower.layers.kinds
    seconds = {kind: {round(u.forward_s * 1e9) for u, k in zip(units_of(four_layers_model)[1:], kinds) if k == kind}
               for kind in kinds}  # fmt: skip
    assert all(len(alike) == 1 for alike in seconds.values())
    assert max(seconds["window"]) < min(seconds["full"])


def test_an_inner_merger_belongs_to_its_layer(qwen3_vl_model: str) -> None:
    units, tower = units_of(qwen3_vl_model), load_family(qwen3_vl_model).tower
    inner = {at for name, at in tower.leaves.items() if name != "embeddings"}
    sizes = [unit.parameters for unit in units[1:-1]]
    plain = min(sizes)
    assert {at for at, size in enumerate(sizes) if size > plain} == inner - {len(sizes) - 1}
    assert units[-1].parameters > 0 and units[0].parameters > 0


def test_what_trains_and_what_is_recomputed_goes_back(four_layers_model: str) -> None:
    shares = lambda units: [unit.backward_s / unit.forward_s for unit in units]
    assert shares(units_of(four_layers_model)) == pytest.approx([1, 2, 2, 2, 2, 2])
    frozen = units_of(four_layers_model, 'training.frozen=["blocks.[01]",patch_embed]')
    assert [unit.trains for unit in frozen] == [False, False, False, True, True, True]
    assert shares(frozen) == pytest.approx([0, 1, 1, 2, 2, 2])
    again = shares(units_of(four_layers_model, "vision.recompute='all:0,mlp:1'"))
    assert again[1] == pytest.approx(3) and 2.1 < again[2] < 2.9 and again[3] == pytest.approx(2)
