"""The search for layouts: pairs as arrays are pairs one by one, what is found fits, of those that tie the plainer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.parts import parts
from dhp.models.registry import load_family
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.rates import Channel, Rates
from dhp.plan.count.samples import EqualSamples, Samples
from dhp.plan.run_plan import plan_run
from dhp.plan.search.candidates import Pair, evaluate, firsts, join, ranked, settings_of
from dhp.plan.search.layout_search import Found, search
from dhp.plan.search.layouts import PartLayout, part_layouts
from dhp.plan.search.scorer import Rows, Scores
from dhp.plan.search.space import Space, WholeRun
from dhp.plan.trainable import training_rules

LINK = Channel(1e9, 1e-5)
RATES = Rates(1e12, 5e11, 1e10, 1e-5, LINK, Channel(1e8, 1e-4), 2)
FREE = {"recompute": "auto", "zero_stage": 0, "zero_engine": "auto", "num_actors": 1, "parallelism": "none"}
DEGREES = dict.fromkeys(("pipeline", "data", "ulysses", "ring", "tensor"))


def space_of(model: str, devices: int, memory: float, **more: object) -> Space:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    config = compose_config("tiny", overrides=[*names, "training.batch_size=16"])
    config = replace(config, **{name: replace(part, **FREE, **DEGREES) for name, part in parts(config).items()})
    family = load_family(model).having(parts(config))
    counted = Counted(family, model, training_rules(config.training, family), {}, "sft")
    machine = Machine("made", devices, 2, {"float32": RATES}, memory, LINK, contexts=False)
    samples = Samples(family, None, EqualSamples(256, 64, 32))
    return Space(config, WholeRun(config, counted), counted, machine, samples, {}, **more)


@cache
def found_for(model: str, devices: int, memory: float) -> Found:
    return search(space_of(model, devices, memory))


def test_of_those_that_tie_groups_of_every_layer_stay_on_a_node(made_model: str) -> None:
    """Two devices a node: Ulysses over four, of one kind, comes after Ulysses 2 × data 2, of two."""
    alike = [replace(one, found=replace(one.found, step_s=1.0)) for one in found_for(made_model, 4, 2.0**30).candidates]
    widest = [[part.ulysses * part.tensor for part in parts(one.plan.config).values()] for one in ranked(alike, 2)]
    across = [sum(own > 2 for own in of) for of in widest]
    assert across[0] == 0 < across[-1] and across == sorted(across)


def test_what_is_found_fits_and_the_fastest_is_first(made_model: str) -> None:
    found = found_for(made_model, 4, 2.0**30)
    assert found.candidates and all(one.fits for one in found.candidates)
    assert found.scored > found.fit > 20
    seconds = [one.found.step_s for one in found.candidates]
    assert seconds[0] <= min(seconds) * 1.01  # within which the plainer one comes first
    for one in found.candidates:
        plan = one.plan
        assert plan.graph.device_count() == 4
        assert plan.config.training.batch_size == 16


@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.slow), 200])
def test_quick_figures_are_those_of_the_whole_forecast(made_model: str, every: int) -> None:
    """The scorer's arrays are proved equal to the plain forecast: seconds to rounding, bytes no less, since they add
    what is never together. What a search leaves out is left out by these. Layouts without a pipeline: stages are cut
    evenly in them."""
    space = space_of(made_model, 4, 2.0**30)
    space = replace(space, machine=replace(space.machine, handover=Channel(float("inf"))))  # a search leaves it out
    layouts = {
        name: [one for one in part_layouts(name, section, space.whole.family, 4, (), 2)[0] if one.section.pipeline == 1]
        for name, section in parts(space.config).items()
    }
    for text, vision in zip(layouts["text"][::every], layouts["vision"][::every]):
        data = text.degrees.data
        rows = Rows(1, data, 16 // data)
        own, other = (space.scorer.scores([one], rows, ("none",)).score(0) for one in (text, vision))
        pair = Pair(own, other)
        whole = evaluate(space, pair, settings_of(space, pair)).found
        assert set(whole.recompute["text"]) == {"none"}
        assert pair.step_s == pytest.approx(whole.step_s - whole.fixed_s, rel=1e-6)
        assert pair.peak_bytes >= whole.peak.total * 0.999


@pytest.mark.slow
def test_little_memory_finds_layouts_that_divide_more(made_model: str) -> None:
    roomy, tight = found_for(made_model, 4, 2.0**30), found_for(made_model, 4, 14 * 2.0**20)
    assert tight.candidates and tight.fit < roomy.fit
    assert all(one.found.peak.total <= 14 * 2.0**20 * 0.95 for one in tight.candidates)
    assert tight.candidates[0].found.step_s >= roomy.candidates[0].found.step_s


def test_nothing_fits_names_the_smallest(made_model: str) -> None:
    found = found_for(made_model, 2, 2.0**20)
    assert not found.candidates and found.tight is not None
    assert found.tight.found.peak.total > 2.0**20


@pytest.mark.slow
def test_held_keys_stay(made_model: str) -> None:
    space = space_of(made_model, 4, 2.0**30, rows_held=True)
    text = replace(space.config.text, tensor=2, zero_stage=0)
    config = replace(space.config, text=text)
    whole = WholeRun(config, space.counted)
    held = replace(space, config=config, whole=whole, held={"text": {"tensor", "zero_stage"}})
    found = search(held)
    assert found.candidates
    for one in found.candidates:
        assert (one.plan.config.text.tensor, one.plan.config.text.zero_stage) == (2, 0)
        assert one.plan.config.training.micro_batch_size == config.training.micro_batch_size


@pytest.mark.parametrize("apart", [False, True])
def test_pairs_as_arrays_are_pairs_one_by_one(made_model: str, apart: bool) -> None:
    space = space_of(made_model, 4, 2.0**30)
    random = np.random.default_rng(0)
    layouts: dict[str, list[PartLayout]] = {
        name: part_layouts(name, section, space.whole.family, 4, (), 2)[0]
        for name, section in parts(space.config).items()
    }
    rows = Rows(1, 2, 8)

    def scores(name: str) -> Scores:
        return Scores(layouts[name][:12], ("none",), rows, *random.random((5, len(layouts[name][:12]))))

    texts, visions, limit = scores("text"), scores("vision"), 3.0
    pairs = join(texts, visions, apart, limit)
    found = [pairs.pair(number) for number in range(len(pairs))]
    assert [one.step_s for one in found] == pytest.approx(pairs.step_s.tolist())
    assert [one.peak_bytes for one in found] == pytest.approx(pairs.peak_bytes.tolist())
    fronts = {name: [of.score(at) for at in of.front] for name, of in (("text", texts), ("vision", visions))}
    for one in found[: len(texts)]:
        assert one == best([Pair(one.text, other, apart) for other in fronts["vision"]], limit)
    for one in found[len(texts) :]:
        assert one.vision is not None
        assert one == best([Pair(other, one.vision, apart) for other in fronts["text"]], limit)


def test_the_first_of_each_key_is_its_least(made_model: str) -> None:
    space = space_of(made_model, 4, 2.0**30)
    layouts = part_layouts("text", space.config.text, space.whole.family, 4, (), 2)[0][:2]
    seconds = np.array([4.0, 2.0, 3.0, 1.0])  # of two layouts, each with two choices
    made = [
        Scores(layouts, ("none", "all"), Rows(1, 1, 1), own, *np.zeros((4, 4)))
        for own in (seconds, seconds[::-1] - 0.5)
    ]
    pairs = [join(one, None, False, 1.0) for one in made]
    values = np.concatenate([one.step_s for one in pairs])
    found = firsts(pairs, values, np.ones(8, dtype=bool))
    assert [group.pair(at).text.layout for group, at in found] == [layouts[0], layouts[1]]
    assert [(pairs.index(group), at) for group, at in found] == [(1, 0), (0, 3)]
    assert firsts(pairs, values, values > 3.4)[0] == (pairs[1], 3)
    assert not firsts(pairs, values, values > 9.0)


def test_a_front_is_what_no_other_beats(made_model: str) -> None:
    space = space_of(made_model, 4, 2.0**30)
    layouts = part_layouts("text", space.config.text, space.whole.family, 4, (), 2)[0][:1]
    seconds, taken, none = np.array([3.0, 1.0, 2.0, 2.5]), np.array([1.0, 4.0, 2.0, 3.0]), np.zeros(4)
    scores = Scores(layouts, ("none", "light", "mlp", "all"), Rows(1, 1, 1), seconds, none, taken, none, none)
    assert scores.front.tolist() == [1, 2, 0]


def best(pairs: list[Pair], limit: float) -> Pair:
    fitting = [one for one in pairs if one.peak_bytes <= limit]
    return min(fitting, key=lambda one: one.step_s) if fitting else min(pairs, key=lambda one: one.peak_bytes)


def test_a_candidate_is_the_forecast_of_its_own_run(made_model: str) -> None:
    one = found_for(made_model, 4, 2.0**30).candidates[0]
    again = plan_run(one.plan.config, made_model)
    assert str(again.graph.stages) == str(one.plan.graph.stages)
    keys = {key for key in one.settings if key.endswith(".recompute")}
    assert keys == {"vision.recompute", "text.recompute"}
