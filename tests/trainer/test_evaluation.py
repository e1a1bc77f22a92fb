"""When a run is evaluated, and what it reports."""

import errno
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.__main__ import main
from dhp.checkpoint.folder import ABOUT, checkpoints
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.axes import Degrees
from dhp.core.batch import StepInfo
from dhp.core.errors import ConfigError, DataError
from dhp.core.reports import EvaluatedShare, SampleSums, StageReport
from dhp.data.sampling.sampler import BatchLayout, RandomSampler
from dhp.observe.metrics import AnswerMetrics, EvalMetrics, Line, StepMetrics, read_metrics
from dhp.observe.ranks import RankShare
from dhp.observe.summary import Planned
from dhp.plan.batches import feed_settings
from dhp.trainer import step_reports
from dhp.trainer.evaluation import (
    EvalData,
    Evaluation,
    JudgedSample,
    _Done,
    _metrics,
    due,
    judge_samples,
    misses,
    of_evaluation,
    tenths,
)
from dhp.trainer.preflight import prepare
from dhp.trainer.saving import KeptCheckpoints, saves_after
from dhp.trainer.session import DataPlan, Session
from dhp.trainer.step_reports import (
    NO_MFU,
    SKIPPED_SHOWN,
    Timing,
    left_out,
    mean_losses,
    notes,
    rank_shares,
    step_metrics,
    write_page,
)
from tests.helpers.made_runs import make_run
from tests.helpers.runs import LONG, ONE_ACTOR_EACH, Outcome, tiny, train


def answer(step: int, dataset: str) -> AnswerMetrics:
    return AnswerMetrics(step=step, dataset=dataset, number=1, prompt="", reference="", answer="", tokens=1)


