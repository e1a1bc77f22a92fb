"""Cuts of a run's decoder: the method of its configuration, by the model's shape."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import experiments.baselines  # noqa: F401  it registers profile and layers
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.models.empty import list_parameters
from dhp.models.flops import NO_BACKWARD
from dhp.models.registry import load_family
from dhp.models.shape import DecoderSizes
from dhp.plan.count.counted_model import Cut, count_model
from dhp.plan.count.loads import text_rows
from dhp.plan.count.samples import assumed_samples
from dhp.plan.cut import partition
from dhp.plan.cut.bmp import bmp, by_parameters
from dhp.plan.cut.partition import LayerCuts, PartUnits, part_cuts
from dhp.plan.cut.problem import Partition, PartitionProblem
from dhp.plan.cut.units import Unit
from dhp.plan.run_plan import plan_run
from tests.helpers.rows import slow
from tests.helpers.tiny import save_llava_with_experts
from tests.plan.made import RATES, machine

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


@pytest.fixture(autouse=True)
def round_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are operations by one rate: what a stage computes decides."""
    monkeypatch.setattr("dhp.plan.cut.partition.expected_machine", lambda *given: machine())


def cuts_of(model: str, *overrides: str, trains: bool = True) -> LayerCuts:
    config = config_of(model, *PIPELINE, *overrides)
    return part_cuts(config, count_model(config, model), trains)["text"]


def units_of(model: str, name: str, *overrides: str, keeps: bool = False) -> tuple[Unit, ...]:
    config = config_of(model, *overrides)
    return PartUnits(config, count_model(config, model)).of(name, keeps)


def largest(sizes: DecoderSizes, cuts: list[int]) -> int:
    bounds = [0, *cuts, len(sizes.layers)]
    own = [sum(sizes.layers[a:b]) for a, b in zip(bounds, bounds[1:])]
    own[0] += sizes.embedding
    own[-1] += sizes.norm + sizes.head
    return max(own)


