"""Saving, recipes of resumed runs, collected traces."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.checkpoint.folder import Unfinished, checkpoints, read_about
from dhp.checkpoint.resume import LAYOUT, RECIPE, Start
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.roles import BESIDE, HELD, keys_with
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError, ModelError, PartFailed
from dhp.core.reports import SavedShare, WrittenFile
from dhp.core.tracing import FORWARD, Span
from dhp.observe.metrics import StepMetrics
from dhp.observe.trace import FILE, TraceWriter
from dhp.step.stages import EngineProtocol
from dhp.trainer.saving import Saver
from dhp.trainer.session import DataPlan
from dhp.trainer.settings import check_rates, check_recipe, fixed_settings, free_layout, held_files, rates, recipe
from dhp.trainer.step_reports import Tracing

PLAN = DataPlan(6, frozenset(), {"seed": 0}, 1, 1)


class Ranks:
    """The actors of one stage: they write a file at once, and say that they did when they are `done`."""

    def __init__(self, part: str) -> None:
        self.spec, self.group = SimpleNamespace(part=part), self
        self.done, self.error, self.calls = True, None, list[Any]()

    def execute_all_async(self, method: Callable[..., Any], *arguments: Any, returns: int = 1) -> list[list[Any]]:
        self.calls.append((method.__name__, arguments[-1]))
        if method is EngineProtocol.save:
            self.folder = Path(arguments[0])
            self.folder.mkdir(parents=True)
            (self.folder / "rank_00000.json").write_text("{}")
            return [[]]
        done = self.done or arguments[0]
        return [[SavedShare(done, (WrittenFile("rank_00000.json", 2, 1),) if done else (), self.error)]]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("dhp.trainer.saving.time", found)
    monkeypatch.setattr("dhp.trainer.saving.wait_all", lambda watched, timeout_s: True)
    monkeypatch.setattr("dhp.trainer.saving.auxiliary_files", lambda name: [])
    monkeypatch.setattr("dhp.trainer.saving.describe_tensors", lambda folder: "")
    return found


def saver_of(folder: Path, *overrides: str) -> tuple[Saver, Ranks, list[str]]:
    ranks, lines = Ranks("text"), list[str]()
    config = resolve(compose_config("tiny", overrides=[f"training.checkpoint_dir={folder}", *overrides]))
    session = SimpleNamespace(
        config=config,
        stages={"text": ranks},
        graph=SimpleNamespace(parts=lambda: ["text"]),
        take_watched=list,
        values=list,
        data_state=lambda step: {"step": step},
    )
    return Saver(session, lines.append, Unfinished()), ranks, lines  # type: ignore[arg-type]


def test_a_models_folder_that_is_gone_costs_no_checkpoint(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    monkeypatch.setattr("dhp.trainer.saving.auxiliary_files", lambda name: [file])
    saver, _, _ = saver_of(tmp_path / "checkpoints")
    file.unlink()
    assert (saver.save(1, PLAN, 0) / "model" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("value"), ModelError("model")])
def test_no_reason_to_fail_ends_the_run(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    saver, _, lines = saver_of(tmp_path)
    first = saver.save(1, PLAN, 0)

    def fail(*_: object) -> Path:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("dhp.trainer.saving.finish_checkpoint", fail)
        with pytest.raises(CheckpointError, match=f"no checkpoint after step 2: {error}"):
            saver.save(2, PLAN, 0)
    assert saver.newest == first and first.is_dir() and "The run goes on" in lines[-1]
    assert saver.save(3, PLAN, 0).name == "step_3"


def test_one_is_written_behind_the_steps(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, lines = saver_of(tmp_path, "training.save_steps=2")
    assert [step for step in range(1, 7) if saver.is_due(step, PLAN)] == [2, 4, 6]
    assert saver.ask() is None
    ranks.done = False
    saving = saver.begin(2)
    assert saving is not None and saver.busy and ranks.calls == [("save", True)]
    saver.staged(saving, PLAN, skipped=3)
    saver.look(saver.ask())
    assert saver.busy and saver.newest is None
    ranks.done, clock.now = True, 1.5
    asked = saver.ask()
    saver.look(asked)
    assert not saver.busy and saver.has(2) and not saver.has(4)
    about = read_about(tmp_path / "step_2")
    assert (about["step"], about["skipped_samples"], about["data"], about["settings"]) == (2, 3, {"step": 2}, PLAN.kept)
    assert about["files"] == {"text/rank_00000.json": {"bytes": 2, "crc32": 1}}
    assert lines == ["step_2 is saved: 1.5 s, of which training waited 0.00 s"]
    saver.look(asked)  # what was asked with another step
    assert len(lines) == 1


def test_minutes_count_from_the_one_before(tmp_path: Path, clock: Clock) -> None:
    saver, _, _ = saver_of(tmp_path, "training.save_minutes=2", "training.save_final=false")
    clock.now = 119.0
    assert not saver.is_due(1, PLAN)
    clock.now = 120.0
    assert saver.is_due(1, PLAN)
    saving = saver.begin(1)
    assert saving is not None and not saver.is_due(2, PLAN)
    clock.now = 240.0
    assert saver.is_due(3, PLAN)


def test_a_disk_that_is_full_ends_nothing_before_the_end(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, lines = saver_of(tmp_path, "training.save_steps=2")
    ranks.error = "rank_00000.safetensors cannot be written (No space left on device)"
    saving = saver.begin(2)
    assert saving is not None
    saver.staged(saving, PLAN, 0)
    saver.look(saver.ask())
    assert not saver.busy and saver.newest is None and not list(tmp_path.iterdir())
    assert lines[-1].startswith("warning: there is no checkpoint after step 2: rank_00000.safetensors cannot be")
    with pytest.raises(CheckpointError, match="training is done, and there is no checkpoint after step 6: rank_00000"):
        saver.require(6)
    ranks.error = None
    saving = saver.begin(4)
    assert saving is not None
    saver.staged(saving, PLAN, 0)
    saver.finish()
    saver.require(4)
    assert [one.name for one in checkpoints(tmp_path)] == ["step_4"]


def test_a_directory_that_cannot_be_made_ends_nothing(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, lines = saver_of(tmp_path, "training.save_steps=2")
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "of_the_user").touch()
    assert saver.begin(2) is None and not saver.busy and not ranks.calls
    assert "step_2 is there, without a checkpoint.json" in lines[-1]
    assert (tmp_path / "step_2" / "of_the_user").exists()


def test_ranks_that_do_not_finish_are_named(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, _ = saver_of(tmp_path, "training.save_timeout_s=30")
    ranks.done = False
    saving = saver.begin(2)
    assert saving is not None
    saver.staged(saving, PLAN, 0)
    clock.now = 30.0
    saver.look(saver.ask())
    clock.now = 30.1
    with pytest.raises(PartFailed, match=r"text rank 0 did not finish writing .*step_2.partial in training.save"):
        saver.look(saver.ask())


def test_one_that_is_asked_for_is_there_when_it_returns(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, _ = saver_of(tmp_path)
    assert saver.save(3, PLAN, 0) == tmp_path / "step_3" and ranks.calls == [("save", False), ("saved", True)]
    ranks.error = "no room"
    with pytest.raises(CheckpointError, match="there is no checkpoint after step 4: no room"):
        saver.save(4, PLAN, 0)
    ranks.error = None
    with pytest.raises(CheckpointError, match="step_3 is complete already: this step was saved before, or another run"):
        saver.save(3, PLAN, 0)
    assert saver.save(4, PLAN, 0) == tmp_path / "step_4"
    with pytest.raises(CheckpointError, match="step_4 is complete already"):  # the newest one, too
        saver.save(4, PLAN, 0)


def test_what_training_waits_is_that_of_each_checkpoint(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying, and waiting for the end of the writing; the next one begins anew."""

    def wait(watched: object, timeout_s: float) -> bool:
        clock.now += 0.25
        return True

    saver, ranks, _ = saver_of(tmp_path, "training.save_steps=2")
    noted: list[tuple[str, int, float]] = []
    saver._note = lambda event, step, seconds, text: noted.append((event, step, seconds))
    monkeypatch.setattr("dhp.trainer.saving.wait_all", wait)
    ranks.done = False
    for step in (2, 4):
        saving = saver.begin(step)
        assert saving is not None
        saver.staged(saving, PLAN, 0)
        assert saver.finish() == 0.25 and saver.finish() == 0.0
    assert noted == [("save", 2, 0.5), ("save", 4, 0.5)]


