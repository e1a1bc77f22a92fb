"""What layers keep in a run, and what recomputes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.axes import Degrees
from dhp.core.batch import FeatureSettings, KeepSettings
from dhp.core.errors import ConfigError, Fault, MoreDevices, PartFailed
from dhp.core.reports import StageReport, StageUsage
from dhp.models.pretrained import config_source
from dhp.plan.batches import feed_settings
from dhp.plan.count.costs import StageCosts, arrange
from dhp.plan.recompute.planner import PATIENCE
from dhp.plan.recompute.profile import run_shape
from dhp.plan.run_plan import plan_run
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.trainer import trainer as module
from dhp.trainer.dry_run import require_room
from dhp.trainer.preflight import GIB, check_features, check_folder, feature_settings, keep_settings, prepare
from dhp.trainer.recomputing import Recomputing, eased, recompute_more, room
from dhp.trainer.settings import needed_paths, stage_settings
from dhp.trainer.trainer import Trainer
from tests.helpers.bounded_memory import LIMIT, PEAK
from tests.helpers.graphs import make_graph
from tests.helpers.runs import tiny, train
from tests.plan.made import MIB, ROWS, costs, usage

BUDGET_GIB = 0.008  # between what all of it takes and what inputs of layers alone take
SETTINGS = [
    "training.warmup_ratio=0",
    "training.log_interval=1",
    "data.min_pixels=12544",  # all pictures alike
    "data.max_pixels=12544",
    "vision.recompute=auto",
    "text.recompute=auto",
    f"memory.budget_gib={BUDGET_GIB}",
]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_counted_before_the_first_step(tiny_assets: Path, tmp_path: Path) -> None:
    own = [*SETTINGS, "training.max_steps=4", "memory.accounting=true"]
    counted = train(*tiny(tiny_assets, tmp_path / "counted", *own))
    assert counted.status == 0, counted.stderr
    said = counted.stdout + counted.stderr
    assert "counted by the model's shape" in said and "expected on the fullest device" in said
    assert "text.recompute=" in said and "at first" not in said
    plain = train(*tiny(tiny_assets, tmp_path / "plain", *own, "vision.recompute=all", "text.recompute=all"))
    assert plain.status == 0, plain.stderr
    # One recomputes everything and the other what the plan says: the same to the bit, but other bytes.
    for theirs, ours in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "counted"), strict=True):
        assert (ours["step"], ours["loss"], ours["grad_norm"]) == (theirs["step"], theirs["loss"], theirs["grad_norm"])
        more = {part: size - theirs["activation_bytes"][part] for part, size in ours["activation_bytes"].items()}
        assert min(more.values()) > 0
        assert max(ours["activation_bytes"].values()) <= BUDGET_GIB * 2**30


def test_what_is_alive_together() -> None:
    pair = make_graph()
    one, two = make_schedule("sequential", pair, 4), make_schedule("vision_ahead", pair, 4)
    assert arrange(pair, one, "cpu").holding["text"] == {"vision": 1, "text": 1}
    assert arrange(pair, two, "cpu").holding["text"] == {"vision": 2, "text": 1}
    assert not arrange(pair, one, "cpu").together and arrange(pair, two, "cpu").together
    assert arrange(pair, one, "cuda").together  # freed memory stays with the process that had it
    assert arrange(pair, one, "cpu").sharing == (frozenset({"vision", "text"}),)


def test_stages_of_a_pipeline_share_devices_with_vision_and_not_with_one_another() -> None:
    graph = make_graph(Degrees(data=2), stages=2, chunks=2)
    found = arrange(graph, make_schedule("interleaved", graph, 4), "cpu")
    assert found.sharing == (frozenset({"vision", "text.0"}), frozenset({"vision", "text.1"}))
    assert found.holding["text.0"]["text.0"] == 2.5  # five chunks of two layers each at most


class Told:
    """A stage whose ranks report what the plan they were told would take."""

    size = 1

    def __init__(self, kinds: tuple[str, ...], beside: int | None = None):
        """beside: bytes of the device that are no activations."""
        self.beside = beside
        self.known, self.choices = costs(len(kinds), kinds=kinds), ("all",) * len(kinds)

    def execute_all_async(self, method: Any, choices: Any, returns: int = 1) -> list:
        assert (method.__name__, returns) == ("set_recompute", 0)
        self.choices = choices
        return [[]]

    def report(self, rows: int = ROWS) -> list[StageReport]:
        took = usage(self.known, self.choices, rows)
        memory = None if self.beside is None else self.beside + took.peak_bytes
        return [StageReport(0, 1.0, 1.0, {"text": 1e-3}, memory, {}, took)]


def plan(
    assets: Path,
    folder: Path,
    budget_mib: float | None,
    late: int = 0,
    memory: int | None = None,
    beside: int | None = None,
    short: bool = False,
    loads: Sequence[Mapping[str, int]] = ({},) * 20,
    counted: Mapping[str, StageCosts] | None = None,
) -> tuple[str, dict[str, Told]]:
    """What a run of 20 steps says, and its parts at the end. late: steps before them in which vision has no work.
    loads: of each step, patches or tokens of each part's micro-batches, where they are not like all others.
    memory: bytes of the device. beside: those of each part that are no activations.
    short: in the last step, a rank of text has no room."""
    budget = f"memory.budget_gib={'null' if budget_mib is None else budget_mib * MIB / 2**30}"
    overrides = [*tiny(assets, folder / "run")[1:], *SETTINGS, budget, f"memory.cache_dir={folder}"]
    config = prepare(compose_config("tiny", overrides=overrides))
    made = plan_run(config)
    family, graph = made.family, made.graph
    parts = {"vision": Told(family.tower.layers.kinds, beside), "text": Told(family.decoder.layers.kinds, beside)}
    said: list[str] = []
    stages = make_stages(graph, parts)
    recomputing = Recomputing(made, stages, "cpu", make_schedule("sequential", graph, 4), said.append, memory, counted)
    for step, given in enumerate([*[{}] * late, *loads]):
        reports = {name: part.report(given.get(name, ROWS)) for name, part in parts.items()}
        if step < late:
            reports["vision"] = [replace(report, usage=None) for report in reports["vision"]]
        recomputing.learn(reports)
    if short:
        fine, (report,) = parts["vision"].report(), parts["text"].report()
        recomputing.learn({"vision": fine, "text": [report, replace(report, usage=None, short=True)]})
    return "\n".join(said), parts


def test_a_counted_plan_is_tried_at_once_and_corrected(tiny_assets: Path, tmp_path: Path) -> None:
    """Costs that are too small by a third: the first step says so, and more is recomputed; they are not kept."""
    kinds = {"vision": ("window", "full", "window", "full"), "text": ("causal",) * 4}
    right = {name: costs(len(own), kinds=own) for name, own in kinds.items()}
    said, parts = plan(tiny_assets, tmp_path, 100, counted=right)
    assert "counted by the model's shape" in said and "more than the budget" not in said
    small = {name: with_held(one, 1 / 1.5) for name, one in right.items()}
    again, _ = plan(tiny_assets, tmp_path / "small", 60, counted=small)
    assert "more than the budget, so more is recomputed" in again
    assert not (tmp_path / "small" / "recompute.json").exists()


def with_held(known: StageCosts, factor: float) -> StageCosts:
    """With so many times as much held by each layer."""
    layers = {
        kind: {choice: replace(cost, held_bytes=cost.held_bytes * factor) for choice, cost in of_kind.items()}
        for kind, of_kind in known.layers.items()
    }
    return replace(known, layers=layers)


def test_a_plan_is_said_and_told_and_found_again(tiny_assets: Path, tmp_path: Path) -> None:
    said, parts = plan(tiny_assets, tmp_path, 100)
    assert "expected on the fullest device" in said and "does not fit" not in said
    assert all(set(part.choices) != {"all"} for part in parts.values())
    again, same = plan(tiny_assets, tmp_path, 100)
    assert "measured before" in again
    assert {name: part.choices for name, part in same.items()} == {name: part.choices for name, part in parts.items()}
    assert again.partition("\n")[2] == said.partition("\n")[2]


def reserved(usages: dict[str, StageUsage | None], **most: int) -> dict[str, list[StageReport]]:
    report = StageReport(0, 1.0, 1.0, {}, None, {})
    of = {stage: replace(report, usage=usage, memory_bytes=most[stage]) for stage, usage in usages.items()}
    return {stage: [replace(one, memory_bytes=7, usage=None), one] for stage, one in of.items()}


def test_runs_that_differ_in_passes_of_the_tower_share_no_measurements() -> None:
    rows = ["training.batch_size=8", "training.micro_batch_size=2"]
    each, two, whole = (
        run_shape(
            resolve(compose_config("tiny", overrides=[*rows, f"training.vision_batch={batch}"])), "cpu", {}, {}, {}
        )
        for batch in (1, 2, "null")
    )
    assert "vision_batch" not in each  # as what was measured before there were passes
    assert each != two and two["vision_batch"] == 2 and whole["vision_batch"] == 4


def test_what_is_left_of_the_fullest_device() -> None:
    known = {stage: usage(costs(2), ("all",) * 2) for stage in ("vision", "text.0", "text.1")}
    peak = known["vision"].peak_bytes
    sharing = (frozenset({"vision", "text.0"}), frozenset({"vision", "text.1"}))
    told = reserved(known, **{"vision": peak + 100, "text.0": peak + 300, "text.1": peak + 50})
    assert room(10_000, sharing, told) == 9_000 - 400
    idle = reserved(known | {"vision": None}, **{"vision": 90, "text.0": peak + 300, "text.1": peak + 50})
    assert room(10_000, sharing, idle) == 9_000 - 390  # a stage without work has no activations
    assert room(400, sharing, told) == 0


def test_without_a_budget_it_is_read_from_the_steps_that_recompute_everything(
    tiny_assets: Path, tmp_path: Path
) -> None:
    beside, size = 3 * MIB, int((100 + 6) * MIB / 0.9)
    said, parts = plan(tiny_assets, tmp_path, None, memory=size, beside=beside)
    given, same = plan(tiny_assets, tmp_path / "given", 100)
    assert {name: part.choices for name, part in same.items()} == {name: part.choices for name, part in parts.items()}
    assert "of 100.0 MiB expected" in said and "of 100.0 MiB expected" in given
    with pytest.raises(ConfigError, match="recompute=auto without memory.budget_gib"):
        plan(tiny_assets, tmp_path, None)


def test_a_step_that_ran_out_of_memory_is_said_and_all_ranks_recompute_more(tiny_assets: Path, tmp_path: Path) -> None:
    """The rank that did recomputes everything by itself, and gets a plan again with the others."""
    said, parts = plan(tiny_assets, tmp_path, 100)
    again, same = plan(tiny_assets, tmp_path, 100, short=True)
    assert "text ran out of memory, so more is recomputed from now on" in again and "ran out" not in said
    held = [sum(part.known.held_bytes(part.choices) for part in of.values()) for of in (parts, same)]
    assert held[1] < held[0]


def test_a_budget_that_nothing_fits_is_said(tiny_assets: Path, tmp_path: Path) -> None:
    said, parts = plan(tiny_assets, tmp_path, 5)
    assert "it does not fit even so" in said
    assert all(set(part.choices) == {"offload"} for part in parts.values())  # the least there is


def test_a_part_whose_first_work_comes_late_is_told_as_that(tiny_assets: Path, tmp_path: Path) -> None:
    said, parts = plan(tiny_assets, tmp_path, 100, late=PATIENCE + 10)
    assert said.count("a stage has its first work") == 1 and "more than the budget" not in said
    assert all(set(part.choices) != {"all"} for part in parts.values())


def trainer_of(there: int = 0) -> Any:
    """A trainer without a run, of a cluster with so many devices."""
    made: Any = Trainer.__new__(Trainer)
    made._may_grow, made.asked = True, 0

    def devices_available() -> int:
        made.asked += 1
        return there

    made.session = SimpleNamespace(devices_available=devices_available)
    return made


def test_it_grows_once_there_are_the_devices_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "larger_layouts", lambda: (8, 4))
    enough, few = trainer_of(4), trainer_of(3)
    with pytest.raises(MoreDevices) as caught:
        enough._grow()
    assert caught.value.there == 4
    few._grow()
    few._grow()  # no checkpoint since
    assert few.asked == 1


def test_a_run_in_its_own_layout_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "larger_layouts", lambda: ())
    own = trainer_of(100)
    own._grow()
    assert own.asked == 0


def test_a_fault_in_an_evaluation_names_the_step_that_it_follows() -> None:
    made = trainer_of()

    def fail(step: int) -> None:
        raise PartFailed(f"text rank 1 died, after {step}")

    made._saver = SimpleNamespace(finish=lambda: None, newest=None)
    made._evaluation = SimpleNamespace(run=fail)
    with pytest.raises(PartFailed) as caught:
        made._evaluate(4)
    assert caught.value.fault.step == 4 and str(caught.value).startswith("step 4: ")


def test_what_stages_keep_is_held_against_the_gpu() -> None:
    """Of the 3B 18.5 GB of text, 6.0 of vision and two contexts with their communicators: see a dry run."""
    config = resolve(compose_config("qwen2_5_vl_3b", overrides=["cluster.device=cuda"]))
    plan = plan_run(config, config_source(config.text.model_name))
    require_room(plan, None)  # nobody knows
    require_room(plan, 28 * 10**9)
    with pytest.raises(ConfigError) as caught:
        require_room(plan, 24 << 30)
    said = str(caught.value)
    assert "keep 25.6 GiB between steps (vision 7.0 GiB, text 18.6 GiB: weights" in said and "it has 24.0 GiB" in said
    assert "text.zero_stage=3" in said and "cluster.collocate=false" in said


FROZEN = ("training.frozen=[vision,projector]", "vision.zero_stage=0")


def config_of(model: str, *overrides: str) -> Config:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    return resolve(compose_config("tiny", overrides=[*names, *overrides]))


def check(model: str, *overrides: str) -> None:
    config = config_of(model, *overrides)
    check_features(config, plan_run(config, model).graph)


@pytest.mark.parametrize(
    "trained",
    [[], ["training.frozen=[vision]"], ["training.trainable=[projector]"], [*FROZEN, "vision.lora.rank=2"]],
    ids=["all", "the projector", "the projector alone", "adapters"],
)
def test_what_is_trained_is_not_kept(trained: list[str], made_model: str) -> None:
    with pytest.raises(ConfigError, match=r"cache_features=/kept with something of vision trained.*training\.frozen="):
        check(made_model, "data.cache_features=/kept", *trained)
    check(made_model, *trained)


def test_a_frozen_tower_may_be_kept(made_model: str) -> None:
    check(made_model, "data.cache_features=/kept", *FROZEN)
    check(made_model, "data.cache_features=/kept", *FROZEN, "text.lora.rank=2")


def test_the_room_is_shared_out(made_model: str, tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "file").write_bytes(b"1" * (GIB >> 10))
    kept = f"data.cache_features={tmp_path}"
    graph = lambda config: plan_run(config, made_model).graph
    of = lambda *more: keep_settings(config := config_of(made_model, *FROZEN, *more), graph(config))
    assert of() == {}
    assert of(kept) == {"vision": KeepSettings(str(tmp_path))}
    two = (kept, "vision.num_actors=2")
    assert of(*two, "data.cache_features_gib=0.5") == {
        "vision": KeepSettings(str(tmp_path), (GIB // 2 - (GIB >> 10)) // 2)
    }
    assert of(*two, "data.cache_features_gib=0.0001") == {"vision": KeepSettings(str(tmp_path), 0)}


def test_readers_and_ranks_are_told(made_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("dhp.models.empty.digest_tower", lambda *given: asked.append(given) or "digest")
    config = config_of(
        made_model, *FROZEN, "data.cache_features='~/kept'", "vision.dtype=bfloat16", "text.dtype=float32"
    )
    folder = str(Path("~/kept").expanduser())
    told = feature_settings(config)
    assert told == FeatureSettings(folder, "digest") and feature_settings(config_of(made_model)) is None
    ((*wanted, parts),) = asked
    assert (wanted, list(parts)) == ([made_model, "bfloat16"], ["vision", "text"])
    assert feed_settings(config).features is None  # who looks at samples sees their pixels
    assert feed_settings(config, features=told).features == told
    needs = needed_paths(config, None)
    assert [part for part, paths in needs.items() if paths.get("data.cache_features") == folder] == ["vision", "data"]
    graph = plan_run(config, made_model).graph
    keep = KeepSettings(folder, 7)
    assert stage_settings(config, graph, graph.stage("vision"), "cpu", 1, features=keep).features == keep


def test_the_folder_is_tried_before_a_run(made_model: str, tmp_path: Path) -> None:
    check_folder(config_of(made_model, f"data.cache_features={tmp_path / 'new'}"))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data.cache_features=.*file cannot be written"):
        check_folder(config_of(made_model, f"data.cache_features={tmp_path / 'file'}"))
    check_folder(config_of(made_model))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_out_of_memory_among_collectives_makes_the_run_go_on_with_less_kept(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tensor ranks, where one may wait for the other inside a collective: the pass is not made again, but the
    run is, with the same losses."""
    layout = [
        *("training.max_steps=4", "training.log_interval=1", "training.save_steps=2", "memory.budget_gib=1"),
        *("text.parallelism=tensor", "text.num_actors=2", "vision.parallelism=sequence", "vision.num_actors=2"),
        *("plugins=[tests.helpers.bounded_memory]", "memory.accounting=true"),
    ]
    monkeypatch.setenv(PEAK, str(tmp_path))
    full = tiny(tiny_assets, tmp_path / "full", *layout, "vision.recompute=full", "text.recompute=full")
    plain = train(*full, private_ray=True)
    assert plain.status == 0, plain.stderr
    most = max(int(file.read_text()) for file in tmp_path.glob("[0-9]*"))
    monkeypatch.setenv(LIMIT, str(round(1.02 * most)))
    auto = tiny(tiny_assets, tmp_path / "auto", *layout, "vision.recompute=auto", "text.recompute=auto")
    bounded = train(*auto, private_ray=True)
    assert bounded.status == 0, bounded.stderr
    assert "ran out of memory as planned, so the run goes on with" in bounded.stdout + bounded.stderr
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("full", "auto")]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_the_part_that_ran_out_of_memory_recomputes_more(tiny_assets: Path, tmp_path: Path) -> None:
    planned = ["vision.recompute=auto", "text.recompute=auto", "memory.budget_gib=1"]
    config = prepare(compose_config("tiny", overrides=[*tiny(tiny_assets, tmp_path / "run")[1:], *planned]))
    short = Fault(who="text.0 rank 1", short=True)
    assert recompute_more(config, short) == ("text.recompute=full",)
    again = eased(config, ("text.recompute=full",), saved=False)
    assert (again.text.recompute, again.vision.recompute, again.training.resume) == ("full", "auto", "auto")
    assert recompute_more(again, short) == ("vision.recompute=full",)  # which shares its device
    assert recompute_more(eased(again, ("vision.recompute=full",), saved=True), short) == ()
    assert recompute_more(config, Fault(who="text rank 1")) == ()


def test_a_run_that_began_at_anothers_checkpoint_begins_there_again(tiny_assets: Path, tmp_path: Path) -> None:
    """Unless it has saved one: older ones of its directory are another run's."""
    (tmp_path / "other" / "checkpoints" / "step_2").mkdir(parents=True)
    overrides = [f"training.resume={tmp_path / 'other'}", "text.recompute=auto", "memory.budget_gib=1"]
    config = resolve(compose_config("tiny", overrides=[*tiny(tiny_assets, tmp_path / "run: 1")[1:], *overrides]))
    again = eased(config, ("text.recompute=full",), saved=False)
    assert (again.training.resume, again.overwrite) == (str(tmp_path / "other"), True)
    assert again.run_dir == config.run_dir == str(tmp_path / "run: 1")
    again = eased(config, ("text.recompute=full",), saved=True)
    assert (again.training.resume, again.overwrite) == ("auto", False)
