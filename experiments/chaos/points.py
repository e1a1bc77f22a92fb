"""Runs that faults meet, and named points of them: a function of dhp, and which of its calls."""

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "DHP_CHAOS_POINT"  # as `experiments.chaos.inject.sitecustomize` reads it

VISION, TEXT, READER, DATA = ("vision-0", "vision-1"), ("text-0", "text-1"), ("data-0",), ("data",)
DRIVER, SUPERVISOR = ("driver",), ("supervisor",)
RANKS = {"vision": VISION, "text": TEXT}
FRESH, RESUMED, DAMAGED, KEPT, PIPELINE, LINKED = "fresh", "resumed", "damaged", "kept", "pipeline", "linked"

SMALL_LINKS = "experiments.chaos.small_links"  # lets the tiny model's small tensors take the way of large ones


@dataclass(frozen=True)
class Point:
    """A place in a run.

    name: its own, as `save.unsynced`. target: `module:function`. when: before | during | after the call, or half, for a
    writer of lines that has written half of one. kind: of the processes. processes: names of them, of which the first
    that comes there is meant. skip: calls in a process before the one that is meant. scenario: which run, see
    `experiments.chaos.points`."""

    name: str
    target: str
    when: str
    kind: str
    processes: Sequence[str]
    skip: int = 0
    scenario: str = FRESH

    def environment(self, fired: Path, number: int = signal.SIGKILL) -> Mapping[str, str]:
        """What processes of a run find it by. fired: is written when the signal is raised."""
        plan = {key: value for key, value in asdict(self).items() if key not in ("name", "kind", "scenario")}
        return {VARIABLE: json.dumps(plan | {"fired": str(fired), "signal": int(number)})}


def _driver(name: str, target: str, when: str, skip: int = 0, scenario: str = FRESH) -> list[Point]:
    return [Point(name, target, when, "driver", DRIVER, skip, scenario)]


def _ranks(name: str, target: str, when: str, skip: int = 0, scenario: str = FRESH) -> list[Point]:
    return [Point(name, target, when, kind, names, skip, scenario) for kind, names in RANKS.items()]


def _one(kind: str, name: str, target: str, when: str, skip: int = 0, scenario: str = FRESH) -> list[Point]:
    names = {"vision": VISION, "text": TEXT, "reader": READER, "data": DATA, "supervisor": SUPERVISOR}[kind]
    return [Point(name, target, when, kind, names, skip, scenario)]


def _start() -> list[Point]:
    group, worker = "dhp.cluster.cluster:ActorGroup", "dhp.cluster.worker:Worker"
    return [
        *_driver("start.found", "dhp.trainer.session:find_start", "after", scenario=RESUMED),
        *_driver("put_aside.before", "dhp.checkpoint.resume:quarantine", "before", scenario=DAMAGED),
        *_driver("put_aside.after", "dhp.checkpoint.resume:quarantine", "after", scenario=DAMAGED),
        *_driver("ray.up", "dhp.cluster.cluster:reserve", "before"),
        *_driver("group.reserved", "dhp.cluster.cluster:reserve", "after"),
        *_driver("actors.some", f"{group}.__init__", "after"), *_driver("actors.all", f"{group}.__init__", "after", 1),
        *_ranks("rank.listen", f"{worker}._join", "before"), *_ranks("rank.joined", f"{worker}._join", "after"),
        *_ranks("rank.built", f"{worker}.build", "after"),
    ]  # fmt: skip


def _load() -> list[Point]:
    engine, reader = "dhp.engine.stage:StageEngine", "dhp.batch.reader:BatchReader"
    return [
        *_ranks("load.weights", f"{engine}._resume_weights", "before", scenario=RESUMED),
        *_ranks("load.states", f"{engine}._resume_optimizer", "before", scenario=RESUMED),
        *_ranks("load.all", f"{engine}._resume_optimizer", "after", scenario=RESUMED),
        *_one("data", "data.open", f"{reader}.__init__", "before"),
        *_one("reader", "data.open", f"{reader}.__init__", "after"),
        *_one("data", "data.load_state", f"{reader}.load_state", "before", scenario=RESUMED),
        *_one("data", "data.loaded", f"{reader}.load_state", "after", scenario=RESUMED),
    ]


