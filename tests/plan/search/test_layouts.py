"""Layouts that are tried, held, refused, explained and searched."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.layout import DEGREES, PARALLELISMS, resolve_part
from dhp.config.parts import parts
from dhp.config.resolve import resolve
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ConfigError, DhpError
from dhp.models.family import Family
from dhp.models.pretrained import config_source
from dhp.models.registry import load_family
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.loads import even_loads
from dhp.plan.count.rates import Channel, Rates
from dhp.plan.count.samples import EqualSamples, Samples
from dhp.plan.forecast.forecast import Forecast
from dhp.plan.run_plan import plan_run
from dhp.plan.search.candidates import Pair, evaluate, firsts, join, ranked, settings_of
from dhp.plan.search.free_keys import (
    ALL,
    PASSES,
    ROWS,
    SCHEDULE,
    find_held,
    freed,
    held_keys,
    one_actor_each,
    with_settings,
)
from dhp.plan.search.inverse import _first, _last
from dhp.plan.search.layout_search import Found, search
from dhp.plan.search.layouts import PartLayout, PlanChecks, Refused, part_layouts
from dhp.plan.search.needs import crossing, useful_operations
from dhp.plan.search.scorer import Rows, Scores
from dhp.plan.search.space import Space, WholeRun
from dhp.plan.search.verdict import loses_by, refusals
from dhp.plan.trainable import training_rules
from dhp.trainer.preflight import prepare
from tests.helpers.rows import slow
from tests.helpers.runs import ONE_ACTOR_EACH
from tests.helpers.tiny_omni import save_omni

SEVEN_B = "Qwen/Qwen2.5-VL-7B-Instruct"
NODE = 8


def composed(assets: Path, *overrides: str) -> Config:
    """The tiny run with one actor a part, whose step can be cut for up to six replicas."""
    more = ("training.batch_size=12", "training.micro_batch_size=1", *ONE_ACTOR_EACH)
    return compose_config("tiny", overrides=[f"tiny_assets={assets}", *more, *overrides])


@cache
def family_of(source: str) -> Family:
    return load_family(source).having(("vision", "text"))


def found(
    name: str, source: str, devices: int, section: PartConfig | None = None, **more: Any
) -> tuple[list[PartLayout], list[Refused]]:
    return part_layouts(name, section or PartConfig(), family_of(source), devices, **more)


def run_says(config: Config) -> str:
    """The message with which a run ends before it starts; "": none."""
    try:
        prepare(config, new_run=False)
    except DhpError as error:
        return str(error)
    return ""


def summary(section: PartConfig) -> tuple[Any, ...]:
    """What distinguishes two layouts: the name of a parallelism does not, nor who does no ZeRO."""
    engine = section.zero_engine if section.zero_stage else ""
    split = tuple(getattr(section, axis) for axis in DEGREES)
    return (*split, section.expert, section.zero_stage, engine, section.sequence_sharded_norms)


def counted_of(config: Config, source: str) -> Counted:
    family = family_of(source)
    return Counted(family, source, training_rules(config.training, family), {}, "sft")


@pytest.mark.parametrize("devices", [4, slow(6)])
@pytest.mark.parametrize("name", ["vision", "text"])
def test_a_run_starts_in_each_layout_and_says_why_not_in_others(tiny_assets: Path, name: str, devices: int) -> None:
    config = composed(tiny_assets)
    source = str(tiny_assets / "model")
    layouts, refused = found(name, source, devices, parts(config)[name], plans=PlanChecks(family_of(source), source))
    whole = WholeRun(config, counted_of(config, source))
    assert len(layouts) > 30
    refusals = [whole.refusal({name: one}) for one in layouts]
    assert set(refusals) <= {None, *(said for said in refusals if said and said.startswith("vision.pipeline="))}
    for one, refusal in zip(layouts, refusals, strict=True):
        assert run_says(whole.composed({name: one})) == (refusal or ""), one.settings
        assert one.section.num_actors == devices == one.degrees.world * (one.section.pipeline or 0)
    assert len(set(layouts)) == len(layouts)
    uneven = [one for one in refused if "does not divide the heads" in one.reason]
    for one in uneven:  # which a search leaves out, and a run does not
        assert "heads" not in run_says(replace(config, **{name: replace(parts(config)[name], **one.settings)}))
    checked = [one for one in refused if "zero_stage from 1 on" not in one.reason and one not in uneven]
    assert checked or uneven
    for no in checked:
        assert no.reason in run_says(replace(config, **{name: replace(parts(config)[name], **no.settings)}))


def brute_force(name: str, family: Family, devices: int, experts: Collection[int] = (1,)) -> Iterator[PartConfig]:
    """All sections that the run's rules and the model's heads allow, but DeepSpeed's layers and ZeRO over one rank."""
    degrees = [number for number in range(1, devices + 1) if devices % number == 0]
    for split in product(degrees, repeat=len(DEGREES)):
        if prod(split) != devices:
            continue
        own = dict(zip(DEGREES, split, strict=True))
        shared = own["data"] * own["ulysses"] * own["ring"] > 1
        stages, engines = range(4 if shared else 1), ("auto", "deepspeed", "fsdp")
        kinds = [kind for kind in PARALLELISMS[name] if kind != "autotp"]
        for kind, stage, engine, norms, expert in product(kinds, stages, engines, (False, True), experts):
            more = {"zero_stage": stage, "zero_engine": engine, "sequence_sharded_norms": norms, "expert": expert}
            asked = PartConfig("", kind, devices, **own, **more)  # type: ignore[arg-type]
            try:
                section = resolve_part(name, asked)
                family.parts[name].check(section)
            except DhpError:
                continue
            if family.parts[name].uneven_axes(section):
                continue
            if split[0] <= len(family.parts[name].layers.kinds):
                yield section


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("name", ["vision", "text"])
def test_nothing_that_is_allowed_is_missing(made_model: str, name: str, devices: int) -> None:
    layouts, _ = found(name, made_model, devices)
    wanted = {summary(one) for one in brute_force(name, family_of(made_model), devices)}
    assert {summary(one.section) for one in layouts} == wanted
    assert len(layouts) == len(wanted)


