"""The cuts of both parts: together in a chain, each by itself elsewhere."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

import experiments.baselines  # noqa: F401  it registers profile and layers  # noqa: F401  it registers profile and layers
from dhp.core.errors import ConfigError
from dhp.plan.count.counted_model import count_model
from dhp.plan.count.samples import assumed_samples
from dhp.plan.cut import partition
from dhp.plan.cut.partition import LayerCuts, is_joint, part_cuts
from dhp.plan.cut.problem import bounds_of
from dhp.plan.cut.run_tables import needed_bytes
from dhp.plan.forecast.forecast import forecast
from dhp.plan.run_plan import Question, RunPlan, plan_run
from tests.helpers.rows import slow
from tests.helpers.tiny_families import save_family
from tests.plan.cut.test_partition import FROZEN_TOWER, config_of
from tests.plan.made import machine

TOWER = ("vision.parallelism=pipeline", "vision.num_actors=2", "vision.zero_stage=0", "vision.dtype=bfloat16")
DECODER = ("text.parallelism=pipeline", "text.num_actors=3", "training.batch_size=32", "training.schedule=1f1b")
CHAIN = ("cluster.chain=true", *TOWER, *DECODER)
APART = ("cluster.collocate=false", *TOWER, *DECODER)
LAYERS = 4  # of each part of the model
WHERE = ", over vision and text as one chain"


def plan_of(model: str, *overrides: str) -> RunPlan:
    return plan_run(config_of(model, *overrides))


def cuts_of(model: str, *overrides: str, trains: bool = True) -> dict[str, LayerCuts]:
    config = config_of(model, *overrides)
    return part_cuts(config, count_model(config), trains)


def step_s(model: str, *overrides: str) -> float:
    """As a forecast plays it."""
    plan = plan_of(model, *overrides)
    loads = assumed_samples(plan.config, plan.family).loads(plan.config)
    return forecast(Question(plan, machine(), loads)).timeline.step_s


@pytest.mark.parametrize("frozen", [slow(()), slow(FROZEN_TOWER)], ids=["trained", "frozen"])
def test_the_step_is_as_short_as_under_the_best_of_all_cuts(four_layers_model: str, frozen: tuple[str, ...]) -> None:
    """Played with both actors on the shared device, which the search takes for one."""
    inside = range(1, LAYERS)
    every = {
        (tower, cuts): step_s(four_layers_model, *CHAIN, *frozen, f"vision.cuts=[{tower}]", f"text.cuts={list(cuts)}")
        for tower, cuts in product(inside, combinations(inside, 2))
    }
    found = cuts_of(four_layers_model, *CHAIN, *frozen)
    assert found["vision"].why == found["text"].why and found["text"].why.startswith("exact, no cut is faster")
    assert found["text"].why.endswith(WHERE)
    own = every[(found["vision"].cuts[0], found["text"].cuts)]
    assert own <= 1.02 * min(every.values()) < max(every.values())
    assert own == step_s(four_layers_model, *CHAIN, *frozen)  # the graph has them


@pytest.mark.parametrize("method", [slow("bmp"), slow("profile"), "layers", slow("parameters")])
def test_each_method_cuts_the_whole_chain(method: str, four_layers_model: str) -> None:
    found = cuts_of(four_layers_model, *CHAIN, f"text.partition={method}")
    assert {name: len(one.cuts) for name, one in found.items()} == {"vision": 1, "text": 2}
    assert all(one.why.startswith(method) and one.why.endswith(WHERE) for one in found.values())
    if method == "layers":  # eight layers on four devices, the second of which has some of both parts
        (tower,), (first, second) = found["vision"].cuts, found["text"].cuts
        assert sorted((tower, LAYERS - tower + first, second - first, LAYERS - second)) == [1, 2, 2, 3]


def test_one_stage_of_either_part_is_in_the_chain_too(four_layers_model: str) -> None:
    """A whole tower beside the decoder's first layers leaves these fewer."""
    whole = ("vision.parallelism=none", "vision.num_actors=1")
    found = cuts_of(four_layers_model, *CHAIN, *whole, "text.num_actors=2", "text.partition=layers")
    assert set(found) == {"text"} and found["text"].cuts == (1,)
    found = cuts_of(four_layers_model, *CHAIN, "text.parallelism=none", "text.num_actors=1", "text.partition=layers")
    assert set(found) == {"vision"} and found["vision"].cuts == (3,)