def _step() -> list[Point]:
    reader, worker = "dhp.batch.reader:BatchReader", "dhp.cluster.worker:Worker"
    boxes, comm = "dhp.cluster.transport.shared_memory", "dhp.parallel.comm"
    engine, step = "dhp.engine.stage:StageEngine", "dhp.step.step"
    links = "dhp.cluster.transport.links:Links"
    return [
        *_one("data", "data.batch", f"{reader}.batch", "after", 3),
        *_one("reader", "data.read", f"{reader}.read", "before", 3),
        *_one("reader", "data.ack", "dhp.cluster.data_actor:_Reader._hand_on", "after", 3),
        *_driver("step.forwards", f"{step}:accumulate_gradients", "after", 3),
        *_driver("step.updates", f"{step}:update_weights", "after", 3),
        *_ranks("verb.begin", f"{worker}._run", "before", 17),
        *_ranks("verb.end", f"{worker}._run", "after", 17),
        *_ranks("transport.send", f"{boxes}:Outbox.send", "after", 5),
        *_ranks("transport.open", f"{boxes}:Inbox.open", "before", 9),
        *_one("vision", "collective.before", f"{comm}:_reduce_in_place", "before", 2),
        *_one("text", "collective.before", f"{comm}:_reduce_in_place", "before", 40),
        *_one("vision", "collective.inside", f"{comm}:_reduce_in_place", "during", 2),
        *_one("text", "collective.inside", f"{comm}:_reduce_in_place", "during", 40),
        *_ranks("norm", f"{engine}.grad_norm_sq", "before", 3),
        *_ranks("norm.known", f"{engine}.optimizer_step", "before", 3),
        *_ranks("optimizer.half", "torch.optim.adam:Adam.step", "after", 3),
        *_ranks("optimizer.one_part", f"{engine}.optimizer_step", "after", 3),
        Point("forward", f"{worker}._hand_over", "before", "text", ("text.0-0",), 12, PIPELINE),
        Point("forward", f"{worker}._hand_over", "before", "text's last stage", ("text.1-0",), 12, PIPELINE),
        *_ranks("link.connect", f"{links}._connect", "before", scenario=LINKED),
        *_ranks("link.sent", f"{links}.send", "after", 5, LINKED),
        *_ranks("link.taken", f"{links}.open", "before", 9, LINKED),
    ]


def _save() -> list[Point]:
    folder, saving, writer = "dhp.checkpoint.folder", "dhp.engine.stage", "dhp.checkpoint.shard_writer"
    return [
        *_driver("save.opened", "dhp.trainer.saving:open_checkpoint", "after", 1),
        *_ranks("save.asked", "dhp.engine.stage:StageEngine.save", "before", 1),
        *_ranks("save.staged", f"{saving}:ShareSaver.save", "after", 1),
        *_ranks("save.first_file", f"{writer}:write_tensors", "before", 2),
        *_ranks("save.mid_file", "dhp.checkpoint.shard_writer:_write", "after", 40),
        *_ranks("save.unsynced", f"{writer}:write_tensors", "after", 3),
        *_ranks("save.extents", f"{writer}:write_json", "after", 2),
        *_driver("save.all_written", "dhp.trainer.saving:finish_checkpoint", "before", 1),
        *_driver("save.model_files", f"{folder}:write_about", "before", 1),
        *_driver("save.after_manifest", f"{folder}:write_about", "after", 1),
        *_driver("save.before_rename", f"{folder}:require_fence", "after", 1),
        *_driver("save.after_rename", "dhp.trainer.saving:finish_checkpoint", "after", 1),
        *_driver("rotate.renamed", f"{folder}:remove", "before", 1, KEPT),
        *_driver("rotate.removing", f"{folder}:remove", "during", 1, KEPT),
        *_driver("best.link", "dhp.trainer.saving:mark_best", "before", scenario=KEPT),
        *_driver("best.marked", "dhp.trainer.saving:mark_best", "after", scenario=KEPT),
        *_ranks("evaluation", "dhp.engine.sample_sums:EvaluatingEngine.evaluate_step", "after", 1, KEPT),
    ]