def test_experts_are_shared_out_among_replicas(experts_model: str) -> None:
    layouts, refused = found("text", experts_model, 4, plans=PlanChecks(family_of(experts_model), experts_model))
    wanted = {summary(one) for one in brute_force("text", family_of(experts_model), 4, (1, 2, 4))}
    assert {summary(one.section) for one in layouts} == wanted
    assert {one.degrees.expert for one in layouts} == {1, 2, 4}
    assert any("zero_stage=1 with text.zero_engine=auto and text.expert=2" in one.reason for one in refused)
    assert {(one.section.zero_stage, one.section.zero_engine) for one in layouts if one.degrees.expert == 2} == {
        (0, "fsdp"), (2, "fsdp"), (3, "fsdp")
    }  # fmt: skip


def test_an_audio_part_has_the_degrees_that_are_offered(tmp_path: Path) -> None:
    save_omni(tmp_path)
    family = load_family(str(tmp_path)).having(("vision", "audio", "text"))
    layouts, _ = part_layouts("audio", PartConfig(), family, 4)
    wanted = {summary(one) for one in brute_force("audio", family, 4)}
    assert {summary(one.section) for one in layouts} == wanted
    assert {(one.degrees.ring, one.degrees.tensor) for one in layouts} == {(1, 1)}