def config_of(*overrides: str) -> Config:
    return resolve(compose_config("tiny", overrides=["data.eval_datasets=['shapes%50']", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "evaluated", "saved"),
    [
        ([], [10], [5, 10]),
        (["training.eval_steps=4"], [4, 8, 10], [5, 10]),
        (["training.eval_steps=4", "training.save_steps=3"], [4, 8, 10], [3, 5, 6, 9, 10]),
        (["training.save_steps=3", "training.best_metric=eval_loss"], [3, 5, 6, 9, 10], [3, 5, 6, 9, 10]),
        (["training.save_final=false"], [10], [5]),
        (["training.save_final=false", "training.save_steps=5"], [10], [5, 10]),
    ],
)
def test_when(overrides: list[str], evaluated: list[int], saved: list[int]) -> None:
    config, plan = config_of(*overrides), DataPlan(10, frozenset({5}), {}, 0, 0)
    assert [step for step in range(1, 11) if saves_after(config, step, plan)] == saved
    assert [step for step in range(1, 11) if due(config, step, 10, step in saved)] == evaluated
    assert not due(resolve(compose_config("tiny")), 10, 10)


@pytest.mark.parametrize(
    ("every", "steps", "ends"), [(1, 52, {13, 26, 39}), (2, 52, {26}), (1, 13, set()), (4, 53, {52})]
)
def test_epochs_that_end_with_a_checkpoint(every: int, steps: int, ends: set[int]) -> None:
    """Of 100 samples in steps of 8; the run's own end is no such one."""
    sampler = RandomSampler(100, BatchLayout(2, 2, 2), 0, True)
    session = Session.__new__(Session)
    session.config, session._timeout_s = config_of(f"training.save_epochs={every}"), 1.0
    session.data = SimpleNamespace(ask=lambda verb, epochs, timeout_s: getattr(sampler, verb)(epochs))
    assert set(session._epoch_ends(steps)) == ends


@pytest.mark.slow
def test_a_run_leaves_the_checkpoints_of_its_epochs_alone(tiny_assets: Path, tmp_path: Path) -> None:
    asked = ["data.datasets=['shapes%5']", "training.max_steps=null", "training.num_epochs=3", "training.save_epochs=2"]
    ended = train(*tiny(tiny_assets, tmp_path / "run", *ONE_ACTOR_EACH, *asked, "training.save_final=false"))
    assert ended.status == 0 and ended.left == (), ended.stderr
    steps = len(read_metrics(tmp_path / "run"))
    assert steps % 3 == 0 and "saving the final checkpoint" not in ended.stdout + ended.stderr
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == [f"step_{steps // 3 * 2}"]


def test_best_of_no_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint that could be the best"):
        config_of("training.save_final=false", "training.best_metric=eval_loss")
    config_of("training.save_final=false", "training.best_metric=eval_loss", "training.save_epochs=1")


def test_a_long_evaluation_says_how_far_it_is() -> None:
    assert tenths(49) == set()
    assert sorted(tenths(303)) == [30, 60, 90, 121, 151, 181, 212, 242, 272]


def test_each_sample_once_in_the_files_order() -> None:
    asked = ["data.balance=isf", "data.shuffle=true", "data.max_pixels=3136", "data.data_registry.shapes.weight=3"]
    config = config_of(*asked)
    settings = feed_settings(of_evaluation(config, "shapes%50"))
    data = settings.data
    assert data.data_registry["shapes"].weight == 1 and config.data.data_registry["shapes"].weight == 3
    assert (data.datasets, data.shuffle, settings.balancing.method) == (["shapes%50"], False, "random")
    assert data.max_pixels == 3136 and config.data.shuffle


def kept(parent: Path, limit: int, metric: str | None) -> KeptCheckpoints:
    asked = [f"training.checkpoint_dir={parent}", f"training.save_total_limit={limit}"]
    return KeptCheckpoints(config_of(*asked, *([f"training.best_metric={metric}"] if metric else [])), lambda _: None)


def finish(parent: Path, step: int) -> None:
    folder = parent / f"step_{step}"
    folder.mkdir()
    (folder / ABOUT).write_text(json.dumps({"step": step}))


def evaluated(step: int, loss: float | None) -> list[EvalMetrics]:
    return [EvalMetrics(step=step, dataset="shapes", loss=loss)]


def test_the_best_checkpoint_is_not_the_one_that_goes(tmp_path: Path) -> None:
    of_run = kept(tmp_path, 1, "eval_loss")
    for step, loss in ((1, math.nan), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        finish(tmp_path, step)
        of_run.finished(step)
        of_run.evaluated(evaluated(step, loss))
    assert [path.name for path in checkpoints(tmp_path)] == ["step_5", "step_2"]
    assert (tmp_path / "best").resolve().name == "step_2"
    assert of_run.best == kept(tmp_path, 1, "eval_loss").best == "step_2: eval_loss 1.0000"
    assert kept(tmp_path, 1, None).best is None
    again = kept(tmp_path, 1, "eval_loss")  # as a resumed run
    finish(tmp_path, 6)
    again.evaluated(evaluated(6, 1.5))
    assert (tmp_path / "best").resolve().name == "step_2"
    again.evaluated(evaluated(7, 0.5))  # a step without a checkpoint
    assert (tmp_path / "best").resolve().name == "step_2"


@pytest.mark.parametrize(
    ("metric", "best"),
    [("eval_loss", "step_2: eval_loss 2.0000"), ("eval_loss/shapes", "step_1: eval_loss/shapes 3.0000")],
)
def test_the_best_is_so_on_all_datasets_together_or_on_the_one_that_is_named(
    metric: str, best: str, tmp_path: Path
) -> None:
    of_run = kept(tmp_path, 2, metric)
    for step, losses in ((1, {"shapes": 3.0, "b": 1.0, "": 2.5}), (2, {"shapes": 4.0, "b": 0.5, "": 2.0})):
        finish(tmp_path, step)
        of_run.evaluated([EvalMetrics(step=step, dataset=name, loss=loss) for name, loss in losses.items()])
    assert of_run.best == best


def test_what_the_disk_refuses_is_told_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("dhp.trainer.saving.mark_best", refuse)
    monkeypatch.setattr("dhp.trainer.saving.remove_old", refuse)
    told: list[str] = []
    asked = [f"training.checkpoint_dir={tmp_path}", "training.save_total_limit=1", "training.best_metric=eval_loss"]
    of_run = KeptCheckpoints(config_of(*asked), told.append)
    finish(tmp_path, 1)
    of_run.evaluated(evaluated(1, 1.0))
    assert [text.split(":")[0] for text in told] == ["warning", "warning"]
    assert f"{tmp_path / 'best'} cannot be made to lead to step_1: Permission denied" in told[0]
    assert f"an old checkpoint in {tmp_path} cannot be removed: Permission denied" in told[1]


def test_a_damaged_record_of_the_best_is_told(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"step": 3}')
    told: list[str] = []
    of_run = KeptCheckpoints(
        config_of(f"training.checkpoint_dir={tmp_path}", "training.best_metric=eval_loss"), told.append
    )
    assert len(told) == 1 and told[0].startswith(f"warning: {tmp_path / 'best.json'} is damaged")
    finish(tmp_path, 4)
    of_run.evaluated(evaluated(4, 9.0))
    assert (tmp_path / "best").resolve().name == "step_4"


def test_without_a_metric_old_ones_go_as_soon_as_a_newer_one_is_whole(tmp_path: Path) -> None:
    of_run = kept(tmp_path, 2, None)
    for step in (1, 2, 3):
        finish(tmp_path, step)
        of_run.finished(step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_3", "step_2"]


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_tells_of_its_evaluations(long_run: tuple[Path, Outcome]) -> None:
    run_dir, ended = long_run
    assert ended.status == 0, ended.stderr
    found = [line for line in lines_of(run_dir) if line["kind"] == "eval"]
    assert [(line["step"], line["dataset"]) for line in found] == [(step, "shapes") for step in (0, 1, 2, 3, 4)]
    assert len({line["target_tokens"] for line in found}) == 1 and len({line["loss"] for line in found}) == 5
    assert len(read_metrics(run_dir)) == 4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval_loss"] == {"shapes": found[-1]["loss"]}
    assert summary["eval_accuracy"] == {"shapes": found[-1]["accuracy"]}
    assert summary["eval_exact"] == {"shapes": found[-1]["exact"]}
    best = min(found, key=lambda line: line["loss"])
    assert (run_dir / "checkpoints" / "best").resolve().name == f"step_{best['step']}"
    rows = dict(line.split("  ", 1) for line in ended.stdout.splitlines() if line.startswith(("held out ", "best ")))
    held_out = "shapes {loss:.4f} (accuracy {accuracy:.1%}, exact {exact:.1%})".format(**found[-1])
    assert rows["held out"].split() == held_out.split()
    assert rows["best"].split() == f"step_{best['step']}: eval_loss {best['loss']:.4f}".split()


def test_a_run_tells_of_its_answers(long_run: tuple[Path, Outcome]) -> None:
    run_dir, ended = long_run
    told = [line for line in lines_of(run_dir) if line["kind"] == "answer"]
    assert [(line["step"], line["dataset"], line["number"]) for line in told] == [
        (step, "shapes", 1) for step in (0, 1, 2, 3, 4)
    ]
    assert all(line["prompt"] and line["reference"] and 1 <= line["tokens"] <= 4 for line in told)
    assert f"answer 1 of shapes after step 2: {json.dumps(told[1]['prompt'])}" in ended.stderr
    assert b"answer/shapes/1" in b"".join(file.read_bytes() for file in (run_dir / "tb").iterdir())


@pytest.mark.slow
def test_the_best_checkpoint_is_evaluated_as_it_was(long_run: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir, _ = long_run
    best_one = run_dir / "checkpoints" / "best"
    more = ("--json", f"--samples={tmp_path / 's.jsonl'}", "--by=id")
    again = train("evaluate", "loss", str(best_one), *more, module="dhp")
    assert again.status == 0 and again.left == (), again.stderr
    told, *by_id = map(json.loads, again.stdout.splitlines())
    number = int(best_one.resolve().name.removeprefix("step_"))
    (wanted,) = (line for line in lines_of(run_dir) if line["kind"] == "eval" and line["step"] == number)
    assert (told["step"], told["loss"], told["exact"]) == (number, wanted["loss"], wanted["exact"])
    samples = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    rows = [one["row"] for one in samples]
    assert rows == sorted(set(rows)) and len(rows) == told["samples"]
    assert sum(one["targets"] for one in samples) == told["target_tokens"]
    assert sum(one["exact"] for one in samples) == told["exact"] * told["samples"]
    assert [(int(one["value"]), one["exact"]) for one in by_id] == [(one["row"], one["exact"]) for one in samples]


@pytest.mark.slow
def test_an_evaluation_that_a_fault_ended_is_made(
    long_run: tuple[Path, Outcome], long_assets: Path, tmp_path: Path
) -> None:
    """The run as it is when killed in the evaluation after its last step, resumed."""
    killed, lines = tmp_path / "killed", lines_of(long_run[0])
    shutil.copytree(long_run[0], killed, symlinks=True)
    (killed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-2]) + '{"kind": "ev')
    for file in ("summary.json", "checkpoints/best", "checkpoints/best.json"):
        (killed / file).unlink()
    ended = train(*tiny(long_assets, killed, *LONG, "training.resume=auto"))
    assert ended.status == 0, ended.stderr
    assert "the evaluation after step 4 was not finished: it is made now" in ended.stdout + ended.stderr
    assert [line | {"seconds": 0} for line in lines_of(killed)] == [line | {"seconds": 0} for line in lines]
    summary = json.loads((killed / "summary.json").read_text())
    assert (summary["status"], summary["eval_loss"]) == ("completed", {"shapes": lines[-2]["loss"]})
    assert (killed / "checkpoints" / "best").resolve().name == "step_4"


STEP = StepMetrics(step=4)


ONE = EvalMetrics(step=4, dataset="a")
BOTH = [EvalMetrics(step=4, dataset=name) for name in ("a", "b", "")]


@pytest.mark.parametrize(
    ("datasets", "prompts", "record", "missed"),
    [
        ("a", {}, [STEP], True),
        ("a", {}, [STEP, EvalMetrics(step=2, dataset="a")], True),  # of an earlier step
        ("a", {}, [STEP, ONE], False),
        ("a", {}, [], False),  # the record of another run: step 4 is not its own
        ("a", {}, [StepMetrics(step=3)], False),
        ("ab", {}, [STEP, ONE, EvalMetrics(step=4, dataset="b")], True),
        ("ab", {}, [STEP, *BOTH], False),
        ("a", {"a": 1}, [STEP, ONE], True),
        ("a", {"a": 1}, [STEP, ONE, answer(4, "a")], False),
        ("a", {"a": 1}, [STEP, ONE, answer(2, "a")], True),
        ("a", {"a": 3}, [STEP, ONE, answer(4, "a"), answer(4, "a")], True),  # it ended between two answers
        ("a", {"a": 0}, [STEP, ONE], False),  # none of its samples asks anything
        ("ab", {"a": 2, "b": 1}, [STEP, *BOTH, answer(4, "a"), answer(4, "a")], True),
        ("ab", {"a": 2, "b": 1}, [STEP, *BOTH, answer(4, "a"), answer(4, "a"), answer(4, "b")], False),
    ],
)
def test_an_evaluation_is_missed_where_the_record_lacks_lines_of_it(
    datasets: str, prompts: dict[str, int], record: list[Line], missed: bool
) -> None:
    config = Config()
    config.data.eval_datasets = [f"{name}%50" for name in datasets]
    assert misses(config, 4, record, Counter(prompts)) is missed


@pytest.mark.slow
def test_images_are_exchanged_in_one_start(tiny_assets: Path) -> None:
    given = [str(tiny_assets / "model"), "--config-name=tiny", f"tiny_assets={tiny_assets}", *ONE_ACTOR_EACH]
    asked = ["data.eval_datasets=['shapes%5']", "exchange=images", "--json"]
    ended = train("evaluate", "loss", *given, *asked, module="dhp")
    assert ended.status == 0 and ended.left == (), ended.stderr
    own, others = map(json.loads, ended.stdout.splitlines())
    assert (own["images"], others["images"]) == ("own", "others")
    assert [own[key] for key in ("samples", "target_tokens")] == [others[key] for key in ("samples", "target_tokens")]
    assert own["loss"] != others["loss"] and own["samples"] > 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{model}"], "is a model: name a FILE.yaml or --config-name=NAME"),
        (["{model}", "--config-name=tiny"], "data.eval_datasets is empty"),
        (["{model}", "--config-name=tiny", "data.eval_datasets=[shape]"], "did you mean shapes?"),
        (["nowhere"], "nowhere is no directory"),
        (["{model}", "exchange=words"], "exchange=words: images alone can be exchanged; write exchange=images"),
        (
            ["{model}", "training.eval_answers=4"],
            "nothing is answered. Leave it out, and ask by `python -m dhp generate",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    arguments: list[str], told: str, made_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "loss", *(one.format(model=made_model) for one in arguments)]) == 1
    assert told in capsys.readouterr().err


def test_an_empty_dataset_is_refused_before_anything_starts(tmp_path: Path, tiny_assets: Path) -> None:
    (tmp_path / "none.json").write_text("[]")
    entry = f"+data.data_registry.none={{annotation_path: {tmp_path / 'none.json'}}}"
    asked = [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", entry, "data.eval_datasets=[none]"]
    with pytest.raises(DataError, match="none.json holds no sample"):
        prepare(compose_config("tiny", overrides=asked))


def batch(targets: int, loss: float, right: int = 3) -> _Done:
    """A batch of two samples and a bad one, whose loss and right tokens two shards have together."""
    info = StepInfo(
        step=0, epoch=0, done=0.0, samples=2, images=0, tokens=50, target_tokens=targets, vision_tokens=0,
        total_weight=targets, padded_tokens=0, dist_ratio={}, flops={}, skipped=("bad",), data_s=0.0, measure_s=0.0,
    )  # fmt: skip
    judged = (JudgedSample("a", 5, right, targets), JudgedSample("a", 4, right, right))
    return _Done(info, (EvaluatedShare(loss / 2, 1, targets), EvaluatedShare(loss / 2, right - 1, 0)), judged)


def test_of_batches_each_token_counts_alike() -> None:
    assert _metrics(7, "a", [batch(10, 4.0), batch(30, 2.0)], 1.5) == EvalMetrics(
        step=7, dataset="a", loss=2.5, accuracy=6 / 40, exact=2 / 4, target_tokens=40, tokens=100, samples=4,
        skipped_samples=2, seconds=1.5,
    )  # fmt: skip
    assert _metrics(7, "a", [], 0.0).loss is None


def test_of_batches_each_weight_counts_alike() -> None:
    """Of an objective whose N is no number of tokens."""
    info = SimpleNamespace(target_tokens=9, tokens=9, samples=1, skipped=())
    weights = {1.5: 4.0, 0.5: 8.0}
    infos = [SimpleNamespace(**vars(info), total_weight=weight) for weight in weights]
    done = [_Done(of, (EvaluatedShare(loss, 1, 9),)) for of, loss in zip(infos, weights.values(), strict=True)]
    assert _metrics(7, "a", done, 0.0).loss == 5.0


class Evaluated(Evaluation):
    """Datasets whose batches are there already."""

    def __init__(self, **datasets: list[_Done]):
        self._done = datasets
        cluster, data = SimpleNamespace(step_timeout_s=1.0), SimpleNamespace(eval_datasets=list(datasets))
        super().__init__(SimpleNamespace(config=SimpleNamespace(cluster=cluster, data=data), graph=None))

    def _open(self, name: str) -> EvalData:
        nobody: Any = None
        return EvalData(name, nobody, len(self._done[name]), None)

    def _batches(self, data: EvalData) -> list[_Done]:
        return self._done[data.name]


def test_of_several_datasets_the_last_line_is_of_all_their_batches_together() -> None:
    lines = Evaluated(a=[batch(10, 4.0), batch(30, 2.0)], b=[batch(60, 5.0, right=8)]).run(7)
    found = [(line.dataset, line.loss, line.accuracy, line.target_tokens, line.samples) for line in lines]
    assert found == [("a", 2.5, 6 / 40, 40, 4), ("b", 5.0, 8 / 60, 60, 2), ("", 4.0, 14 / 100, 100, 6)]
    assert lines[2].seconds == lines[0].seconds + lines[1].seconds


def test_one_dataset_has_one_line() -> None:
    assert [line.dataset for line in Evaluated(a=[batch(10, 4.0)]).run(7)] == ["a"]


def test_samples_are_told_in_the_order_of_their_file() -> None:
    judged: list[JudgedSample] = []
    (line,) = Evaluated(a=[batch(10, 4.0)]).run(7, judged.append)
    assert [(one.row, one.right, one.targets, one.exact) for one in judged] == [(4, 3, 3, True), (5, 3, 10, False)]
    assert line.exact == 0.5


def test_a_sample_is_exact_where_all_of_its_targets_are_right_on_all_ranks_that_share_it() -> None:
    """Two replicas of two ranks each: row 3 is divided, 1 has no target, one of row 7's two tokens is wrong."""
    shares = [
        SampleSums({0: (1.0, 2.0), 1: (1.0,)}, {0: (2, 2), 1: (1,)}),
        SampleSums({0: (0.0, 1.0), 1: (0.0,)}, {0: (0, 1), 1: (0,)}),
        SampleSums({0: (0.0,), 1: ()}, {0: (0,), 1: ()}),
        None,
    ]
    found = judge_samples(LOSS_STEP, [EvaluatedShare(0.0, 0, 0, one) for one in shares], 2)
    assert found == (JudgedSample("b", 7, 1, 2), JudgedSample("a", 3, 3, 3), JudgedSample("a", 9, 1, 1))
    assert [one.exact for one in found] == [False, True, True]


def test_a_run_that_ends_has_its_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert write_page(run_dir) == str(run_dir / "report.html")
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")


def test_a_run_of_very_many_steps_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reports, "MOST_STEPS", 5)
    run_dir = make_run(tmp_path / "run", steps=6)
    assert write_page(run_dir) is None and not (run_dir / "report.html").exists()
    monkeypatch.undo()
    monkeypatch.setattr(step_reports, "MOST_BYTES", 100)
    assert write_page(run_dir) is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError("of a\nmistake")])
