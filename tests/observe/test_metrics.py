"""Metrics of steps and ranks, stalls and traces."""

import json
import math
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dhp.config.devices import known_peaks
from dhp.core.errors import RecordError
from dhp.core.reports import DeviceInfo, Spent, StageReport, StageUsage
from dhp.core.tracing import FORWARD, WAIT, Span
from dhp.observe import ranks as stragglers_module
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
from dhp.observe.ranks import (
    MOST_RANKS,
    STEPS,
    TOGETHER,
    RankLine,
    RankShare,
    RankWriter,
    Stragglers,
    _Peers,
    keep_rank_lines,
    pace,
    rank_line,
    read_rank_lines,
)
from dhp.observe.summary import (
    COMPUTING,
    READING,
    SENDING,
    STALL_WINDOW,
    WAITING,
    DataStall,
    Planned,
    PlanVersusRun,
    peak_flops,
    unknown_devices,
    utilisation,
    who_measures,
)
from dhp.observe.trace import FILE, TraceWriter

FIELDS = (
    "kind, step, epoch, loss, grad_norm, stage_norms, lr, tokens, target_tokens, vision_tokens, samples, images, "
    "cached_images, clips, step_s, data_s, busy_s, comm_s, rank_pace, tokens_per_s, flops, mfu, memory_bytes, "
    "activation_bytes, graphs, comm_bytes, expert_load, dist_ratio, pad_ratio, sp_ratio, skipped_samples, "
    "skipped_steps, sample_digest, preferences"
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


H100 = "NVIDIA H100 80GB HBM3"


def gpu(device_id: str, name: str = H100, number_format: str = "bfloat16") -> DeviceInfo:
    return DeviceInfo("cuda", name, device_id, number_format)


def cpu(device_id: str, measured: float | None = None) -> DeviceInfo:
    return DeviceInfo("cpu", "cpu", device_id, "float32", measured)


def test_parts_that_share_devices_count_them_once() -> None:
    assert peak_flops([gpu("a"), gpu("b")]) == 2 * 989.4e12
    assert peak_flops([gpu("a"), gpu("b"), gpu("a"), gpu("b")]) == 2 * 989.4e12


def test_devices_may_differ_and_count_in_the_fastest_format_used_on_each() -> None:
    mixed = [gpu("a", number_format="float32"), gpu("a"), gpu("b", "NVIDIA A100-SXM4-80GB", "float32")]
    assert peak_flops(mixed) == pytest.approx((989.4 + 19.5) * 1e12)
    assert peak_flops(mixed[::-1]) == peak_flops(mixed)


def test_an_unknown_device_makes_the_peak_unknown_and_is_named() -> None:
    devices = [gpu("a"), gpu("b", "Some GPU"), gpu("c", "Some GPU"), gpu("d", H100, "float64")]
    assert peak_flops(devices) is None
    assert unknown_devices(devices) == [f"{H100} in float64", "Some GPU in bfloat16"]
    assert unknown_devices(devices[:1]) == [] and peak_flops([cpu("m")]) is None


def test_one_rank_of_each_machine_measures_its_cpus() -> None:
    devices = [cpu("m"), cpu("m"), cpu("n"), gpu("a"), cpu("m"), cpu("n")]
    assert who_measures(devices) == [True, False, True, False, False, False]
    assert peak_flops([cpu("m", 5e10), cpu("m"), cpu("n", 7e10), cpu("m"), cpu("n")]) == 12e10


def test_utilisation() -> None:
    assert utilisation({"vision": 3e12, "text": 5e12}, 2.0, 16e12) == 0.25
    assert utilisation({"vision": 3e12, "text": 5e12}, 2.0, None) is None
    assert utilisation({"text": 5e12}, 1.0, 5e12) == 1.0
    assert utilisation({"text": 5e12}, 1.0, 4e12) is None  # a peak that was measured on a busy machine


def test_peaks_are_operations_a_second() -> None:
    peaks = known_peaks()
    assert peaks[H100, "tfloat32"] == 494.7e12 and peaks["NVIDIA H200", "float32"] == 67e12


PLANNED = Planned(
    step_s=1.0,
    busy_s={"vision": 0.3, "text": 0.6},
    comm_s={"vision": 0.05, "text": 0.2},
    tokens=1000,
    memory_bytes={"vision": 100, "text": 200},
)


def after(planned: Planned = PLANNED, **changed: object) -> PlanVersusRun:
    beside = PlanVersusRun(planned)
    taken = {"step_s": 1.0, "data_s": 0.0, "busy_s": {"vision": 0.3, "text": 0.6}, **changed}
    taken.setdefault("comm_s", {"vision": 0.05, "text": 0.2})
    beside.add(StepMetrics(step=1, step_s=9.0))  # a first step warms up
    for step in range(2, 5):
        beside.add(StepMetrics(step=step, **taken))  # type: ignore[arg-type]
    return beside


def test_a_run_as_planned() -> None:
    beside = after()
    assert beside.ratio == 1.0 and beside.differing() is None
    assert beside.line() == "1 s a step, took 1 (+0%)"
    assert beside.summary()["planned"]["busy_s"] == {"vision": 0.3, "text": 0.6}


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"step_s": 1.6, "busy_s": {"vision": 0.3, "text": 1.2}}, f"{COMPUTING} of text"),
        ({"step_s": 1.5, "busy_s": {"vision": 0.8, "text": 0.6}}, f"{COMPUTING} of vision"),
        (
            {"step_s": 1.6, "busy_s": {"vision": 0.3, "text": 1.2}, "comm_s": {"vision": 0.05, "text": 0.8}},
            f"{SENDING} of text",
        ),
        ({"step_s": 1.5, "data_s": 0.5}, READING),
        ({"step_s": 1.5}, WAITING),
        ({"step_s": 0.6, "busy_s": {"vision": 0.3, "text": 0.2}}, f"{COMPUTING} of text"),
    ],
)
def test_the_kind_of_cost_that_differs_is_named(changed: dict[str, object], kind: str) -> None:
    beside = after(**changed)
    assert beside.differing() == kind
    assert f": most by {kind}" in (beside.line() or "")