def config_of(*overrides: str) -> Config:
    return resolve(compose_config("tiny", overrides=list(overrides)))


def start_of(config: Config, steps: int = 60) -> Start:
    kept = {RECIPE: recipe(config) | rates(config, steps), LAYOUT: free_layout(config)}
    settings = json.loads(json.dumps(fixed_settings(config) | kept))
    return Start(Path("step_4"), 4, 0, settings, parts=("vision", "text"))


def test_every_key_of_both_sections_is_held_free_or_said() -> None:
    said = set(recipe(config_of()))
    for section in ("training", "data"):
        own = getattr(Config(), section)
        keys = {field.name for field in fields(own)}
        held, beside = (set(keys_with(own, resume=role)) for role in (HELD, BESIDE))
        assert held and beside and {key for key in keys if f"{section}.{key}" in said} == keys - held - beside
    # In the sampler's order, which it compares.
    keys = ("balance_window", "long_tokens", "limits", "isf_passes", "fullest_first")
    by_sampler = {f"data.{key}" for key in keys}
    sections = ("training", "data")
    held = {f"{name}.{key}" for name in sections for key in keys_with(getattr(Config(), name), resume=HELD)}
    assert held - by_sampler <= set(fixed_settings(config_of()))


CHANGES = [
    ("training.learning_rate=0.5", "training.learning_rate was 0.0015", "the learning rate follows one curve"),
    ("training.betas=[0.8,0.9]", "training.betas was [0.9, 0.999]", "averages of gradients"),
    ("training.weight_decay=0.5", "training.weight_decay was 0.01", ""),
    ("training.max_grad_norm=9", "training.max_grad_norm was ", ""),
    ("training.lr_scheduler_type=linear", "training.lr_scheduler_type was ", "the learning rate follows one curve"),
    ("training.groups.projector={learning_rate: 0.1}", "training.groups was {}", ""),
    ("data.packing=false", "data.packing was True", "the samples that are left"),
    ("data.max_tokens=4000", "data.max_tokens was None", ""),
    ("data.system_prompt=Hi", "data.system_prompt was None", ""),
    ("data.max_pixels=4000", "data.max_pixels was ", ""),
    ("data.data_registry.shapes.columns={images: photos}", "data.data_registry.shapes.columns was {}", ""),
]


