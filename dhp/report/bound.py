"""Says what bounds a run, and what would help."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dhp.core.axes import AXES, SAMPLES
from dhp.core.kinds import DECODER
from dhp.observe.metrics import StepMetrics
from dhp.observe.ranks import COMM, SAVE, SLOW, RankLine
from dhp.report.run_record import RunRecord

WARM_UP = 2  # steps that do not count: kernels are made ready, and caches filled
DATA, FORWARD, BACKWARD, COLLECTIVE = "data", "forward", "backward", "collective"
WAITING, OPTIMIZER, CHECKPOINT = "waiting for others", "optimizer", "checkpoint"
KINDS = (DATA, FORWARD, BACKWARD, COLLECTIVE, WAITING, OPTIMIZER, CHECKPOINT)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage's ranks, [steps, ranks], in some of the steps. own: in which a rank computed; comm: in
    collectives, waiting for its stage's other ranks among it. apart: the two are measured apart; else, as on GPUs, own
    has both and comm is 0. work: relative to the stage's mean rank; None where it is not known."""

    steps: Sequence[int]
    own: np.ndarray
    comm: np.ndarray
    work: np.ndarray | None
    apart: bool

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which the stage was at work, in the mean."""
        return float((self.own + self.comm).max(axis=1).mean())

    @property
    def exchange_s(self) -> float:
        """Seconds of a step that collectives take themselves: of the rank that waits least for the others in them."""
        return float(self.comm.min(axis=1).mean())

    @property
    def pace(self) -> np.ndarray:
        """[steps, ranks]: seconds over work, relative to the median of the stage's ranks in that step; NaN where a rank
        had no work."""
        work = np.ones_like(self.own) if self.work is None else self.work
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(work > 0, self.own / work, np.nan)
            middle = np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in each])
            return each / middle[:, None]


@dataclass(frozen=True)
class Times:
    """Of the steps that count. step_s, data_s: of each of them. save_s: seconds in which training waited for
    checkpoints, in all. stages: those of which ranks are known."""

    lines: Sequence[RankLine]
    steps: Sequence[StepMetrics]
    step_s: np.ndarray
    data_s: np.ndarray
    save_s: float
    stages: Mapping[str, StageTimes]

    @property
    def mean_s(self) -> float:
        """Of a step, with its share of the checkpoints."""
        return float(self.step_s.mean()) + self.save_s / len(self.step_s)


def times_of(record: RunRecord) -> Times | None:
    """Times of the steps behind the first `WARM_UP` of each attempt; None where none is known."""
    warm = {step + 1 + n for step in _begins(record) for n in range(WARM_UP)}
    timed = [one for one in record.steps if one.step_s is not None]
    steps = [one for one in timed if one.step not in warm] or timed
    if not steps:
        return None
    known = {one.step for one in steps}
    lines = [line for line in record.ranks if line.step in known]
    # Of the newest attempt's, and but for the last step's: a checkpoint at the end is one in a run, however long.
    waits = {one.step: one.seconds or 0.0 for one in record.events if one.event == SAVE and one.step in known}
    saved = sum(seconds for step, seconds in waits.items() if step != record.steps[-1].step)
    step_s, data_s = (np.array([getattr(one, name) or 0.0 for one in steps]) for name in ("step_s", "data_s"))
    return Times(lines, steps, step_s, data_s, saved, _stages(lines))


def _begins(record: RunRecord) -> list[int]:
    return [0, *(one.step for one in record.events if one.event == "start")]


def _stages(lines: Sequence[RankLine]) -> dict[str, StageTimes]:
    found: dict[str, StageTimes] = {}
    if not lines:
        return found
    for name in lines[-1].seconds:
        ranks = len(next(iter(lines[-1].seconds[name].values()), ()))
        of = [line for line in lines if _is_of(line.seconds.get(name, {}), ranks)]  # in the last attempt's layout
        if not ranks or not of:
            continue
        own = np.array([
            np.sum([value for kind, value in line.seconds[name].items() if kind != COMM], axis=0) for line in of
        ])  # fmt: skip
        comm = np.array([line.seconds[name].get(COMM, [0.0] * ranks) for line in of])
        work = [line.work.get(name) for line in of]
        known = None if any(one is None or len(one) != ranks for one in work) else np.array(work, dtype=float)
        apart = all(COMM in line.seconds[name] for line in of)
        found[name] = StageTimes([line.step for line in of], own, comm, known, apart)
    return found


def _is_of(seconds: Mapping[str, Sequence[float]], ranks: int) -> bool:
    """Whether something that so many ranks did was measured."""
    return set(seconds) - {COMM} != set() and all(len(of) == ranks for of in seconds.values())


def split_by_rank(times: Times) -> dict[str, dict[str, float]]:
    """Seconds of a mean step by rank and kind (`KINDS`), which add up to the step; what is left is waiting."""
    found: dict[str, dict[str, float]] = {}
    step_s, data_s = float(times.step_s.mean()), float(times.data_s.mean())
    for name in times.stages:
        known = set(times.stages[name].steps)
        lines = [line.seconds[name] for line in times.lines if line.step in known]
        for rank in range(times.stages[name].own.shape[1]):
            spent = {kind: float(np.mean([of.get(kind, [0.0] * (rank + 1))[rank] for of in lines])) for kind in _RANKS}
            own = {_RANKS[kind]: seconds for kind, seconds in spent.items()}
            waiting = max(0.0, step_s - data_s - sum(own.values()))
            row = {DATA: data_s, **own, WAITING: waiting, CHECKPOINT: times.save_s / len(times.step_s)}
            found[f"{name} rank {rank}"] = {kind: row[kind] for kind in KINDS}
    return found


_RANKS = {"forward": FORWARD, "backward": BACKWARD, COMM: COLLECTIVE, "optimizer": OPTIMIZER}  # of RankLine → of KINDS


def pace_rows(times: Times) -> tuple[list[str], list[int], np.ndarray]:
    """Names of all ranks, the steps, and each rank's seconds over its work relative to its stage's median, [ranks,
    steps]."""
    names, rows, steps = [], [], [line.step for line in times.lines]
    at = {step: number for number, step in enumerate(steps)}
    for name, stage in times.stages.items():
        pace = np.full((len(steps), stage.own.shape[1]), np.nan)
        pace[[at[step] for step in stage.steps]] = stage.pace
        names += [f"{name} rank {rank}" for rank in range(pace.shape[1])]
        rows.append(pace.T)
    return names, steps, np.concatenate(rows) if rows else np.zeros((0, len(steps)))


HEALTHY = 0.1  # of a step: what could be gained less than this bounds no run
LONG = 1.5  # times the median of the steps' operations and seconds: the step of a long sample
NEEDED = 3  # steps that must be known


@dataclass(frozen=True)
class Cause:
    """One thing that takes time. kind: of it, a word. share: of a step (0 to 1) that would go with it. what: takes the
    time; change: what would help. Each is part of a sentence."""

    kind: str
    share: float
    what: str
    change: str

    @property
    def faster(self) -> float:
        """How many times as fast a step would be."""
        return 1 / max(1e-9, 1 - self.share)


def find_causes(record: RunRecord, times: Times) -> list[Cause]:
    """All that is known to take time, the largest share first."""
    if len(times.step_s) < NEEDED:
        return []
    found = [*_reading(record, times), *_saving(record, times), *_long_samples(record, times)]
    for name, stage in times.stages.items():
        found += [*_slow_rank(name, stage, times), *_uneven(record, name, stage, times)]
        found += _exchanging(record, name, stage, times)
    found += _heavy(record, times)
    return sorted((cause for cause in found if cause.share > 0), key=lambda cause: -cause.share)


def sentence(record: RunRecord, times: Times | None) -> str:
    """What bounds this run, what to change, and the gain that is expected of it."""
    if times is None or len(times.step_s) < NEEDED:
        return f"Too few steps to say what bounds this run: {NEEDED} are needed behind those that warm it up."
    causes = find_causes(record, times)
    if not causes or causes[0].share < HEALTHY:
        rest = f" The largest share that could go is {causes[0].share:.0%}: {causes[0].what}." if causes else ""
        unknown = _not_judged(times)
        if unknown:
            return f"Nothing that was measured takes more than {HEALTHY:.0%} of this run's time. {unknown}{rest}"
        healthy = f"This run is healthy: computing takes its time, and nothing else more than {HEALTHY:.0%} of it."
        return f"{healthy}{_busiest_part(record, times)}{rest}"
    first = causes[0]
    return (
        f"This run is bound by {first.what}: {first.share:.0%} of a step. {first.change}: a step would be "
        f"about {first.faster:.2f} times as fast."
    )


def _busiest_part(record: RunRecord, times: Times) -> str:
    """Which part computes most of the step, where its devices are those of the others, as a sentence; "": none."""
    own = _compute_seconds(times)
    heavy = max(own, key=lambda name: own[name], default="")
    share = own.get(heavy, 0.0) / times.mean_s
    if len(own) < 2 or share <= 0.5 or not _shared(record.config, times):
        return ""
    return f" {heavy} computes most of the step ({min(share, 1.0):.0%}): that is the model's own work."


def _compute_seconds(times: Times) -> dict[str, float]:
    """Of a step, what the rank with most of it computes, by stage."""
    return {name: float(stage.own.max(axis=1).mean()) for name, stage in times.stages.items()}


def _shared(config: Mapping[str, Any], times: Times) -> bool:
    """Whether every stage has the devices of the others. Busy seconds of such stages may add up to more than a step:
    processes compete for a device, or overlap on it."""
    whole = len({name.partition(".")[0] for name in times.stages}) == len(times.stages)
    return config.get("cluster.collocate", True) and not config.get("cluster.chain") and whole


def _not_judged(times: Times) -> str:
    """What cannot be known of a run, as a sentence; "": nothing."""
    if not times.stages:
        return "What its ranks did is not known (there is no ranks.jsonl), so neither are slow ranks and links."
    merged = [name for name, stage in times.stages.items() if not stage.apart]
    if not merged:
        return ""
    return (
        f"Of {' and '.join(merged)} collectives are not measured apart from computing, as on GPUs: slow ranks and slow "
        "links are not judged."
    )


def _reading(record: RunRecord, times: Times) -> Iterator[Cause]:
    share = float(times.data_s.sum()) / (times.mean_s * len(times.step_s))
    workers = record.config.get("data.num_workers", 0)
    yield Cause(
        "data",
        share,
        "waiting for data",
        f"Set data.num_workers higher than {workers}, or data.prefetch, or bring the files nearer",
    )


def _saving(record: RunRecord, times: Times) -> Iterator[Cause]:
    keys = ("save_steps", "save_minutes", "save_epochs")
    every = next((key for key in keys if record.config.get(f"training.{key}")), "save_steps")
    now = record.config.get(f"training.{every}")
    behind = "" if record.config.get("training.save_in_background", True) else ", or training.save_in_background=true"
    share = times.save_s / (times.mean_s * len(times.step_s))
    yield Cause("save", share, "waiting for checkpoints", f"Save less often than training.{every}={now}{behind}")


def _long_samples(record: RunRecord, times: Times) -> Iterator[Cause]:
    """Steps that take much longer because they have much more to compute."""
    operations = np.array([sum((one.flops or {}).values()) for one in times.steps], dtype=float)
    if not operations.all():
        return
    usual_s, usual = float(np.median(times.step_s)), float(np.median(operations))
    long = (times.step_s > LONG * usual_s) & (operations > LONG * usual)
    if not long.any() or long.mean() > 0.5:
        return
    share = float((times.step_s[long] - usual_s).sum()) / (times.mean_s * len(times.step_s))
    worst = times.steps[int(np.argmax(np.where(long, times.step_s, 0.0)))]
    yield Cause(
        "long sample",
        share,
        f"a few long samples (in {int(long.sum())} of {len(long)} steps, step {worst.step} the longest)",
        "Share their rows out (text.ulysses, text.ring), shorten them (data.max_tokens, data.max_pixels) or leave them "
        "out",
    )


def _slow_rank(name: str, stage: StageTimes, times: Times) -> Iterator[Cause]:
    """A rank that takes longer than its peers for as much work."""
    if stage.own.shape[1] < 2 or not stage.apart:
        return
    pace = np.array([_median(column) for column in stage.pace.T])
    slow = int(np.nanargmax(pace)) if np.isfinite(pace).any() else 0
    others = np.delete(pace, slow)
    ratio = pace[slow] / _median(others)
    if not ratio > SLOW:
        return
    lost = np.maximum(0.0, stage.own[:, slow] * (1 - 1 / ratio))
    yield Cause(
        "slow rank",
        float(lost.mean()) / times.mean_s,
        f"{name} rank {slow}, which takes {ratio:.2f} times as long as its peers for as much work",
        f"See what else runs on its device (logs/{name}-{slow}.log begins with its address), or run without it",
    )


def _uneven(record: RunRecord, name: str, stage: StageTimes, times: Times) -> Iterator[Cause]:
    """Ranks that have more work than others, which wait for them."""
    if stage.work is None or stage.work.shape[1] < 2:
        return
    most = stage.work.max(axis=1) / np.maximum(stage.work.mean(axis=1), 1e-9)
    if stage.apart:
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(stage.work > 0, stage.own / stage.work, np.nan)
        lost = np.array([_median(row) for row in each]) * (most - 1)
    else:  # all ranks wait for the one with most work
        lost = stage.own.max(axis=1) * (1 - 1 / np.maximum(most, 1))
    share = float(np.nan_to_num(lost).mean()) / times.mean_s
    balance = record.config.get("data.balance")
    part = name.partition(".")[0]
    change = (
        f"Set data.balance=balanced (it is {balance})"
        if balance in (None, "none", "random")
        else f"A sample is longer than an even share: share it out ({part}.ulysses, {part}.ring), or give steps more "
        "samples (training.batch_size)"
    )
    if part != DECODER.part and record.config.get("training.vision_batch", 1) == 1 and _several(record.config):
        change = "Assign the pictures of several micro-batches at once (training.vision_batch=4, null: the step's)"
    yield Cause(
        "uneven work", share, f"uneven work of the ranks of {name} (the most {most.mean():.2f} times the mean)", change
    )


def _several(config: Mapping[str, Any]) -> bool:
    """Whether a step has several micro-batches, as far as a record says."""
    rows, replicas = config.get("training.micro_batch_size"), config.get("text.data") or 1
    return bool(rows) and config.get("training.batch_size", 0) > rows * replicas


def _exchanging(record: RunRecord, name: str, stage: StageTimes, times: Times) -> Iterator[Cause]:
    if not stage.apart:
        return
    part = name.partition(".")[0]
    degrees = {axis.name: record.config.get(f"{part}.{axis.name}") for axis in AXES if axis.divides != SAMPLES}
    cut = " and ".join(
        f"{part}.{key} is {value}" for key, value in degrees.items() if isinstance(value, int) and value > 1
    )
    change = (
        f"{cut}: try fewer ranks there, and more replicas with {part}.zero_stage"
        if cut
        else "Take larger micro-batches"
    )
    yield Cause(
        "link",
        stage.exchange_s / times.mean_s,
        f"what the ranks of {name} send to one another",
        change + ", or ask dhp plan",
    )


def _heavy(record: RunRecord, times: Times) -> Iterator[Cause]:
    """A part that has fewer devices than the run, or more than its share of the time where parts work at once."""
    ranks = {name: stage.own.shape[1] for name, stage in times.stages.items()}
    busy = {name: stage.busy_s for name, stage in times.stages.items()}
    own = _compute_seconds(times)
    if len(busy) < 2:
        return
    together = sum(busy.values()) > 1.05 * float(times.step_s.mean()) and not _shared(record.config, times)
    heavy = max(own, key=lambda name: own[name])
    part = heavy.partition(".")[0]
    if together or record.config.get("cluster.collocate") is False:
        yield from _apart(heavy, busy, ranks, times, record.config)
    elif ranks[heavy] < max(ranks.values()):
        devices = max(ranks.values())
        yield Cause(
            "heavy part",
            own[heavy] * (1 - ranks[heavy] / devices) / times.mean_s,
            f"{heavy}, which computes on {ranks[heavy]} of {devices} devices while the others wait",
            f"Give it all: {part}.num_actors={devices}",
        )


def _apart(
    heavy: str, busy: Mapping[str, float], ranks: Mapping[str, int], times: Times, config: Mapping[str, Any]
) -> Iterator[Cause]:
    """Stages with devices of their own wait for the slowest of them."""
    even = sum(busy[name] * ranks[name] for name in busy) / sum(ranks.values())
    share = (busy[heavy] - even) / times.mean_s
    pipelined = any(name.partition(".")[0] == heavy.partition(".")[0] for name in busy if name != heavy)
    share_them = ", or share them (cluster.collocate=true)" if config.get("cluster.collocate") is False else ""
    change = (
        "Cut the stages anew (text.partition=exact, or dhp plan)"
        if pipelined
        else f"Move devices to it ({heavy.partition('.')[0]}.num_actors){share_them}"
    )
    yield Cause("heavy part", share, f"{heavy}, for which the others wait", change)


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