def test_stages_that_work_at_once_are_not_added() -> None:
    apart = replace(PLANNED, step_s=0.65)
    found = after(apart, step_s=0.65).differences()
    assert found[WAITING] == pytest.approx(0.0)


def test_without_a_plan_nothing_is_said() -> None:
    beside = after(Planned())
    assert beside.line() is None and beside.summary() == {} and beside.differing() is None


def test_the_most_of_memory_counts_and_the_first_step_too() -> None:
    beside = PlanVersusRun(PLANNED)
    beside.add(StepMetrics(step=1, step_s=1.0, memory_bytes={"text": 9}, activation_bytes={"text": 7}))
    beside.add(StepMetrics(step=2, step_s=1.0, memory_bytes={"text": 5}, activation_bytes={"text": 8}))
    found = beside.measured()
    assert found["memory_bytes"] == {"text": 9} and found["activation_bytes"] == {"text": 8}


def told(
    watch: DataStall, steps: int, step_s: float, data_s: float, read_s: float, measure_s: float = 0.0
) -> list[tuple[int, str]]:
    found = [(step, watch.add(step_s, data_s, read_s, measure_s)) for step in range(1, steps + 1)]
    return [(step, text) for step, text in found if text]


def test_the_number_of_workers_that_would_keep_up() -> None:
    # A step trains for 1 s and takes 4 s to read: 5 workers, with room.
    messages = told(DataStall(workers=2, prefetch=2), 30, step_s=2.0, data_s=1.0, read_s=4.0)
    assert messages == [
        (
            STALL_WINDOW + 1,
            "50% of the last 20 steps' time went into waiting for data; data.num_workers=5 would keep up",
        )
    ]


def test_it_is_repeated_more_and_more_seldom() -> None:
    steps = [step for step, _ in told(DataStall(0, 0), 200, 2.0, 1.0, 1.5)]
    assert steps == [21, 42, 84, 168]


def test_two_percent_are_tolerated() -> None:
    assert told(DataStall(0, 0), 100, step_s=1.0, data_s=0.019, read_s=0.9) == []
    assert told(DataStall(0, 0), 100, step_s=1.0, data_s=0.021, read_s=0.9)