def test_tensor_groups_stay_in_a_node(made_model: str) -> None:
    layouts, refused = found("text", made_model, 8, node=4)
    assert max(one.degrees.tensor for one in layouts) == 4
    assert [one.reason for one in refused if one.settings == {"tensor": 8}][0].startswith(
        "text.tensor=8 is more than the 4 devices of a node"
    )
    held, _ = found("text", made_model, 8, PartConfig(tensor=8), held={"tensor"}, node=4)
    assert {one.degrees.tensor for one in held} == {8}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"tensor": 2, "zero_stage": 2}, {"tensor": 2, "zero_stage": 2}),
        ({"pipeline": 1, "ring": 1}, {"pipeline": 1, "ring": 1}),
        ({"zero_stage": 3, "zero_engine": "fsdp"}, {"zero_stage": 3, "zero_engine": "fsdp"}),
        ({"zero_stage": 0}, {"zero_stage": 0}),
        ({"sequence_sharded_norms": True}, {"sequence_sharded_norms": True}),
        ({"parallelism": "autotp"}, {"parallelism": "autotp", "pipeline": 1, "ulysses": 1, "ring": 1}),
        ({"parallelism": "deepspeed"}, {"parallelism": "deepspeed", "zero_engine": "deepspeed"}),
    ],
    ids=str,
)
def test_what_is_held_stays(made_model: str, values: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    layouts, _ = found("text", made_model, 4, PartConfig(**values), held=set(values))
    assert layouts
    for one in layouts:
        assert {key: getattr(one.section, key) for key in kept} == dict(kept)


def test_heads_are_shared_unevenly_where_the_degree_is_held(made_model: str) -> None:
    layouts, refused = found("text", made_model, 3)
    assert {one.degrees.tensor for one in layouts} == {one.degrees.ulysses for one in layouts} == {1}
    assert any("text.tensor=3 does not divide the heads: some actors would wait" in one.reason for one in refused)
    held, _ = found("text", made_model, 3, PartConfig(tensor=3), held={"tensor"})
    assert {one.degrees.tensor for one in held} == {3}
    also, _ = found("text", made_model, 6, PartConfig(tensor=3), held={"tensor"})
    assert {(one.degrees.tensor, one.degrees.ulysses) for one in also} == {(3, 1)}  # 3 heads of a rank at most: not 2


def test_what_is_not_held_is_searched_whatever_it_was(made_model: str) -> None:
    asked = PartConfig(tensor=2, zero_stage=3, zero_engine="fsdp", sequence_sharded_norms=True, parallelism="autotp")
    layouts, _ = found("text", made_model, 4, asked)
    assert {summary(one.section) for one in layouts} == {
        summary(one.section) for one in found("text", made_model, 4)[0]
    }


def test_held_degrees_that_do_not_divide_the_devices_are_refused_as_by_the_run(made_model: str) -> None:
    layouts, refused = found("text", made_model, 4, PartConfig(tensor=3), held={"tensor"})
    assert not layouts
    assert ["text.num_actors=4 leaves no whole number for text.data" in one.reason for one in refused] == [True]
    every = dict.fromkeys(DEGREES, 1)
    layouts, refused = found("text", made_model, 4, PartConfig(**every), held=every)
    assert not layouts
    assert ["= 1 != num_actors(4)" in one.reason for one in refused] == [True]


def test_what_is_not_trained_has_no_zero(made_model: str) -> None:
    layouts, refused = found("vision", made_model, 4, trains=False)
    cut = {(one.section.zero_stage, one.section.zero_engine) for one in layouts if one.section.zero_stage}
    assert cut <= {(3, "fsdp")} and any(not one.section.zero_stage for one in layouts)
    assert any("vision.zero_stage=1 with nothing of vision trained" in one.reason for one in refused)


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.schedule=1f1b",),
        ("training.batch_size=6",),
        ("training.frozen=[vision,projector]",),
        ("training.schedule=interleaved", "text.virtual_stages=2", "training.batch_size=6"),
        ("cluster.chain=true",),
    ],
    ids=str,
)
def test_a_pair_is_refused_as_by_the_run(tiny_assets: Path, overrides: tuple[str, ...]) -> None:
    config, source = composed(tiny_assets, *overrides), str(tiny_assets / "model")
    whole = WholeRun(config, counted_of(config, source))
    vision, text = (found(name, source, 4, parts(config)[name])[0] for name in ("vision", "text"))
    some = Random(0).sample(list(product(vision, text)), 24)
    refusals = [whole.refusal({"vision": one, "text": other}) for one, other in some]
    assert any(refusals)
    assert None in refusals
    for (one, other), refusal in zip(some, refusals, strict=True):
        said = run_says(whole.composed({"vision": one, "text": other}))
        if "stages 1 and 2 cut" in (refusal or ""):  # a run takes 0, which is among the layouts by itself
            assert "stages 1 and 2 cut" not in said
            continue
        assert (refusal or "") in said
        assert bool(refusal) == bool(said), said


