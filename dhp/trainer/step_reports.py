"""Merges reports of ranks into a step's metrics and records."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dhp.cluster.cluster import ActorGroup
from dhp.config.command_line import to_yaml
from dhp.config.devices import DEVICES
from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.core.batch import StepInfo
from dhp.core.dispatch import PerRank, per_rank
from dhp.core.errors import ConfigError
from dhp.core.graph import StageGraph
from dhp.core.reports import DeviceInfo, SampleSums, StageReport
from dhp.core.text import one_line
from dhp.core.tracing import Span
from dhp.observe.logger_process import RunInfo
from dhp.observe.loggers import Loggers
from dhp.observe.metrics import StepMetrics
from dhp.observe.ranks import SKIPPED, Pace, RankShare, pace, rank_line
from dhp.observe.recorder import Recorder
from dhp.observe.summary import Planned, peak_flops, unknown_devices, utilisation, who_measures
from dhp.observe.terminal import kernel_lines
from dhp.observe.trace import TraceWriter
from dhp.report.page import FILE, write_report
from dhp.step.stages import Stages
from dhp.trainer.recomputing import activation_bytes


def mean_losses(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages
) -> dict[str, list[float | None]]:
    """By dataset, parallel to `StepInfo.rows`, the mean loss of each sample's target tokens, nats; None for one without
    any, or left out. Of a row that the step has twice, the mean of both. Empty where ranks report none."""
    sums: dict[Place, SampleSum] = {}
    for name, of in reports.items():
        shards = [report.samples for report in stages[name].leaders(of)]
        sums |= add_by_sample(info, shards, stages[name].spec.degrees.sequence)
    if not sums:
        return {}
    nothing = SampleSum(0.0, 0)
    found = {name: [sums.get((name, row), nothing) for row in rows] for name, rows in info.rows.items()}
    return {name: [one.total / one.targets if one.targets else None for one in of] for name, of in found.items()}


Place = tuple[str, int]  # of a sample: its dataset, and its row there


class SampleSum(NamedTuple):
    """Over a sample's target tokens."""

    total: float
    targets: int


