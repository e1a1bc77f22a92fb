"""Cuts of a run's decoder: the method of its configuration, by the model's shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import experiments.baselines  # noqa: F401  it registers profile and layers
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.models.flops import NO_BACKWARD
from dhp.models.registry import load_family
from dhp.models.shape import DecoderSizes
from dhp.planner.partition.even import by_parameters
from dhp.trainer import partition
from dhp.trainer.model_shapes import ModelShapes
from dhp.trainer.partition import LayerCuts, decoder_cuts
from dhp.trainer.plan import plan_run
from dhp.trainer.trainable import adapters_of, training_rules
from dhp.trainer.units import SPEED, decoder_units
from tests.helpers.tiny import save_llava_with_experts

SIZES = [
    DecoderSizes(0, (1,) * 8, 0, 0, False),
    DecoderSizes(30, (10,) * 6, 1, 30, False),
    DecoderSizes(30, (10,) * 6, 1, 30, True),
    DecoderSizes(5, (3, 9, 2, 7, 7, 1, 4), 1, 12, False),
]
PIPELINE = ("text.parallelism=pipeline", "text.num_actors=2", "training.batch_size=16", "training.schedule=1f1b")
FROZEN_TOWER = ("training.frozen=[vision,projector]", "vision.zero_stage=0")
AUTO = ("text.recompute=auto", "vision.recompute=none", "cluster.device=cpu")


def config_of(model: str, *overrides: str) -> Config:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    return resolve(compose_config("tiny", overrides=[*names, *overrides]))


def cuts_of(model: str, *overrides: str, before: bool | None = True) -> LayerCuts:
    config, family = config_of(model, *PIPELINE, *overrides), load_family(model)
    shapes = ModelShapes(family, model, adapters_of(config))
    rules = training_rules(config.training, family, shapes.adapters)
    return decoder_cuts(config, family, model, rules, shapes, before)


def largest(sizes: DecoderSizes, cuts: list[int]) -> int:
    bounds = [0, *cuts, len(sizes.layers)]
    own = [sum(sizes.layers[a:b]) for a, b in zip(bounds, bounds[1:])]
    own[0] += sizes.embedding
    own[-1] += sizes.norm + sizes.head
    return max(own)


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_no_cut_has_a_smaller_largest_stage(sizes: DecoderSizes, stages: int, four_layers_model: str) -> None:
    units = decoder_units(config_of(four_layers_model, *PIPELINE), load_family(four_layers_model), sizes)
    found = [cut - 1 for cut in by_parameters(units, stages)]  # the embedding is a unit
    every = [list(cuts) for cuts in combinations(range(1, len(sizes.layers)), stages - 1)]
    best = min(largest(sizes, cuts) for cuts in every)
    assert largest(sizes, found) == best
    assert found == min(cuts for cuts in every if largest(sizes, cuts) == best)  # the smallest first stages


def test_each_method_cuts_by_what_it_says(four_layers_model: str) -> None:
    """Four layers, an embedding and a head of as many parameters as one; the head computes a fraction of a layer."""
    found = {name: cuts_of(four_layers_model, f"text.partition={name}") for name in ("layers", "profile", "parameters")}
    assert {name: one.cuts for name, one in found.items()} == dict.fromkeys(found, (2,))
    assert all(one.why == name for name, one in found.items())
    exact = cuts_of(four_layers_model, "text.partition=exact")
    assert exact.cuts in ((2,), (3,)) and exact.why.startswith("exact, no cut is faster")
    assert cuts_of(four_layers_model, "text.partition=bmp").why.startswith("bmp")


def test_what_is_not_said_follows_from_the_schedule(four_layers_model: str) -> None:
    assert cuts_of(four_layers_model).why.startswith("exact")
    assert cuts_of(four_layers_model, "training.schedule=sequential").why == "parameters"
    interleaved = ("training.schedule=interleaved", "text.virtual_stages=2")
    assert cuts_of(four_layers_model, *interleaved) == LayerCuts((1, 2, 3), "layers")
    assert cuts_of(four_layers_model, *interleaved, "text.partition=exact").cuts == (1, 2, 3)
    assert cuts_of(four_layers_model, before=None).why == "parameters"  # nothing is trained


def test_frozen_layers_weigh_what_they_compute(four_layers_model: str) -> None:
    """Nothing before the last layer trains: the others go forward alone, a third of its work."""
    frozen = ("training.trainable=['layers.3']", *FROZEN_TOWER)
    assert cuts_of(four_layers_model, *frozen, before=False).cuts == (3,)
    assert cuts_of(four_layers_model).cuts == (2,)


def test_cuts_are_searched_together_with_recompute_under_a_budget(
    four_layers_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def watched(problem: Any) -> Any:
        seen.append((problem, searched(problem)))
        return seen[-1][1]

    searched = partition.exact
    monkeypatch.setattr(partition, "exact", watched)
    found = cuts_of(four_layers_model, *AUTO, "memory.budget_gib=0.05")
    assert "2,048 tokens" in found.why and "assumed" in found.why
    ((problem, best),) = seen
    assert problem.budget_bytes == 0.05 * 2**30
    layers = [unit for unit in problem.units if unit.layers]
    assert all(set(unit.saved) == {"none", "light", "mlp", "linear", "all"} for unit in layers)
    assert all(unit.saved["all"].held_bytes < unit.saved["none"].held_bytes for unit in layers)
    assert all(unit.saved["none"].held_bytes > 0 for unit in problem.units)  # embedding and head too
    assert set(best.recompute[1:-1]) - {"none"}  # it had to


def test_a_budget_that_assumed_rows_do_not_keep_is_no_error(four_layers_model: str) -> None:
    """Rows of a run may be shorter, and it measures them."""
    found = cuts_of(four_layers_model, *AUTO, "memory.budget_gib=0.0001")
    assert "which no cut has room for: no cut into 2 stages keeps within 0.00 GB a device" in found.why
    assert found.cuts == cuts_of(four_layers_model, *AUTO, "memory.budget_gib=9").cuts


def test_where_nothing_can_be_traced_the_budget_is_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = str(save_llava_with_experts(tmp_path_factory.mktemp("experts"), num_hidden_layers=4))
    found = cuts_of(model, *AUTO, "memory.budget_gib=0.02")
    assert found.why.startswith("exact, no cut is faster") and "without its budget" in found.why


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["text.partition=exakt"], "text.partition=exakt does not exist; .*; did you mean exact"),
        (["text.partition=omnibal"], "did you mean bmp"),
        (["text.partition=layers", "text.cuts=[2]"], r"text.partition=layers with text.cuts=\[2\]: cuts by hand"),
        (
            ["vision.partition=layers"],
            "text.partition says how the stages of all parts are cut",
        ),
    ],
)
def test_what_cannot_be_is_refused(four_layers_model: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(four_layers_model, *PIPELINE, *overrides)


def test_a_run_has_the_cuts_that_its_dry_run_shows(four_layers_model: str) -> None:
    config = config_of(four_layers_model, *PIPELINE, *FROZEN_TOWER)
    plans = [plan_run(config, four_layers_model) for _ in range(2)]
    assert plans[0].graph == plans[1].graph
    found = cuts_of(four_layers_model, *FROZEN_TOWER, before=False)
    assert [stage.chunks[0].start for stage in plans[0].graph.of_part("text")][1:] == list(found.cuts)


def test_units_are_what_the_layout_makes_of_them(four_layers_model: str) -> None:
    family = load_family(four_layers_model)
    sizes = DecoderSizes(7, (10, 10, 20, 20), 1, 7, False)
    one = decoder_units(config_of(four_layers_model, *PIPELINE), family, sizes)
    assert [unit.layers for unit in one] == [0, 1, 1, 1, 1, 0] and [u.cut for u in one][0] == one[4].cut == "never"
    assert one[3].forward_s > one[1].forward_s and one[1].backward_s == 2 * one[1].forward_s
    assert one[1].output_bytes == 4 * 64 * 4 * 2048  # four samples of float32
    cut = ("text.parallelism=tensor", "text.pipeline=2", "text.tensor=2", "text.num_actors=4")
    half = decoder_units(config_of(four_layers_model, *PIPELINE, *cut), family, sizes)
    assert [unit.forward_s for unit in half] == pytest.approx([unit.forward_s / 2 for unit in one])
    again = decoder_units(config_of(four_layers_model, *PIPELINE, "text.recompute=0-1"), family, sizes)
    assert [u.backward_s / u.forward_s for u in again[1:5]] == pytest.approx([3, 3, 2, 2])
    attention = sum(unit.forward_s for unit in one[1:5]) - _matrices(four_layers_model)
    assert attention == pytest.approx(4 * 2 * 2 * 8 * 8 * 4 * 2048**2 / 2 / SPEED)  # two products of 8 heads, 8 wide
    frozen = decoder_units(config_of(four_layers_model, *PIPELINE), family, sizes, {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.0})
    assert [u.trains for u in frozen] == [False, False, True, True, True, False]
    assert [u.backward_s / u.forward_s for u in frozen[1:5]] == pytest.approx([1, 1.5, 2, 2])
    assert replace(one[2], name="layer 0") == one[1]


def _matrices(model: str) -> float:
    """Seconds of all layers' products with matrices, by the family's own count of operations."""
    work = load_family(model).decoder.work
    return (work.flops([2048] * 4, 0, NO_BACKWARD) - 4 * work.pair * 2048**2) / SPEED