def test_a_third_part_in_stages_has_cuts_of_its_own_beside_the_chain(tmp_path: Path) -> None:
    model = str(save_family("qwen3_omni", tmp_path / "omni"))
    heard = ("audio.num_actors=2", "audio.parallelism=pipeline", "audio.zero_stage=0", f"audio.model_name={model}")
    given = ("cluster.chain=true", "vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0", *heard)
    found = cuts_of(model, *given, "text.parallelism=pipeline", "text.num_actors=2", "training.schedule=1f1b")
    assert found["audio"] == LayerCuts((1,), "layers") and found["text"].why.endswith(WHERE)
    alone = cuts_of(model, *given, "text.parallelism=none", "text.num_actors=1", "training.schedule=1f1b")
    assert alone == {"audio": LayerCuts((1,), "layers")}


@pytest.mark.slow
def test_where_they_are_cut_apart_each_has_its_own(four_layers_model: str) -> None:
    found = cuts_of(four_layers_model, *APART)
    assert all(one.why.startswith("exact") and WHERE not in one.why for one in found.values())
    even = cuts_of(four_layers_model, *APART, "text.partition=layers")
    assert even["vision"] == LayerCuts((2,), "layers") and even["text"].why == "layers"
    heavy = cuts_of(four_layers_model, *APART, 'training.frozen=["blocks.[012]",patch_embed]')
    assert heavy["vision"].cuts == (3,)  # three layers without a backward take as long as one with it


def test_cuts_by_hand_and_runs_of_several_stages_are_no_chain_to_cut(four_layers_model: str) -> None:
    by_hand = ("vision.cuts=[1]",)
    assert is_joint(config_of(four_layers_model, *CHAIN))
    assert not is_joint(config_of(four_layers_model, *CHAIN, *by_hand))
    found = cuts_of(four_layers_model, *CHAIN, *by_hand)
    assert set(found) == {"text"} and WHERE not in found["text"].why
    interleaved = ("training.schedule=interleaved", "text.virtual_stages=2", "text.num_actors=2")
    found = cuts_of(four_layers_model, *CHAIN, *interleaved)
    assert found == {"vision": LayerCuts((2,), "layers"), "text": LayerCuts((1, 2, 3), "layers")}


def test_without_a_schedule_or_training_it_is_by_parameters(four_layers_model: str) -> None:
    for found in (
        cuts_of(four_layers_model, *CHAIN, "training.schedule=sequential"),
        cuts_of(four_layers_model, *CHAIN, trains=False),
    ):
        assert all(one.why == f"parameters{WHERE}" for one in found.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("vision.num_actors=5", r"vision has 4: pipeline\(5\) .* = 5 > layers\(4\)\. Set vision\.pipeline to 4"),
        ("text.num_actors=5", r"text has 4: pipeline\(5\) .* = 5 > layers\(4\)\. Set text\.pipeline to 4"),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_more_stages_than_layers_are_refused(four_layers_model: str, given: str, message: str, apart: bool) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(four_layers_model, *(APART if apart else CHAIN), given)


AUTO = ("text.recompute=auto", "vision.recompute=auto", "cluster.device=cpu")


@pytest.mark.parametrize("vision", ["auto", slow("none"), slow("mlp")])
def test_a_budget_is_kept_by_both_parts(four_layers_model: str, monkeypatch: pytest.MonkeyPatch, vision: str) -> None:
    seen: list[Any] = []

    def watched(problem: Any) -> Any:
        seen.append((problem, searched(problem)))
        return seen[-1][1]

    searched = partition.exact
    monkeypatch.setattr(partition, "exact", watched)
    given = (*CHAIN, *AUTO, f"vision.recompute={vision}", "memory.budget_gib=2")
    config = config_of(four_layers_model, *given)
    found = cuts_of(four_layers_model, *given)
    assert found["text"].why.endswith("(assumed)") and "which no cut" not in found["text"].why
    problem, _ = seen[-1]
    tower = [unit for unit in problem.units if unit.part == "vision" and unit.layers]
    assert problem.budget_bytes == 2 * 2**30 and config.vision.recompute == vision
    kinds = {"auto": {"none", "light", "mlp", "linear", "all"}}.get(vision, {"none"})
    assert all(set(unit.saved) == kinds and unit.saved["none"].held_bytes > 0 for unit in tower)
    assert all(len(unit.saved) == 5 for unit in problem.units if unit.part == "text" and unit.layers)
    least = replace(problem, budget_bytes=needed_bytes(problem) * 1.05)
    best = searched(least)
    first, end = bounds_of(least, best.cuts)[1]
    assert {unit.part for unit in least.units[first:end]} == {"vision", "text"}
    assert best.step_s >= searched(problem).step_s
    of_tower = set(best.recompute[: len(tower) + 2])
    assert of_tower - {"none"} if vision == "auto" else of_tower == {"none"}  # what is said stays so