def add_by_sample(info: StepInfo, shards: Sequence[SampleSums | None], sharing: int) -> dict[Place, SampleSum]:
    """What the shards of a stage have of each sample, added; of one that the step has twice, both together. sharing:
    shards that share a row."""
    found: dict[Place, SampleSum] = {}
    for shard, of_shard in enumerate(shards):
        if of_shard is None:
            continue
        for micro_batch, sums in of_shard.sums.items():
            places, counts = info.order[micro_batch][shard // sharing], of_shard.targets[micro_batch]
            for place, total, count in zip(places, sums, counts, strict=True):
                before = found.get(place, SampleSum(0.0, 0))
                found[place] = SampleSum(before.total + total, before.targets + count)
    return found


MOST_STEPS = 20_000  # of which a page is made at the end of a run: of more, reading them would hold it up
MOST_BYTES = 2**28  # of what it is made of
SKIPPED_SHOWN = 20  # messages of skipped samples in one step


def record_step(
    recorder: Recorder,
    metrics: StepMetrics,
    info: StepInfo,
    reports: Mapping[str, Sequence[StageReport]],
    stages: Stages,
) -> None:
    """Record a step that has ended: its numbers, its ranks, its bad samples."""
    for line in left_out(info):
        recorder.say(line)
    recorder.record(metrics)
    losses = mean_losses(info, reports, stages)
    recorder.record_ranks(rank_line(metrics.step, reports, _work(info, reports, stages), info.rows, losses))
    for message in info.skipped[:SKIPPED_SHOWN]:
        recorder.note(SKIPPED, metrics.step, text=message)
    recorder.compare_ranks(rank_shares(info, reports, stages))


def write_page(run_dir: Path) -> str | None:
    """Write the report on a run that ends: where it is, or why there is none; None for a run of very many steps. A run
    never fails of it."""
    with suppress(OSError):
        sizes = sum((run_dir / name).stat().st_size for name in ("metrics.jsonl", "ranks.jsonl"))
        with (run_dir / "metrics.jsonl").open("rb") as file:
            if sizes > MOST_BYTES or sum(1 for _ in file) > MOST_STEPS:
                return None
    try:
        return str(write_report([run_dir], run_dir / FILE))
    except Exception as error:  # whatever drawing meets, what was trained is whole
        return f"none ({type(error).__name__}: {one_line(str(error))})"


def rank_shares(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages
) -> dict[str, list[RankShare]]:
    """By stage, how long each rank computed for which share of the work; without stages where that is not known, as on
    GPUs. Tensor ranks of a shard have the same work."""
    found, known = {}, _work(info, reports, stages)
    for name, of in reports.items():
        timed = [(one, one.busy_s - one.comm_s) for one in of if one.busy_s is not None and one.comm_s is not None]
        if timed and len(timed) == len(of) and name in known:
            found[name] = [
                RankShare(f"{name} rank {one.rank}", max(0.0, own_s), work)
                for (one, own_s), work in zip(timed, known[name], strict=True)
            ]
    return found


def _work(info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages) -> dict[str, list[float]]:
    """By stage, what each rank has to compute. Tensor ranks of a shard have the same."""
    found = {}
    for name, of in reports.items():
        degree, work = stages[name].spec.degrees.tensor, info.work.get(stages[name].spec.part, ())
        if len(of) == len(work) * degree:
            found[name] = [work[one.rank // degree] for one in of]
    return found


def paces(shares: Mapping[str, Sequence[RankShare]], planned: Planned) -> dict[str, Pace] | None:
    """Of each stage, how long its ranks took for their work: see `dhp.observe.ranks.pace`. None: not known."""
    found = {}
    for name, of_stage in shares.items():
        busy_s = planned.busy_s.get(name)
        own_s = None if busy_s is None else busy_s - planned.comm_s.get(name, 0.0)
        found[name] = pace(of_stage, own_s)
    return {name: one for name, one in found.items() if one is not None} or None


def left_out(info: StepInfo) -> Iterator[str]:
    """Lines about a step's bad samples."""
    yield from (f"skipped: {message}" for message in info.skipped[:SKIPPED_SHOWN])
    more = len(info.skipped) - SKIPPED_SHOWN
    if more > 0:
        yield f"skipped: {more} more; `python -m dhp inspect data` lists them"


GIVEN_UP = (
    "{stage}: torch.compile gave a function up behind as many graphs as it makes of one; it runs uncompiled from "
    "here on, and slower. TORCH_LOGS=recompiles says what varies"
)
NO_MFU = "mfu is left out where it would be above 100%: the machine was busy when the peak of its devices was measured"


@dataclass(frozen=True)
class Timing:
    """step_s: from the end of the step before to this one's; data_s: of it, until the data were there. peak_flops: of
    all devices together, operations a second; None where it is not known. planned: of the run."""

    step_s: float
    data_s: float
    peak_flops: float | None
    planned: Planned = Planned()


def step_metrics(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], timing: Timing, stages: Stages, *skipped: int
) -> StepMetrics:
    """The line of metrics.jsonl. reports: by stage, of every rank; skipped: samples left out since the run began, and
    steps that updated nothing."""
    samples, steps = skipped
    shares = [r.loss for name, of in reports.items() for r in stages[name].leaders(of) if r.loss is not None]
    memory = {name: [r.memory_bytes for r in of if r.memory_bytes is not None] for name, of in reports.items()}
    return StepMetrics(
        step=info.step + 1,
        epoch=info.done,
        loss=sum(shares) if info.total_weight else None,
        grad_norm=next(iter(reports.values()))[0].grad_norm,
        stage_norms={name: norm for name, of in reports.items() if (norm := of[0].stage_norm) is not None} or None,
        lr={group: rate for of in reports.values() for group, rate in of[0].lr.items()},
        tokens=info.tokens,
        target_tokens=info.target_tokens,
        vision_tokens=info.vision_tokens,
        samples=info.samples,
        images=info.images,
        cached_images=info.cached_images,
        clips=info.clips,
        step_s=timing.step_s,
        data_s=timing.data_s,
        busy_s=_mean(reports, "busy_s"),
        comm_s=_mean(reports, "comm_s"),
        rank_pace=paces(rank_shares(info, reports, stages), timing.planned),
        tokens_per_s=info.tokens / timing.step_s,
        flops=info.flops,
        mfu=utilisation(info.flops, timing.step_s, timing.peak_flops),
        memory_bytes={name: max(peaks) for name, peaks in memory.items()} if all(memory.values()) else None,
        activation_bytes=activation_bytes(reports),
        graphs=_graphs(reports),
        comm_bytes={name: _summed(r.sent_bytes for r in of) for name, of in reports.items()},
        expert_load=expert_loads(reports, stages),
        dist_ratio=info.dist_ratio,
        pad_ratio=1.0 - info.tokens / info.padded_tokens,
        sp_ratio=info.sp_ratio,
        skipped_samples=samples,
        skipped_steps=steps,
        sample_digest=info.sample_digest or None,
    )


def expert_loads(reports: Mapping[str, Sequence[StageReport]], stages: Stages) -> dict[str, dict[str, float]] | None:
    """By layer the rows of the expert with most, and of the ranks' share of experts with most, over the mean. None: no
    rank reports any."""
    hottest: dict[str, float] = {}
    busiest: dict[str, float] = {}
    for name, of in reports.items():
        sharing = stages[name].spec.degrees.expert
        for layer in dict.fromkeys(layer for one in of for layer in one.expert_rows):
            rows = [sum(each) for each in zip(*(one.expert_rows[layer] for one in of if layer in one.expert_rows))]
            held = len(rows) // sharing
            shares = [sum(rows[first : first + held]) for first in range(0, len(rows), held)]
            hottest[layer] = max(rows) * len(rows) / max(1, sum(rows))
            busiest |= {layer: max(shares) * sharing / max(1, sum(rows))} if sharing > 1 else {}
    found = {"hottest": hottest, "busiest": busiest}
    return {kind: by_layer for kind, by_layer in found.items() if by_layer} or None


def notes(reports: Mapping[str, Sequence[StageReport]], metrics: StepMetrics, timing: Timing) -> Iterator[str]:
    """Notes of the step, each printed once in a run: by its ranks, and why it has no mfu where there is a peak."""
    yield from (note for of in reports.values() for report in of for note in report.notes)
    yield from (GIVEN_UP.format(stage=name) for name, of in (metrics.graphs or {}).items() if of["given_up"])
    if metrics.mfu is None and timing.peak_flops is not None:
        yield NO_MFU


def _mean(reports: Mapping[str, Sequence[StageReport]], name: str) -> dict[str, float] | None:
    """Mean of each stage's ranks of a field of their reports; None where it is null for a rank."""
    known: dict[str, list[float]] = {
        stage: [value for report in of if (value := getattr(report, name)) is not None] for stage, of in reports.items()
    }
    return {name: sum(of) / len(of) for name, of in known.items()} if all(known.values()) else None


def _graphs(reports: Mapping[str, Sequence[StageReport]]) -> dict[str, dict[str, int]] | None:
    """By stage, of the rank with most: what torch.compile has made, and given up."""
    counts = {
        name: [max(of) for of in zip(*(report.graphs for report in of_stage))] for name, of_stage in reports.items()
    }
    return {name: {"made": made, "given_up": lost} for name, (made, lost) in counts.items() if made} or None


def _summed(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, of_ranks), Counter()).items()))