@pytest.mark.parametrize(("override", "said", "why"), CHANGES)
def test_a_change_is_refused_and_where_it_is_asked_for_said(override: str, said: str, why: str) -> None:
    plain, now = config_of(), config_of(override)
    start = start_of(plain)
    start.check(fixed_settings(now))
    with pytest.raises(CheckpointError) as caught:
        check_recipe(now, start)
    assert said in str(caught.value) and why in str(caught.value)
    key = override.partition("=")[0].replace(".projector", "").replace(".shapes.columns", "")
    check_recipe(config_of(override, f"training.resume_changes=[{key}]"), start)
    lines = start.changes(recipe(now), free_layout(now))
    assert len(lines) == 2 and lines[0].startswith(said)
    assert lines[1] == "else the recipe is that of step_4"
    assert start.changes(recipe(plain), free_layout(plain)) == ["the recipe is that of step_4"]


def test_a_run_may_be_longer_where_its_rates_do_not_know_its_end() -> None:
    constant, linear = config_of("training.warmup_steps=3"), config_of("training.lr_scheduler_type=linear")
    start = start_of(constant, 60)
    check_rates(constant, start, 90)
    start = start_of(linear, 60)
    check_rates(linear, start, 60)
    with pytest.raises(CheckpointError, match="training.total_steps was 60 and is 90; training.warmup_steps was"):
        check_rates(linear, start, 90)
    asked = config_of("training.lr_scheduler_type=linear", "training.resume_changes=[training.total_steps]")
    with pytest.raises(CheckpointError, match="configured: training.warmup_steps was"):
        check_rates(asked, start, 90)
    check_rates(config_of("training.lr_scheduler_type=linear", "training.resume_changes=[training]"), start, 90)


