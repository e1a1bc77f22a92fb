"""metrics.jsonl and the TensorBoard files, read back by the readers that users have."""

import json
import math
import subprocess
import sys
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dhp.core.errors import RecordError
from dhp.observe.metrics import (
    AnswerMetrics,
    EvalMetrics,
    MetricsWriter,
    StepMetrics,
    flat,
    keep_steps,
    read_evaluations,
    read_metrics,
    read_record,
)

FIELDS = (
    "kind, step, epoch, loss, grad_norm, stage_norms, lr, tokens, target_tokens, vision_tokens, samples, images, "
    "cached_images, clips, step_s, data_s, busy_s, comm_s, rank_pace, tokens_per_s, flops, mfu, memory_bytes, "
    "activation_bytes, comm_bytes, dist_ratio, pad_ratio, sp_ratio, skipped_samples, skipped_steps, sample_digest"
).split(", ")


def lines(run_dir):
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_a_line_has_every_field_in_order_and_null_for_the_unknown(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(StepMetrics(step=1, loss=2.5, lr={"vision": 0.1, "text": 0.2}))
    (line,) = lines(tmp_path)
    assert list(line) == FIELDS
    assert (line["kind"], line["mfu"]) == ("train", None)
    assert (line["step"], line["loss"], line["lr"]) == (1, 2.5, {"vision": 0.1, "text": 0.2})


def test_an_extra_field_is_an_error():
    with pytest.raises(TypeError, match="lossy"):
        StepMetrics(step=1, lossy=1.0)


def test_each_line_is_on_disk_at_once_and_earlier_ones_stay(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(StepMetrics(step=1))
        assert len(lines(tmp_path)) == 1
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(StepMetrics(step=2))
        assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_numbers_that_json_has_no_word_for(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(StepMetrics(step=1, loss=math.nan, grad_norm=math.inf, dist_ratio={"text": -math.inf}))
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"], line["dist_ratio"]) == ("NaN", "Infinity", {"text": "-Infinity"})
    (metrics,) = read_metrics(tmp_path)
    assert math.isnan(metrics.loss)
    assert (metrics.grad_norm, metrics.dist_ratio) == (math.inf, {"text": -math.inf})


def test_metrics_read_back_equal(tmp_path):
    steps = [StepMetrics(step=n, loss=1 / n, comm_bytes={"text": {"all_reduce": n}}, tokens=10 * n) for n in (1, 2)]
    steps.append(StepMetrics(step=3, sample_digest="00001e05"))  # no number, though it looks like one
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in steps:
            writer.write(step)
    assert read_metrics(tmp_path) == steps


def test_text_among_numbers_reads_back_equal(tmp_path):
    pace = {"text": {"min": 0.9, "median": 1.0, "max": math.nan, "rank": "text rank 1"}}
    writer = MetricsWriter(tmp_path)
    writer.write(StepMetrics(step=1, loss=1.0, grad_norm=1.0, rank_pace=pace))
    writer.close()
    (back,) = read_metrics(tmp_path)
    assert back.rank_pace["text"]["rank"] == "text rank 1" and math.isnan(back.rank_pace["text"]["max"])


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"kind": "train"}', "'step'"), ('{"step": 2, "kind": "train", "new": 1}', "'new'"), ('{"step": 2}', "'kind'")],
)
def test_lines_of_another_version_are_refused_by_number(tmp_path, line, why):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(StepMetrics(step=1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RecordError, match=f"metrics.jsonl, line 2: another version of dhp.*{why}.*Read it by"):
        read_metrics(tmp_path)


def test_tensorboard_reads_the_scalars(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            writer.write(StepMetrics(step=step, loss=4.0 / step, lr={"text": 0.5}, comm_bytes={"text": {"sum": 8}}))
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["comm_bytes/text/sum", "loss", "lr/text"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0), (2, 2.0)]


def test_the_numbers_of_a_step_by_their_names(tmp_path):
    step = StepMetrics(step=3, loss=2.0, lr={"text": 0.5}, comm_bytes={"text": {"sum": 8}}, tokens=7)
    with closing(MetricsWriter(tmp_path)) as writer:
        assert writer.write(step) == {"loss": 2.0, "lr/text": 0.5, "tokens": 7.0, "comm_bytes/text/sum": 8.0}
    assert flat({"step": 3, "loss": 1, "by": {"a": None}, "name": "x"}, "eval/") == {"eval/loss": 1.0}


def test_lines_of_another_kind_are_kept_and_are_no_steps(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(StepMetrics(step=1))
        writer.write(StepMetrics(step=2))
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        file.read_text() + '{"kind": "eval", "step": 2, "dataset": ""}\n{"kind": "eval", "step": 4, "dataset": ""}\n'
    )
    assert [step.step for step in read_metrics(tmp_path)] == [1, 2]
    assert [line.step for line in keep_steps(tmp_path, 2)] == [1, 2, 2]
    assert [(line["kind"], line["step"]) for line in lines(tmp_path)] == [("train", 1), ("train", 2), ("eval", 2)]


def test_closing_twice_is_harmless(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.close()
    writer.close()


def test_observing_needs_neither_torch_nor_ray():
    code = (
        "import sys, dhp.observe.metrics, dhp.observe.terminal, dhp.observe.terminal, dhp.config.command_line, "
        "dhp.config.resolve, dhp.config.run_dir; print({'torch', 'ray', 'tensorflow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_what_came_after_a_checkpoint_is_cut_off(tmp_path):
    assert keep_steps(tmp_path, 0) == [] and not (tmp_path / "metrics.jsonl").exists()
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2, 3):
            writer.write(StepMetrics(step=step, loss=math.inf))
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 4, "lo')  # killed while writing
    assert [step.step for step in keep_steps(tmp_path, 9)] == [1, 2, 3]
    kept = keep_steps(tmp_path, 2)
    assert kept == read_metrics(tmp_path) == [StepMetrics(step=1, loss=math.inf), StepMetrics(step=2, loss=math.inf)]
    assert [line["loss"] for line in lines(tmp_path)] == ["Infinity", "Infinity"]


def test_an_evaluation_that_is_made_anew_leaves_no_older_lines_of_it(tmp_path):
    answer = AnswerMetrics(step=2, dataset="a", number=1, prompt="", reference="", answer="NaN", tokens=1)
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            writer.write(StepMetrics(step=step))
            writer.write_evaluation(EvalMetrics(step=step, dataset="a", loss=math.nan), alone=True)
        writer.write_answer(answer)
    assert math.isnan(read_evaluations(read_record(tmp_path), 1)[0].loss) and read_record(tmp_path)[-1] == answer
    assert [line.step for line in read_evaluations(read_record(tmp_path), 1)] == [1]
    assert [line.step for line in read_evaluations(read_record(tmp_path))] == [2] and read_evaluations([]) == []
    with open(tmp_path / "metrics.jsonl", "a") as lines:
        lines.write('{"kind": "train", "st')
    assert [(line.kind, line.step) for line in keep_steps(tmp_path, 2)] == [
        *[("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("answer", 2)]
    ]
    kept = keep_steps(tmp_path, 2, evaluates=True)
    assert [(line.kind, line.step) for line in kept] == [("train", 1), ("eval", 1), ("train", 2)]