def test_a_pair_is_checked_in_milliseconds(made_model: str) -> None:
    config = compose_config("tiny", overrides=["training.dry_run=true", "training.batch_size=64"])
    whole = WholeRun(config, counted_of(config, made_model))
    vision, text = (found(name, made_model, 8)[0] for name in ("vision", "text"))
    start = perf_counter()
    for one, other in zip(vision[:100], text[:100]):
        whole.refusal({"vision": one, "text": other})
    assert perf_counter() - start < 100 * 5e-3


@pytest.mark.parametrize("name", ["vision", "text"])
def test_a_large_cluster_takes_no_time(name: str) -> None:
    source = config_source(SEVEN_B)
    family_of(source)
    for devices, most in ((64, 0.25), (1024, 1.0)):
        start = perf_counter()
        layouts, _ = found(name, source, devices)
        assert perf_counter() - start < 4 * most  # the machine may do other things
        assert 100 < len(layouts) < 20_000


def test_degrees_need_be_no_powers_of_two() -> None:
    layouts, _ = found("text", config_source(SEVEN_B), 28)
    assert {(7, 1), (7, 4), (14, 2), (28, 1)} <= {(one.degrees.ulysses, one.degrees.tensor) for one in layouts}
    assert {1, 2, 4, 7, 14, 28} == {one.section.pipeline for one in layouts}


def test_keys_that_are_held_are_those_a_user_set() -> None:
    plain = compose_config("tiny")
    assert held_keys(plain) == {"vision": {"zero_stage"}, "text": set()}
    asked = ["text.tensor=1", "text.parallelism=data", "text.num_actors=4", "text.zero_stage=0", "vision.zero_stage=1"]
    config = compose_config("tiny", overrides=asked)
    assert held_keys(config) == {"vision": {"zero_stage"}, "text": {"tensor"}}
    assert held_keys(config, asked) == {"vision": {"zero_stage"}, "text": {"tensor", "zero_stage"}}
    assert held_keys(plain, ["~vision.zero_stage", "++text.ring=null", "text=tensor", "training.max_steps=3"]) == {
        "vision": set(),
        "text": set(),
    }


def test_keys_of_a_shipped_file_are_held_too() -> None:
    assert held_keys(compose_config("qwen2_5_vl_7b")) == {
        "vision": {"zero_stage"},
        "text": {"zero_stage", "zero_engine"},
    }


def step(**kinds: float) -> Forecast:
    """A forecast of these seconds."""
    return cast(Forecast, SimpleNamespace(step_s=sum(kinds.values()), kinds=lambda: kinds))


def test_the_kinds_that_make_most_of_the_gap_are_named() -> None:
    best = step(products=1.0, sent=0.1, recompute=0.0)
    assert loses_by(step(products=1.0, sent=0.6, recompute=0.1), best) == "600 ms: exchanges in layers"
    assert loses_by(step(products=0.9, sent=0.48, recompute=0.4), best) == "680 ms: recomputing, exchanges in layers"
    assert loses_by(step(products=1.005, sent=0.1, recompute=0.0), best) == "as fast, less simple"


def test_each_message_is_shown_once_and_equations_first() -> None:
    reasons = ["zero_stage from 1 on", "plain", "heads(28) % tensor(8) = 4", "plain"]
    refused: Any = tuple(Refused({}, reason) for reason in reasons)
    found = refusals(Found((), None, refused, 0, 0), 3)
    assert [one.reason for one in found] == ["heads(28) % tensor(8) = 4", "plain", "zero_stage from 1 on"]