def test_the_first_step_does_not_count() -> None:
    watch = DataStall(0, 0)
    assert watch.add(9.0, 8.0, 8.0, 0.0) is None
    assert told(watch, 100, 1.0, 0.0, 0.5) == []


def test_uneven_steps_need_more_read_ahead() -> None:
    ((_, text), *_) = told(DataStall(workers=3, prefetch=3), 25, step_s=1.0, data_s=0.1, read_s=1.2)
    assert text.endswith("steps differ, so set data.prefetch=8")


def test_measuring_that_is_slower_than_the_steps_is_named() -> None:
    """More workers would not help: one process measures."""
    ((_, text), *_) = told(DataStall(2, 2, windows=True), 25, step_s=1.0, data_s=0.4, read_s=0.1, measure_s=0.7)
    assert "one process measures the samples of each window" in text and "inspect data" in text


def test_without_workers_measuring_and_reading_take_turns() -> None:
    ((_, text), *_) = told(DataStall(workers=0, prefetch=2), 25, step_s=1.0, data_s=0.2, read_s=0.5, measure_s=0.5)
    assert text.endswith("data.num_workers=2 would keep up")
    ((_, text), *_) = told(DataStall(workers=1, prefetch=2), 25, step_s=1.0, data_s=0.2, read_s=0.5, measure_s=0.5)
    assert text.endswith("set data.prefetch=6")


def report(rank: int, comm_s: float | None = 0.25, memory: int | None = None) -> StageReport:
    spent = {"forward": Spent(0.123456, comm_s), "backward": Spent(0.5 + rank, comm_s)}
    return StageReport(rank, None, 1.0, {}, memory, {}, spent=spent)


def test_a_line_has_each_rank_and_its_share_of_the_work() -> None:
    line = rank_line(3, {"text": [report(0), report(1)]}, {"text": [300.0, 100.0]}, {"shapes": (4, 9)})
    assert line == RankLine(
        step=3,
        seconds={"text": {"forward": [0.1235, 0.1235], "backward": [0.5, 1.5], "comm": [0.5, 0.5]}},
        work={"text": [1.5, 0.5]},
        memory_bytes={},
        samples={"shapes": (4, 9)},
    )


def test_losses_stand_beside_their_samples_and_are_read_as_they_were(tmp_path: Path) -> None:
    losses = {"shapes": [1.234567, None, float("inf")]}
    line = rank_line(3, {"text": [report(0)]}, {}, {"shapes": (4, 9, 11)}, losses)
    assert line.losses == {"shapes": [1.235, None, float("inf")]}
    writer = RankWriter(tmp_path)
    writer.write(line)
    writer.close()
    text = (tmp_path / "ranks.jsonl").read_text()
    assert '"losses":{"shapes":[1.235,null,"Infinity"]}' in text  # JSON has no word for it
    assert read_rank_lines(tmp_path)[0].losses == line.losses


def test_on_gpus_collectives_are_not_known_and_memory_is() -> None:
    line = rank_line(1, {"text": [report(0, None, 7), report(1, None, 8)]}, {}, {})
    assert set(line.seconds["text"]) == {"forward", "backward"} and line.memory_bytes == {"text": [7, 8]}


def test_kept_bytes_are_of_each_rank_and_of_stages_that_measured_some() -> None:
    measured = replace(report(1), usage=StageUsage(4096, 0, 0, 8, 8, 0.1, 0.2, ()))
    line = rank_line(1, {"text": [report(0), measured], "vision": [report(0)]}, {}, {})
    assert line.activation_bytes == {"text": [None, 4096]}