def find_peak(
    groups: Mapping[str, ActorGroup], timeout_s: float, say: Callable[[str], None]
) -> tuple[float | None, list[DeviceInfo]]:
    """Operations a second of all devices together, and the device of each rank. None, and a line that says so, when one
    of them is not known."""

    def ask(wanted: Mapping[str, PerRank | bool]) -> list[DeviceInfo]:
        verb = "describe_device"
        return [d for name, group in groups.items() for d in group.execute_all(verb, wanted[name], timeout_s=timeout_s)]

    devices = ask(dict.fromkeys(groups, False))
    measuring = iter(who_measures(devices))
    if any(who_measures(devices)):
        say("timing how fast the CPUs multiply, for mfu")
        wanted = {name: per_rank([next(measuring) for _ in range(group.size)]) for name, group in groups.items()}
        devices = ask(wanted)
    peak = peak_flops(devices)
    if peak is None:
        unknown = ", ".join(unknown_devices(devices))
        say(
            f"mfu is not reported: no peak of {unknown} is known. Add it to configs/{DEVICES}, from the vendor's data "
            "sheet"
        )
    return peak, devices


def name_kernels(groups: Mapping[str, ActorGroup], timeout_s: float) -> list[str]:
    """A line a stage: which kernel serves each kind of layer there, by its first rank, and what would be faster."""
    return [
        line
        for name, group in groups.items()
        for line in kernel_lines(name, group.execute_all("describe_kernels", timeout_s=timeout_s)[0])
    ]