@pytest.mark.parametrize("change", ["min_lr=0.0001", "lr_num_cycles=3"])
def test_the_shape_of_a_curve_stays(change: str) -> None:
    waves = "training.lr_scheduler_type=cosine_with_restarts"
    with pytest.raises(CheckpointError, match="training.(min_lr was 0.0|lr_num_cycles was 1) .*follows one curve"):
        check_recipe(config_of(waves, f"training.{change}"), start_of(config_of(waves)))


def test_where_a_rate_is_constant_its_fall_may_begin_at_another_step() -> None:
    stable = ["training.lr_scheduler_type=warmup_stable_decay", "training.warmup_steps=3"]
    ten = config_of(*stable, "training.lr_decay_steps=10")
    assert rates(ten, 60) == {"training.total_steps": 60, "training.warmup_steps": 3, "training.lr_decay_steps": 10}
    start = start_of(ten, 60)  # behind step 4
    for now, steps in ((ten, 90), (ten, 14), (config_of(*stable, "training.lr_decay_steps=20"), 60)):
        check_rates(now, start, steps)
    with pytest.raises(CheckpointError, match="training.total_steps was 60 and is 13"):  # it would be falling
        check_rates(ten, start, 13)
    with pytest.raises(CheckpointError, match="training.total_steps was 13 and is 60"):  # it has fallen
        check_rates(ten, start_of(ten, 13), 60)
    with pytest.raises(CheckpointError, match="training.lr_decay_steps was 9 and is 10"):
        check_rates(ten, start_of(config_of(*stable, "training.lr_decay_steps=9"), 13), 13)
    with pytest.raises(CheckpointError, match="training.warmup_steps was 3 and is 5"):  # it would be rising
        check_rates(config_of(*stable[:1], "training.warmup_steps=5", "training.lr_decay_steps=10"), start, 60)


def test_the_optimizer_stays() -> None:
    whole = "vision.zero_stage=0"
    start = start_of(config_of(whole))
    with pytest.raises(CheckpointError, match="training.optimizer was adamw and is muon. Reason: .*has other states"):
        start.check(fixed_settings(config_of(whole, "training.optimizer=muon")))
    start.check(fixed_settings(config_of(whole)))
    unsaid = {key: value for key, value in start.settings.items() if key != "training.optimizer"}
    older = replace(start, settings=unsaid)  # which had AdamW alone
    older.check(fixed_settings(config_of(whole)))
    with pytest.raises(CheckpointError, match="training.optimizer was adamw and is adafactor"):
        older.check(fixed_settings(config_of(whole, "training.optimizer=adafactor")))


def test_layouts_may_change() -> None:
    now = config_of("text.tensor=1", "text.num_actors=1", "text.parallelism=none", "text.zero_stage=0")
    start = start_of(config_of())
    start.check(fixed_settings(now), ["vision", "text"])
    check_recipe(now, start)
    assert start.changes(recipe(now), free_layout(now))[-1] == (
        "another layout than the checkpoint's, whose tensors are cut anew: text.num_actors 2 → 1, text.tensor 2 → 1"
    )