def test_what_is_written_is_read_and_half_a_line_left_out(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(RankLine(step=step, seconds={"text": {"forward": [1.0]}}))
    writer.close()
    with (tmp_path / "ranks.jsonl").open("a") as file:
        file.write('{"step": 4, "sec')
    assert [line.step for line in read_rank_lines(tmp_path)] == [1, 2, 3]
    keep_rank_lines(tmp_path, 2)
    assert [line.step for line in read_rank_lines(tmp_path)] == [1, 2]


def test_of_many_ranks_not_every_step_is_kept(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    for step in range(1, 7):
        writer.write(RankLine(step=step, seconds={"text": {"forward": [1.0] * (2 * MOST_RANKS + 1)}}))
    writer.close()
    assert [line.step for line in read_rank_lines(tmp_path)] == [3, 6]


def test_a_run_without_the_file_has_no_lines(tmp_path: Path) -> None:
    keep_rank_lines(tmp_path, 5)
    assert read_rank_lines(tmp_path) == [] and not (tmp_path / "ranks.jsonl").exists()


def test_fields_of_a_later_release_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "ranks.jsonl").write_text('{"step": 1, "later": 2}\n')
    assert read_rank_lines(tmp_path) == [RankLine(step=1)]


EVEN = [4.0, 4.0, 4.0, 4.0]


def shares(seconds: list[float], work: list[float], stage: str = "text") -> list[RankShare]:
    return [RankShare(f"{stage} rank {rank}", *own) for rank, own in enumerate(zip(seconds, work, strict=True))]


def feed(stragglers: Stragglers, steps: int, *stages: list[RankShare]) -> list[str]:
    named = {of[0].who.split()[0]: of for of in stages}
    return [message for _ in range(steps) for message in stragglers.add(named)]


def test_a_slow_rank_is_named_once_after_fifty_steps() -> None:
    stragglers, slow = Stragglers(), shares([1.0, 1.0, 1.3, 1.0], EVEN)
    vision = shares([9.0, 9.0], [1.0, 1.0], "vision")  # no peers of the others
    assert feed(stragglers, STEPS - 1, slow, vision) == []
    (message,) = feed(stragglers, 30, slow, vision)
    assert message.startswith("text rank 2 is slow: for 50 steps in a row it has computed for more than 1.2 times")
    assert "(now 1.3 s, they 1 s)" in message and list(stragglers.named) == ["text rank 2"]


def test_of_two_the_slower_is_named() -> None:
    stragglers = Stragglers()
    assert len(feed(stragglers, STEPS, shares([1.0, 1.25], [4.0, 4.0]))) == 1
    assert list(stragglers.named) == ["text rank 1"]


def test_one_step_in_which_it_keeps_up_is_noise_and_some_begin_the_count_anew() -> None:
    stragglers, slow, even = Stragglers(), shares([1.0, 1.0, 1.4, 1.0], EVEN), shares([1.0] * 4, EVEN)
    assert feed(stragglers, STEPS - 2, slow) == feed(stragglers, 1, even) == []
    assert len(feed(stragglers, 1, slow)) == 1
    stragglers = Stragglers()
    assert feed(stragglers, STEPS - 3, slow) == feed(stragglers, TOGETHER, even) == []
    assert feed(stragglers, STEPS - 1, slow) == [] and list(stragglers.named) == []
    assert len(feed(stragglers, TOGETHER, slow)) == 1


def test_a_step_without_work_does_not_count() -> None:
    stragglers, slow = Stragglers(), shares([1.0, 1.3], [4.0, 4.0])
    assert feed(stragglers, STEPS - 1, slow) == []
    assert feed(stragglers, 20, shares([0.1, 0.1], [0.0, 0.0]), shares([1.0, 0.1], [4.0, 0.0])) == []
    assert len(feed(stragglers, 1, slow)) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("fixed_s", [0.0, 0.5, 20.0])
def test_uneven_work_alone_names_nobody(ranks: int, fixed_s: float) -> None:
    """Though a rank has more of it than the others in every step, whatever a rank takes besides."""
    random, stragglers = Random(7), Stragglers()
    for _ in range(4 * STEPS):
        work = [random.uniform(1.0, 3.0) * (1 + 2 * (rank == 0)) for rank in range(ranks)]
        assert stragglers.add({"text": shares([fixed_s + own for own in work], work)}) == []
    for _ in range(
        STEPS + TOGETHER
    ):  # with all this one that takes 1.5 times as long is found, where it holds up the others
        work = [3.0] * ranks
        stragglers.add({"text": shares([(fixed_s + 3.0) * (1.5 if rank == 1 else 1.0) for rank in range(ranks)], work)})
    assert list(stragglers.named) == ["text rank 1"]


def test_the_median_of_the_others_is_the_plain_one_bit_for_bit() -> None:
    random = Random(11)
    for ranks in [*range(2, 12), 100, 101]:
        for values in ([random.random() for _ in range(ranks)], [float(random.randrange(3)) for _ in range(ranks)]):
            peers = _Peers(values)
            plain = [median(values[:own] + values[own + 1 :]) for own in range(ranks)]
            assert [peers.median(own) for own in values] == plain


def test_a_step_of_many_ranks_sorts_their_values_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each rank, which takes a third of a second a step at a thousand."""
    sorts: list[int] = []
    monkeypatch.setattr(stragglers_module, "sorted", lambda of: sorts.append(len(of)) or sorted(of), raising=False)
    monkeypatch.setattr(stragglers_module, "median", None)  # which sorts itself
    assert feed(Stragglers(), 3, shares([1.0] * 64, [4.0] * 64)) == []
    assert sorts == [64] * 6


def test_the_pace_is_seconds_over_what_was_predicted() -> None:
    slow = shares([1.0, 1.0, 2.0, 1.0], EVEN)
    assert pace(slow, 0.5) == {"min": 2.0, "median": 2.0, "max": 4.0, "rank": "text rank 2"}
    assert pace(slow, None) == {"min": 0.8, "median": 0.8, "max": 1.6, "rank": "text rank 2"}  # of the mean rank's
    uneven = shares([1.0, 3.0], [2.0, 6.0])
    assert pace(uneven, None) == {"min": 1.0, "median": 1.0, "max": 1.0, "rank": "text rank 0"}
    assert pace(shares([1.0, 0.0], [2.0, 0.0]), 1.0) == {"min": 0.5, "median": 0.5, "max": 0.5, "rank": "text rank 0"}
    assert pace(shares([1.0, 1.0], [0.0, 0.0]), 1.0) is None and pace(shares([0.0], [1.0]), None) is None


def test_rows_are_named_and_times_are_microseconds_on_one_clock(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 2, "text": 1})
    writer.write("vision", 1, [Span("forward_step 0", FORWARD, 2_000, 5_000)])
    writer.write("text", 0, [Span("for forward_step 0", WAIT, 1_000, 2_000)], offset_ns=10_000)
    writer.close()
    writer.close()
    events = json.loads((tmp_path / FILE).read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "vision 0", (0, 1): "vision 1", (1, 0): "text 0", (2, 0): "steps"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["vision", "text", "run"]
    assert [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"] == [0, 1, -1]
    forward, wait = (e for e in events if e["ph"] == "X")
    assert (forward["pid"], forward["tid"], forward["ts"], forward["dur"]) == (0, 1, 2.0, 3.0)
    assert (wait["pid"], wait["tid"], wait["ts"], wait["dur"], wait["cat"]) == (1, 0, 11.0, 1.0, "wait")


def test_steps_are_marked_above_the_ranks(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1})
    writer.mark_step(4, 1.0, 0.25, 3.5, loss=math.nan)
    writer.mark_step(5, 3.5, 0.0, 4.0, loss=2.0)
    writer.close()
    events = [event for event in json.loads((tmp_path / FILE).read_text()) if event["ph"] != "M"]
    row = {"pid": 1, "tid": 0}
    assert events == [
        {"name": "step 4", "cat": "step", "ph": "X", "ts": 1e6, "dur": 2.5e6, "args": {"loss": "NaN"}, **row},
        {"name": "for data", "cat": "data", "ph": "X", "ts": 1e6, "dur": 0.25e6, **row},
        {"name": "end of step 4", "cat": "step", "ph": "i", "s": "g", "ts": 3.5e6, **row},
        {"name": "step 5", "cat": "step", "ph": "X", "ts": 3.5e6, "dur": 0.5e6, "args": {"loss": 2.0}, **row},
        {"name": "end of step 5", "cat": "step", "ph": "i", "s": "g", "ts": 4e6, **row},
    ]


def test_what_was_written_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1})
    writer.write("vision", 0, [Span("a", FORWARD, 0, 1)])
    text = (tmp_path / FILE).read_text()
    assert json.loads(text + "]")[-1]["name"] == "a"  # viewers read an array without its end