def device_memory(groups: Mapping[str, ActorGroup], timeout_s: float) -> int | None:
    """Bytes of the device that has least. None where one is no GPU: a host's memory is shared with whatever else runs
    there."""
    found = [
        device
        for group in groups.values()
        for device in group.execute_all("describe_device", False, timeout_s=timeout_s)
    ]
    sizes = [device.memory_bytes for device in found]
    return None if None in sizes else min(size for size in sizes if size is not None)


def compile_notes(config: Config) -> list[str]:
    """A line for each part that is compiled but for the matrices that have adapters with dropout."""
    return [
        f"{name}.compile=true does not compile matrices with adapters where {name}.lora.dropout={part.lora.dropout}: "
        f"what is dropped is drawn by code that is not compiled. Set {name}.lora.dropout=0 to compile them"
        for name, part in parts(config).items()
        if part.compile and part.lora.rank and part.lora.dropout
    ]


def overlap_warning(config: Config, graph: StageGraph, device: str) -> str | None:
    """A warning where stages on one GPU go on at once and both exchange: each spins on parts of the GPU that the
    other one computes on. The results are the same."""
    schedule = config.training.schedule
    sharing = device == "cuda" and graph.sharing() > 1 and schedule != "sequential"
    if not sharing or sum(stage.degrees.world > 1 for stage in graph.stages) < 2:
        return None
    return (
        f"warning: training.schedule={schedule} with cluster.collocate=true runs collectives of several stages "
        "concurrently on the same GPUs; they slow each other down. Compare with training.schedule=sequential, or with "
        "cluster.collocate=false"
    )


Refs = Mapping[str, list[Any]]  # by group, for each rank the ref of its spans


class SpanSource(Protocol):
    """A group of ranks that keep spans: both parts' actors and the dataset actor."""

    def take_spans_async(self, keep: bool = True) -> list[Any]:
        """For each rank, the ref of its spans since the last time; keep: false forgets them."""

    def clock_offsets(self, timeout_s: float) -> list[int]:
        """What to add to each rank's clock, nanoseconds."""


class Tracing:
    """One run's tracing, from the moment when all ranks are there."""

    def __init__(
        self, groups: Mapping[str, SpanSource], writer: TraceWriter, timeout_s: float, steps: range | None = None
    ):
        """steps: that are traced, from 1; None: all."""
        self._groups, self._writer, self._steps = groups, writer, steps
        self._offsets = {name: group.clock_offsets(timeout_s) for name, group in groups.items()}

    def submit(self, step: int) -> Refs:
        """Ask every rank for what it will have done after all calls submitted so far, those of `step` (from 1) the
        last. Of steps that are not traced it is forgotten."""
        keep = self._steps is None or step in self._steps
        return {name: group.take_spans_async(keep) for name, group in self._groups.items()}

    def mark_step(self, metrics: StepMetrics, begun_s: float, ended_s: float) -> None:
        """Write when a step began and ended, by this process's clock."""
        if self._steps is None or metrics.step in self._steps:
            self._writer.mark_step(metrics.step, begun_s, metrics.data_s or 0.0, ended_s, loss=metrics.loss)

    def write(self, spans: Mapping[str, list[list[Span]]]) -> None:
        """Write what the ranks answered: by group, the spans of each rank."""
        for name, of_ranks in spans.items():
            for rank, (found, offset) in enumerate(zip(of_ranks, self._offsets[name], strict=True)):
                self._writer.write(name, rank, found, offset)


def make_loggers(config: Config, run_dir: Path, resumed: bool) -> Loggers | None:
    """The loggers of training.loggers; None: there are none. resumed: the run goes on where one in run_dir stopped."""
    if not config.training.loggers:
        return None
    about = RunInfo(
        name=run_dir.absolute().name,
        project=config.training.logger_project or config.name,
        run_dir=str(run_dir.absolute()),
        config=to_yaml(config),
        resumed=resumed,
    )
    return Loggers(config.training.loggers, about)


def require_loggers(config: Config) -> None:
    """Raises ConfigError for a logger whose package is not installed."""
    if not config.training.loggers:
        return
    from dhp.parallel.device import find_extra

    for name in config.training.loggers:
        if find_extra(name).version is None:
            raise ConfigError(
                f"training.loggers={config.training.loggers}: {name} is not installed here, where the run's loop runs. "
                f"Install it into this environment with `pip install {name}`, or leave it out: metrics.jsonl and "
                "TensorBoard's files are always written"
            )