def test_what_the_file_sets_is_kept_and_may_be_freed() -> None:
    config = compose_config("qwen2_5_vl_72b_32gpus")
    held = find_held(config)
    assert {"vision.data", "text.zero_stage", "vision.recompute", ROWS} <= set(held.keys)
    assert "text.zero_stage" not in find_held(config, free=["text.zero_stage"]).keys
    assert find_held(config, free=[ALL]).keys == (ROWS,)  # rows of data.limits.text tokens
    assert find_held(config, free=[ALL, ROWS]).keys == ()
    assert held.layouts(config)["text"] == held.of("text") - {"recompute"}


def test_passes_of_the_tower_are_searched_unless_they_are_held(made_model: str) -> None:
    space = replace(space_of(made_model, 2, 2.0**30), rows_held=True)
    assert [(rows.micro_batches, rows.batch) for rows in space.divisions()] == [(4, 1), (4, 4), (2, 1), (2, 2)]
    whole = replace(space.config, training=replace(space.config.training, vision_batch=None))
    held = replace(space, config=whole, passes_held=True)
    assert [(rows.micro_batches, rows.batch) for rows in held.divisions()] == [(4, 4), (2, 2)]
    many = replace(space.config, training=replace(space.config.training, batch_size=32))
    assert [rows.batch for rows in replace(space, config=many).divisions()] == [1, 4, 8, 1, 4]


def test_passes_of_the_tower_are_not_searched_where_the_transport_refuses_them() -> None:
    config = compose_config("tiny")
    assert PASSES not in find_held(config).keys
    assert PASSES in find_held(replace(config, cluster=replace(config.cluster, transport="nccl"))).keys


def test_the_command_line_is_kept() -> None:
    overrides = ["text.zero_stage=0", "training.micro_batch_size=4", "training.schedule=1f1b"]
    keys = find_held(compose_config("tiny", overrides=overrides), overrides).keys
    assert keys == ("vision.zero_stage", "text.zero_stage", ROWS, SCHEDULE)


def test_a_degree_that_follows_from_the_actors_is_fixed_with_its_value() -> None:
    config = compose_config("tiny")
    given = freed(config, find_held(config, fix=["text.tensor"]))
    assert (given.text.tensor, given.text.parallelism, given.text.num_actors) == (2, "none", 1)
    assert (given.vision.ulysses, given.vision.zero_stage, given.vision.recompute) == (None, 1, "auto")


def test_the_data_do_not_depend_on_layouts() -> None:
    alone = one_actor_each(compose_config("tiny", overrides=["cluster.chain=true", "vision.recompute=full"]))
    assert (alone.vision.num_actors, alone.vision.zero_stage, alone.cluster.chain) == (1, 0, False)


def test_settings_bring_along_what_would_contradict_them() -> None:
    config = compose_config("tiny", overrides=["text.activation_checkpointing=true", "text.cuts=[1]"])
    found = with_settings(config, find_held(config, free=[ALL]), {"text.pipeline": 1, "text.recompute": "none"})
    assert found["text.activation_checkpointing"] is False and found["text.cuts"] is None


@pytest.mark.parametrize("what", ["fix", "free"])
def test_an_unknown_key_is_refused(what: str) -> None:
    names = {what: ["text.tensors"]}
    with pytest.raises(ConfigError, match=f"{what}=text.tensors is no key .* did you mean text.tensor"):
        find_held(compose_config("tiny"), **names)


def at_least(least: int) -> Callable[[int], bool]:
    return lambda value: value >= least


@pytest.mark.parametrize("least", [1, 2, 3, 8])
def test_the_first_that_fits_is_found(least: int) -> None:
    values = [1, 2, 4, 8]
    assert _first(values, at_least(least)) == next(value for value in values if value >= least)