def ends(numbers: Sequence[int]) -> tuple[int, ...]:
    """Units behind which nothing is cut: what is before the layers, the last layer, and what follows."""
    return (0, len(numbers) - 2, len(numbers) - 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_no_cut_has_a_smaller_largest_stage(sizes: DecoderSizes, stages: int) -> None:
    numbers = (sizes.embedding, *sizes.layers, sizes.norm + sizes.head)
    units = tuple(
        Unit(
            str(at),
            "text",
            int(0 < at < len(numbers) - 1),
            1.0,
            2.0,
            own,
            cut="never" if at in ends(numbers) else "may",
        )
        for at, own in enumerate(numbers)
    )
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


def test_bmp_takes_its_radius_and_candidates(four_layers_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, int]] = []

    def record(problem: PartitionProblem, score: None, **settings: int) -> Partition:
        taken.append(settings)
        return bmp(problem, score, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(partition, "bmp", record)
    near = ("text.partition=bmp", "text.partition_radius=2", "text.partition_candidates=3")
    cuts_of(four_layers_model, *near)
    cuts_of(four_layers_model, "text.partition=bmp")
    assert taken == [{"radius": 2, "best": 3}, {"radius": 1, "best": 15}]


def test_what_is_not_said_follows_from_the_schedule(four_layers_model: str) -> None:
    assert cuts_of(four_layers_model).why.startswith("exact")
    assert cuts_of(four_layers_model, "training.schedule=sequential").why == "parameters"
    interleaved = ("training.schedule=interleaved", "text.virtual_stages=2")
    assert cuts_of(four_layers_model, *interleaved) == LayerCuts((1, 2, 3), "layers")
    assert cuts_of(four_layers_model, *interleaved, "text.partition=exact").cuts == (1, 2, 3)
    assert cuts_of(four_layers_model, trains=False).why == "parameters"  # nothing is trained


def test_frozen_layers_weigh_what_they_compute(four_layers_model: str) -> None:
    """Nothing before the last layer trains: the others go forward alone, a third of its work."""
    frozen = ("training.trainable=['layers.3']", *FROZEN_TOWER)
    assert cuts_of(four_layers_model, *frozen).cuts == (3,)
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
        (["text.partition=bmp", "text.partition_radius=0"], "text.partition_radius=0 is not at least 1"),
        (["text.partition_candidates=3"], "is of text.partition=bmp, and text.partition is not set"),
        (["text.partition=layers", "text.cuts=[2]"], r"text.partition=layers with text.cuts=\[2\]: cuts by hand"),
        (["vision.partition=layers"], "text.partition says how the stages of all parts are cut"),
    ],
)
def test_what_cannot_be_is_refused(four_layers_model: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(four_layers_model, *PIPELINE, *overrides)


def test_a_run_has_the_cuts_that_its_dry_run_shows(four_layers_model: str) -> None:
    config = config_of(four_layers_model, *PIPELINE, *FROZEN_TOWER)
    plans = [plan_run(config, four_layers_model) for _ in range(2)]
    assert plans[0].graph == plans[1].graph
    found = cuts_of(four_layers_model, *FROZEN_TOWER)
    assert [stage.chunks[0].start for stage in plans[0].graph.of_part("text")][1:] == list(found.cuts)


def shares(units: Sequence[Unit]) -> list[float]:
    return [unit.backward_s / unit.forward_s for unit in units if unit.forward_s]


WHOLE = ("text.parallelism=none", "text.num_actors=1")


@pytest.mark.slow
def test_units_of_a_decoder_are_what_the_layout_makes_of_them(four_layers_model: str) -> None:
    one = units_of(four_layers_model, "text", *WHOLE)
    assert [unit.layers for unit in one] == [0, 1, 1, 1, 1, 0]
    assert [unit.cut for unit in one] == ["never", "may", "may", "may", "never", "never"]
    assert one[1].output_bytes == 4 * 64 * 4 * 2048  # four samples of float32
    config = config_of(four_layers_model, *WHOLE)
    sizes = count_model(config).sizes
    assert [unit.parameters for unit in one] == [sizes.embedding, *sizes.layers, sizes.norm + sizes.head]
    work = load_family(four_layers_model).decoder.work
    assert sum(unit.forward_s for unit in one) * 1e12 == pytest.approx(work.flops([2048] * 4, 4 * 512, NO_BACKWARD))
    assert replace(one[2], name="layer 0") == one[1]
    half = units_of(four_layers_model, "text", "text.parallelism=tensor", "text.tensor=2", "text.num_actors=2")
    assert [unit.forward_s for unit in half] == pytest.approx([unit.forward_s / 2 for unit in one])
    again = units_of(four_layers_model, "text", *WHOLE, "text.recompute=0-1")
    plain = shares(one)
    assert shares(again) == pytest.approx([plain[0] + 1, plain[1] + 1, *plain[2:]])
    frozen = units_of(four_layers_model, "text", *WHOLE, "training.trainable=['layers.[23]']", *FROZEN_TOWER)
    assert [u.trains for u in frozen] == [False, False, False, True, True, False]
    assert 1 < shares(frozen)[0] < plain[0] and shares(frozen)[2] == plain[2]


TOWER = ("vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0", "text.num_actors=1",
         "text.parallelism=none")  # fmt: skip


@pytest.mark.parametrize("name", ["four_layers_model", slow("qwen3_vl_model")])
def test_units_of_a_tower_sum_up_to_it(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    family, units = load_family(model).having(("vision", "text")), units_of(model, "vision", *TOWER)
    held = [one.size for one in list_parameters(model, family) if one.part == "vision"]
    assert sum(unit.parameters for unit in units) == sum(held)
    layers = len(family.tower.layers.kinds)
    assert [unit.layers for unit in units] == [0, *[1] * layers, 0]
    assert [unit.cut for unit in units] == ["never", *["may"] * (layers - 1), "never", "never"]


@pytest.mark.slow
def test_each_way_to_split_a_tower_halves_what_a_rank_computes(four_layers_model: str) -> None:
    one = units_of(four_layers_model, "vision", *TOWER)
    for degree in ("tensor", "ulysses", "ring"):
        split = ("vision.parallelism=sequence", "vision.num_actors=2", "vision.ulysses=1", f"vision.{degree}=2")
        half = units_of(four_layers_model, "vision", *TOWER[2:], *split)
        assert [u.forward_s for u in half] == pytest.approx([u.forward_s / 2 for u in one]), degree
        assert half[1].output_bytes == one[1].output_bytes / (1 if degree == "tensor" else 2)


def test_layers_with_windows_take_less_than_those_without(four_layers_model: str) -> None:
    kinds = load_family(four_layers_model).tower.layers.kinds
    each = list(zip(units_of(four_layers_model, "vision", *TOWER)[1:], kinds))
    seconds = {kind: {round(u.forward_s * 1e12) for u, own in each if own == kind} for kind in kinds}
    assert all(len(alike) == 1 for alike in seconds.values())
    assert max(seconds["window"]) < min(seconds["full"])


@pytest.mark.slow
def test_an_inner_merger_belongs_to_its_layer(qwen3_vl_model: str) -> None:
    units, tower = units_of(qwen3_vl_model, "vision", *TOWER), load_family(qwen3_vl_model).tower
    inner = {at for name, at in tower.leaves.items() if name != "embeddings"}
    sizes = [unit.parameters for unit in units[1:-1]]
    assert {at for at, size in enumerate(sizes) if size > min(sizes)} == inner - {len(sizes) - 1}
    assert units[-1].parameters > 0 and units[0].parameters > 0


@pytest.mark.slow
def test_what_of_a_tower_trains_goes_back(four_layers_model: str) -> None:
    plain = units_of(four_layers_model, "vision", *TOWER)
    assert shares(plain)[0] == pytest.approx(1)  # pixels have no gradient
    frozen = units_of(four_layers_model, "vision", *TOWER, 'training.frozen=["blocks.[01]",patch_embed]')
    assert [unit.trains for unit in frozen] == [False, False, False, True, True, True]
    assert shares(frozen)[0] == 0 and shares(frozen)[1] < shares(plain)[1] and shares(frozen)[3:] == shares(plain)[3:]


def test_what_units_keep_is_what_a_forecast_counts(four_layers_model: str) -> None:
    """The same bytes by layer and choice, of the same rows."""
    found = units_of(four_layers_model, "text", *WHOLE, "text.recompute=auto", "memory.budget_gib=1", keeps=True)
    config = config_of(four_layers_model, *WHOLE)
    plan = plan_run(config, four_layers_model)
    loads = assumed_samples(config, plan.family).loads(config)
    (stage,) = plan.graph.of_part("text")
    kept = plan.counted.keeps("text", Cut.of(config.text)).costs(text_rows(loads.worst, stage.degrees), stage.layers)
    for at, unit in enumerate(found[1:-1]):
        assert {c: (own.held_bytes, own.replay_bytes) for c, own in unit.saved.items()} == {
            choice: (kept.layers[str(at)][choice].held_bytes, kept.layers[str(at)][choice].replay_bytes)
            for choice in ("none", "light", "mlp", "linear", "all")
        }
    assert (found[0].saved["none"].held_bytes, found[-1].saved["none"].held_bytes) == (
        kept.before_bytes,
        kept.after_bytes,
    )


def test_rates_that_were_measured_here_are_named(four_layers_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's layers by a rate of its own."""
    slow = machine(measured={"vision": RATES, "text": replace(RATES, products=1e11)})
    plain = units_of(four_layers_model, "text", *WHOLE)
    monkeypatch.setattr("dhp.plan.cut.partition.expected_machine", lambda *given: slow)
    assert cuts_of(four_layers_model).why.endswith(", by rates measured before")
    assert units_of(four_layers_model, "text", *WHOLE)[1].forward_s > 2 * plain[1].forward_s