def test_a_page_that_cannot_be_made_says_why(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(step_reports, "write_report", fail)
    said = write_page(make_run(tmp_path / "run"))
    assert said is not None and said.startswith(f"none ({type(error).__name__}: ") and "\n" not in said


def test_a_run_without_a_step_says_that_there_is_nothing_to_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "metrics.jsonl").write_text("")
    assert "no step yet" in str(write_page(run_dir))


COUNTS: dict[str, Any] = {
    **{
        "samples": 2,
        "images": 1,
        "tokens": 90,
        "target_tokens": 30,
        "total_weight": 30,
        "vision_tokens": 64,
        "padded_tokens": 100,
    },
    **{"dist_ratio": {"text": 0.0}, "flops": {"text": 50}, "skipped": (), "data_s": 0.1, "measure_s": 0.0},
}
INFO = StepInfo(step=3, epoch=0, done=0.5, **COUNTS)
STAGES: Any = {
    name: SimpleNamespace(
        leaders=lambda of: list(of), spec=SimpleNamespace(part=name, degrees=Degrees(data=2 // tensor, tensor=tensor))
    )
    for name, tensor in (("vision", 1), ("text", 2))
}


def report(rank: int, busy_s: float | None, loss: float | None = None, comm_s: float | None = None) -> StageReport:
    return StageReport(rank, loss, 2.5, {"vision": 1e-3}, None, {"handoff": 8}, busy_s=busy_s, comm_s=comm_s)


def told(vision: list[StageReport], text: list[StageReport]) -> StepMetrics:
    return step_metrics(INFO, {"vision": vision, "text": text}, Timing(2.0, 0.5, 100.0), STAGES, 4, 1)


def test_a_stage_is_as_busy_as_its_ranks_in_the_mean() -> None:
    metrics = told([report(0, 0.25), report(1, 0.75)], [report(0, 1.25, loss=1.0), report(1, 1.25, loss=0.5)])
    assert metrics.busy_s == {"vision": 0.5, "text": 1.25}
    assert (metrics.kind, metrics.step, metrics.epoch, metrics.loss, metrics.grad_norm) == ("train", 4, 0.5, 1.5, 2.5)
    assert (metrics.step_s, metrics.data_s, metrics.tokens_per_s, metrics.mfu) == (2.0, 0.5, 45.0, 0.25)
    assert metrics.comm_bytes == {"vision": {"handoff": 16}, "text": {"handoff": 16}}
    assert (metrics.pad_ratio, metrics.skipped_samples, metrics.skipped_steps) == (pytest.approx(0.1), 4, 1)
    assert metrics.sample_digest is None and metrics.stage_norms is None
    norms = {"vision": 0.7, "text": 2.4}
    by_stage = [[replace(report(0, None), stage_norm=norm)] for norm in norms.values()]
    assert told(*by_stage).stage_norms == norms


def test_the_seconds_of_ranks_are_held_against_their_work() -> None:
    """Of what they compute themselves, by the planned time of a mean rank, or else by what the mean rank took."""
    info = replace(INFO, work={"vision": (3.0, 1.0), "text": (8.0,)})
    reports = {
        "vision": [report(0, 1.0, comm_s=0.4), report(1, 1.0, comm_s=0.6)],
        "text": [report(0, 1.0, 1.0, 0.5), report(1, 1.0, 1.0, 0.25)],
    }
    shares = rank_shares(info, reports, STAGES)
    assert shares == {
        "vision": [RankShare("vision rank 0", 0.6, 3.0), RankShare("vision rank 1", 0.4, 1.0)],
        "text": [RankShare("text rank 0", 0.5, 8.0), RankShare("text rank 1", 0.75, 8.0)],
    }
    planned = Planned(busy_s={"text": 0.6}, comm_s={"text": 0.1})
    paces = step_metrics(info, reports, Timing(2.0, 0.5, None, planned), STAGES, 0, 0).rank_pace
    assert paces is not None and paces["text"] == {"min": 1.0, "median": 1.25, "max": 1.5, "rank": "text rank 1"}
    assert paces["vision"] == pytest.approx({"min": 0.8, "median": 1.2, "max": 1.6, "rank": "vision rank 1"})
    on_gpu = {"vision": reports["vision"], "text": [report(0, 1.0, 1.0), report(1, 1.0, 1.0)]}
    assert set(rank_shares(info, on_gpu, STAGES)) == {"vision"} and not rank_shares(INFO, reports, STAGES)


def test_bad_samples_are_listed_up_to_a_number() -> None:
    lines = list(left_out(replace(INFO, skipped=tuple(f"sample {n}" for n in range(SKIPPED_SHOWN + 2)))))
    assert lines[:2] == ["skipped: sample 0", "skipped: sample 1"] and len(lines) == SKIPPED_SHOWN + 1
    assert lines[-1] == "skipped: 2 more; `python -m dhp inspect data` lists them"
    assert list(left_out(INFO)) == []


def test_busy_is_not_told_where_a_stage_was_not_measured() -> None:
    assert told([report(0, None)], [report(0, 1.0)]).busy_s is None


@pytest.mark.parametrize(
    ("peak", "mfu", "said"), [(100.0, 0.25, []), (25.0, 1.0, []), (20.0, None, [NO_MFU]), (None, None, [])]
)
def test_why_a_step_has_no_mfu_is_said(peak: float | None, mfu: float | None, said: list[str]) -> None:
    reports = {"vision": [report(0, 0.25)], "text": [replace(report(0, 1.25, loss=1.0), notes=("of a rank",))]}
    timing = Timing(2.0, 0.5, peak)
    metrics = step_metrics(INFO, reports, timing, STAGES, 4, 1)
    assert metrics.mfu == mfu
    assert list(notes(reports, metrics, timing)) == ["of a rank", *said]


# Two replicas of two sequence ranks with two tensor ranks each, behind a stage without a head.
LOSS_STAGES: Any = {
    "vision": SimpleNamespace(leaders=list, spec=SimpleNamespace(degrees=Degrees(ulysses=2))),
    "text": SimpleNamespace(
        leaders=lambda of: list(of[::2]), spec=SimpleNamespace(degrees=Degrees(data=2, ring=2, tensor=2))
    ),
}
ORDER = (((("b", 7), ("a", 3)), (("a", 1),)), ((("a", 9),), ()))  # [micro-batch][replica]
LOSS_STEP = replace(INFO, order=ORDER, rows={"a": (1, 3, 5, 9), "b": (7,)})


def loss_report(samples: SampleSums | None) -> StageReport:
    return StageReport(0, None, 1.0, {}, None, {}, samples=samples)


def of_ranks(*leaders: SampleSums | None) -> dict[str, list[StageReport]]:
    return {"vision": [loss_report(None)] * 2, "text": [loss_report(one) for each in leaders for one in (each, None)]}


FOUR = (
    SampleSums({0: (1.0, 2.0), 1: (0.0,)}, {0: (1, 2), 1: (0,)}),
    SampleSums({0: (3.0, 0.0), 1: (0.0,)}, {0: (3, 0), 1: (0,)}),
    SampleSums({0: (5.0,), 1: ()}, {0: (1,), 1: ()}),
    SampleSums({0: (7.0,), 1: ()}, {0: (2,), 1: ()}),
)


def test_parts_of_a_sample_are_put_together_and_stand_beside_their_rows() -> None:
    """Row 9 has no target, row 5 was left out."""
    assert mean_losses(LOSS_STEP, of_ranks(*FOUR), LOSS_STAGES) == {"a": [4.0, 1.0, None, None], "b": [1.0]}


def test_of_a_row_that_comes_twice_each_has_the_mean() -> None:
    twice = replace(LOSS_STEP, order=(((("b", 7), ("a", 1)), (("a", 1),)), ORDER[1]), rows={"a": (1, 1, 9), "b": (7,)})
    assert mean_losses(twice, of_ranks(*FOUR), LOSS_STAGES) == {"a": [2.8, 2.8, None], "b": [1.0]}


def test_nothing_is_said_where_no_rank_reports_any() -> None:
    assert mean_losses(LOSS_STEP, of_ranks(*[None] * 4), LOSS_STAGES) == {}


def test_ranks_that_have_other_samples_than_were_dealt_are_seen() -> None:
    short = replace(FOUR[0], sums={0: (1.0,), 1: (0.0,)})
    with pytest.raises(ValueError, match="zip"):
        mean_losses(LOSS_STEP, of_ranks(short, *FOUR[1:]), LOSS_STAGES)