@pytest.mark.parametrize("most", [1, 5, 63, 1000])
def test_the_last_that_fits_is_found_to_a_64th(most: int) -> None:
    def fits(value: int) -> bool:
        return value <= most

    assert most * (1 - 1 / 32) - 1 <= _last(1, 1 << 20, fits) <= most


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
    loads = even_loads(2, tokens=100, features=0, targets=10, replicas=2, patches_of_token=4)
    found = useful_operations(plan, loads, window=64.0)
    assert found["text"] == pytest.approx(plan.family.decoder.work.flops([100] * 4, 40))
    assert found["vision"] == 0


LINK = Channel(1e9, 1e-5)
RATES = Rates(1e12, 5e11, 1e10, 1e-5, LINK, Channel(1e8, 1e-4), 2)
FREE = {"recompute": "auto", "zero_stage": 0, "zero_engine": "auto", "num_actors": 1, "parallelism": "none"}
UNSET = dict.fromkeys(("pipeline", "data", "ulysses", "ring", "tensor"))


def space_of(model: str, devices: int, memory: float, **more: object) -> Space:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    config = compose_config("tiny", overrides=[*names, "training.batch_size=16"])
    config = replace(config, **{name: replace(part, **FREE, **UNSET) for name, part in parts(config).items()})
    family = load_family(model).having(parts(config))
    counted = Counted(family, model, training_rules(config.training, family), {}, "sft")
    machine = Machine("made", devices, 2, {"float32": RATES}, memory, LINK, contexts=False)
    samples = Samples(family, None, EqualSamples(256, 64, 32))
    return Space(config, WholeRun(config, counted), counted, machine, samples, {}, **more)


@cache
def found_for(model: str, devices: int, memory: float) -> Found:
    return search(space_of(model, devices, memory))


@pytest.mark.slow
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


@pytest.mark.parametrize(("every", "whole_step"), [slow(5, False), (200, False), (200, True)])
def test_quick_figures_are_those_of_the_whole_forecast(made_model: str, every: int, whole_step: bool) -> None:
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
        rows = Rows(1, data, 16 // data, 16 // data if whole_step else 1)
        own, other = (space.scorer.scores([one], rows, ("none",)).score(0) for one in (text, vision))
        pair = Pair(own, other)
        whole = evaluate(space, pair, settings_of(space, pair)).found
        assert set(whole.recompute["text"]) == {"none"}
        assert whole.passes == {"vision": 1 if whole_step else rows.micro_batches, "text": rows.micro_batches}
        assert pair.step_s == pytest.approx(whole.step_s - whole.fixed_s, rel=1e-6)
        assert pair.peak_bytes >= whole.peak.total * 0.999


@pytest.mark.slow
def test_little_memory_finds_layouts_that_divide_more(made_model: str) -> None:
    roomy, tight = found_for(made_model, 4, 2.0**30), found_for(made_model, 4, 14 * 2.0**20)
    assert tight.candidates and tight.fit < roomy.fit
    assert all(one.found.peak.total <= 14 * 2.0**20 * 0.95 for one in tight.candidates)
    assert tight.candidates[0].found.step_s >= roomy.candidates[0].found.step_s


@pytest.mark.slow
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


@pytest.mark.parametrize(("apart", "batch"), [(False, 1), (True, 1), (True, 4)])
def test_pairs_as_arrays_are_pairs_one_by_one(made_model: str, apart: bool, batch: int) -> None:
    space = space_of(made_model, 4, 2.0**30)
    random = np.random.default_rng(0)
    layouts: dict[str, list[PartLayout]] = {
        name: part_layouts(name, section, space.whole.family, 4, (), 2)[0]
        for name, section in parts(space.config).items()
    }
    rows = Rows(1, 2, 8, batch)

    def scores(name: str) -> Scores:
        own = replace(rows, batch=1) if name == "text" else rows  # as the search has them
        return Scores(layouts[name][:12], ("none",), own, *random.random((5, len(layouts[name][:12]))))

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
