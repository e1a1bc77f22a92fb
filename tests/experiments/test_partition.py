"""Columns of published tables by the published shapes, and cuts of a chain as the experiment runs and replays them."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from dhp.core.axes import Degrees
from dhp.plan.cut.exact import exact
from dhp.plan.cut.partition import pipeline_programs
from dhp.plan.cut.problem import PartitionProblem
from experiments.pair import TEXT, VISION, as_batch, join_alone
from experiments.partition.chain import Chain, Setting, Shape, Stages, measure_units, plan_chain, run_in_turn, stages_of
from experiments.partition.published import (
    at,
    columns,
    cuts_of,
    free_memory,
    layers_of,
    matching,
    problem_of,
    variances,
    with_layers,
)
from experiments.partition.shapes import BMP_LAYERS, INTERNLM2_20B, INTERNVIT, MODELS, STAGES, model_named
from experiments.small import deal, make_samples, save_even_model

MAIN = "InternViT 6B + InternLM2 20B"
SMALL = Shape(tower=32, tower_layers=3, decoder=32, decoder_layers=4, side=8, words=6)


def test_a_published_model_has_its_parameters_layers_and_hand_overs() -> None:
    units = problem_of(model_named(MAIN)).units
    assert INTERNVIT.parameters == 4 * 3200**2 + 2 * 3200 * 12800
    assert INTERNLM2_20B.keys == 1024 and INTERNLM2_20B.embedding == 92553 * 6144
    assert sum(unit.layers for unit in units) == 93
    by_name = {unit.name: unit for unit in units}
    assert by_name["vision 0"].output_bytes == 2 * 9 * 1025 * 3200
    assert by_name["projector"].output_bytes == 2 * (9 * 1025 // 4) * 6144
    assert by_name["text 0"].output_bytes == 2 * 4096 * 6144


@pytest.mark.slow
def test_hand_overs_are_the_published_ones() -> None:
    rows = {row["method"]: row for row in variances() if row["column"] == "SUM(comm)"}
    assert {method: row["ours"] for method, row in rows.items()} == {
        "parameters": 0.0, "layers": 8.305, "profile": 8.305, "bmp": -20.977, "exact": 8.305,
    }  # fmt: skip
    assert [row["agrees"] for row in rows.values()] == [None, True, False, True, None]


def test_columns_of_the_published_cut() -> None:
    problem = problem_of(model_named(MAIN))
    cuts = with_layers(problem, BMP_LAYERS)
    assert cuts == (22, 46, 71)  # behind the projector, and behind the embedding's 24 layers
    assert layers_of(problem, cuts) == list(BMP_LAYERS)
    found = columns(problem, cuts)
    tower, decoder = INTERNVIT.parameters, 24 * INTERNLM2_20B.parameters + INTERNLM2_20B.embedding
    stages = [22 * tower, 23 * tower + 4 * 3200 * 6144 + 6144**2, decoder, decoder]
    assert found.parameters == pytest.approx(np.var(np.array(stages) / 1e9))
    assert found.layers == np.var(BMP_LAYERS) == 0.6875
    assert found.hand_overs == pytest.approx((2 * 9 * 1025 * 3200 + 2 * 2306 * 6144 + 2 * 4096 * 6144) / 2**20)


def test_no_cut_has_the_published_variances_of_layers() -> None:
    problem = problem_of(model_named(MAIN))
    unit = columns(problem, with_layers(problem, BMP_LAYERS)).parameters / 0.83
    assert matching(problem, unit) == {"parameters": (23, 0), "layers": (293, 0), "profile": (0, 0), "bmp": (13, 4)}


def test_free_memory_follows_from_the_states() -> None:
    rows = [row for row in free_memory() if row["column"] == "free GB"]
    assert [row["ours"] for row in rows] == [57.9, 56.6, 32.6, 32.6]
    assert all(row["agrees"] for row in rows)


@pytest.mark.parametrize("frozen", ["", VISION, TEXT])
def test_no_rule_is_faster_than_the_search(frozen: str) -> None:
    problem = problem_of(model_named(MAIN, frozen))
    best = exact(problem)
    assert best.gap == 0
    assert all(at(problem, cuts) >= best.step_s - 1e-9 for cuts in cuts_of(problem).values())


def test_published_cuts_have_all_layers() -> None:
    for model in MODELS:
        assert sum(STAGES[model.name][0]) == model.tower.layers + model.decoder.layers
        assert len(STAGES[model.name][0]) == model.stages


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("partition")
    return save_even_model(folder, SMALL.tower, SMALL.decoder, SMALL.decoder_layers, SMALL.tower_layers)


@pytest.mark.slow
def test_a_cut_is_the_stages_of_both_parts(small_model: str) -> None:
    with join_alone():
        batch = _batch(small_model, 2)
        units = measure_units(small_model, SMALL, "", batch, steps=2)
    assert [unit.part for unit in units] == [VISION] * 3 + [TEXT] * 4
    assert all(unit.forward_s > 0 and unit.backward_s > 0 and unit.parameters for unit in units)
    assert stages_of(units, [1, 5]) == Stages(2, 2, (1,), (2,), shared=True)
    assert stages_of(units, [3, 5]) == Stages(1, 2, (), (2,), shared=False)
    assert stages_of(units, [1, 3]) == Stages(2, 1, (1,), (), shared=False)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["", VISION, TEXT])
def test_cuts_of_a_chain_have_the_same_loss(small_model: str, frozen: str) -> None:
    setting = Setting(stages=3, micro_batches=3, frozen=frozen)
    with join_alone():
        batch = _batch(small_model, setting.micro_batches)
        units = measure_units(small_model, SMALL, frozen, batch, steps=2)
        assert {unit.part for unit in units if not unit.trains} == {frozen} - {""}
        cuts = [(1, 5), (3, 6)]  # a device that both parts share, and a cut between them
        times = run_in_turn(small_model, setting, {own: stages_of(units, own) for own in cuts}, batch, 1)
    assert list(times) == cuts and all(own > 0 for own in chain(*times.values()))


@pytest.mark.slow
def test_a_replay_is_the_simulated_step_where_no_device_is_shared(small_model: str) -> None:
    stages, micro_batches = Stages(1, 2, (), (2,), shared=False), 6
    plan = plan_chain(small_model, stages, micro_batches)
    with join_alone():
        found = Chain(plan, micro_batches)
        seconds, _ = found.step(_batch(small_model, micro_batches))
        assert len(seconds) == 2 * 3 * micro_batches
        assert found.replay(dict.fromkeys(seconds, 1.0)) == 2 * (micro_batches + 3 - 1)
        odd = dict.fromkeys(seconds, 1.0) | {next(iter(seconds)): 50.0}  # what one micro-batch alone took
        assert found.replay(odd) > found.replay_alike(odd) == 2 * (micro_batches + 3 - 1)


def test_a_problem_has_a_stage_for_each_device() -> None:
    problem = problem_of(model_named("InternViT 6B + Llama3 70B"), 74.0)
    assert isinstance(problem, PartitionProblem)
    assert problem.programs == pipeline_programs("1f1b", 8, 1, 32)
    assert np.isclose(problem.budget_bytes, 74e9)


def _batch(model: str, micro_batches: int):
    samples = make_samples(micro_batches, SMALL.side, SMALL.words)
    return as_batch(deal(model, Degrees(), Degrees(), samples, micro_batches))