def _record() -> list[Point]:
    recorder = "dhp.observe.recorder"
    run = "dhp.supervise.supervisor:Supervisor"
    return [
        *_driver("metrics.half_line", "dhp.observe.metrics:MetricsWriter._append", "half", 4),
        *_driver("metrics.cut", f"{recorder}:keep_steps", "after", scenario=RESUMED),
        *_driver("record.open", f"{recorder}:Recorder._open", "after", scenario=RESUMED),
        *_driver("teardown.begin", "dhp.cluster.cluster:Cluster.__exit__", "before"),
        *_driver("summary", f"{recorder}:write_summary", "after"),
        *_one("supervisor", "attempt.begin", f"{run}._is_ending", "after", 5),
        *_one("supervisor", "attempt.training", f"{run}._is_ending", "after", 45),
        *_one("supervisor", "attempt.ended", f"{run}._conclude", "before"),
    ]


def points() -> list[Point]:
    """All of them, in the order in which a run comes to them."""
    return [*_start(), *_load(), *_step(), *_save(), *_record()]


def names(of: Sequence[Point]) -> list[str]:
    """Their names, each once."""
    return list(dict.fromkeys(point.name for point in of))


LONG = "long"  # steps enough for a fault from outside to meet them
RESUMED_FROM, DAMAGED_STEP = 4, 6
USERS_FILES = ("notes.txt", "checkpoints/mine/weights.bin")  # of the user's, which no run may remove
_KEPT = ("training.save_total_limit=2", "training.eval_steps=2", "training.best_metric=eval_loss")


@dataclass(frozen=True)
class Lengths:
    """Steps of a run, and steps between two checkpoints."""

    steps: int
    save_steps: int


def lengths_of(scenario: str) -> Lengths:
    """Of a run of the scenario."""
    return Lengths(40, 4) if scenario == LONG else Lengths(8, 2)


def settings(
    scenario: str, assets: Path, run_dir: Path, more: Sequence[str] = (), lengths: Lengths | None = None
) -> list[str]:
    """Arguments of `python -m dhp.train_ray`. lengths: others than the scenario's own."""
    own = ["--config-name=tiny", f"tiny_assets={assets}", f"run_dir={run_dir}"]
    of = lengths or lengths_of(scenario)
    own += [f"training.max_steps={of.steps}", f"training.save_steps={of.save_steps}", "training.log_interval=1"]
    own += ["data.num_workers=1", "cluster.threads_per_actor=1", "cluster.step_timeout_s=20"]
    if scenario == KEPT:
        own += [*_KEPT, "data.eval_datasets=[shapes]"]
    if scenario == PIPELINE:
        own += ["text.parallelism=pipeline"]
    if scenario == LINKED:
        own += ["cluster.transport=nccl", f"plugins=[{SMALL_LINKS}]"]
    return [*own, *more]


def reference_of(scenario: str) -> str:
    """The scenario whose undisturbed run a run is compared with."""
    return FRESH if scenario in (RESUMED, DAMAGED) else scenario


def prepare(scenario: str, reference: Path, run_dir: Path) -> list[str]:
    """Make a run's directory as the run is to find it; the arguments that go with it. reference: of the undisturbed
    run, from which a run that is continued is taken."""
    begins_at = {RESUMED: RESUMED_FROM, DAMAGED: DAMAGED_STEP}.get(scenario)
    if begins_at is not None:
        shutil.copytree(reference, run_dir, symlinks=True)
        for folder in run_dir.glob("checkpoints/step_*"):
            if int(folder.name[5:]) > begins_at:
                shutil.rmtree(folder)
    if scenario == DAMAGED:
        flip_bit(next((run_dir / "checkpoints" / f"step_{DAMAGED_STEP}" / "text").glob("rank_*.safetensors")))
    for name in USERS_FILES:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("the user's own")
    return [] if begins_at is None else ["training.resume=auto"]


def flip_bit(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