def test_a_template_that_changed_under_its_name_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{{ messages }}")
    start = start_of(config_of(f"data.chat_template={file}"))
    file.write_text("{{ messages }}!")
    now = config_of(f"data.chat_template={file}")
    with pytest.raises(CheckpointError, match="data.chat_template was "):
        check_recipe(now, start)
    assert start.changes(recipe(now), free_layout(now))[0].startswith("data.chat_template was ")


def test_a_run_that_begins_says_nothing() -> None:
    assert Start().changes(recipe(config_of()), free_layout(config_of())) == []


@pytest.mark.parametrize("exchanged", ["model", "annotations"])
def test_a_model_or_annotations_exchanged_for_others_of_the_same_shape_are_refused(
    exchanged: str, tmp_path: Path
) -> None:
    model, annotations = tmp_path / "model", tmp_path / "a.jsonl"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights of one model")
    annotations.write_text('["a"]\n')
    own = [f"{part}.model_name={model}" for part in ("vision", "text")]
    config = config_of(*own, f"data.data_registry.shapes.annotation_path={annotations}")
    start = Start(Path("step_4"), 4, 0, held_files(config))
    start.check(held_files(config))
    other = {"model": (model / "model.safetensors", b"weights of a second"), "annotations": (annotations, b'["b"]\n')}
    file, content = other[exchanged]
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="contents of .*the model and the data that it began with") as caught:
        start.check(held_files(config))
    assert ("text.model_name" in str(caught.value)) is (exchanged == "model")
    assert ("shapes.annotation_path" in str(caught.value)) is (exchanged == "annotations")


def test_where_they_lie_may_change(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "shards" / "0.tar").write_bytes(b"0")
        own = [f"{part}.model_name={tmp_path / name}" for part in ("vision", "text")]
        found.append(
            held_files(config_of(*own, f"data.data_registry.shapes.annotation_path={tmp_path / name / 'shards'}"))
        )
    assert found[0] == found[1] and len(found[0]) == 2


class Group:
    """Ranks whose clocks are behind the driver's."""

    def __init__(self, *offsets: int):
        self.offsets = list(offsets)

    def take_spans_async(self, keep: bool = True) -> list[Any]:
        return [f"spans of {rank}" if keep else "nothing" for rank in range(len(self.offsets))]

    def clock_offsets(self, timeout_s: float) -> list[int]:
        assert timeout_s == 9.0
        return self.offsets


def test_steps_and_ranks_share_a_clock(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1, "text": 2})
    tracing = Tracing({"vision": Group(0), "text": Group(5_000, -5_000)}, writer, 9.0)
    assert tracing.submit(7) == {"vision": ["spans of 0"], "text": ["spans of 0", "spans of 1"]}
    span = Span("forward_step 0", FORWARD, 1_000_000, 2_000_000)
    tracing.write({"vision": [[span]], "text": [[span], [span]]})
    tracing.mark_step(StepMetrics(step=7, loss=2.0, data_s=0.0005), 0.0005, 0.003)
    writer.close()
    events = [event for event in json.loads((tmp_path / FILE).read_text()) if event["ph"] == "X"]
    assert [(event["pid"], event["tid"], event["name"], event["ts"], event["dur"]) for event in events] == [
        (0, 0, "forward_step 0", 1000.0, 1000.0),
        (1, 0, "forward_step 0", 1005.0, 1000.0),
        (1, 1, "forward_step 0", 995.0, 1000.0),
        (2, 0, "step 7", 500.0, 2500.0),
        (2, 0, "for data", 500.0, 500.0),
    ]


def test_steps_outside_of_the_window_are_forgotten(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1})
    tracing = Tracing({"vision": Group(0)}, writer, 9.0, range(5, 7))
    assert [tracing.submit(step)["vision"][0] for step in (4, 5, 6, 7)] == ["nothing", *["spans of 0"] * 2, "nothing"]
    for step in (4, 5, 6, 7):
        tracing.mark_step(StepMetrics(step=step, data_s=0.0), step, step + 1.0)
    writer.close()
    events = [event for event in json.loads((tmp_path / FILE).read_text()) if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["step 5", "step 6"]
