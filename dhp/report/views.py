"""The charts of one run, made of its record."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dhp.observe.metrics import EvalMetrics, StepMetrics
from dhp.report.bound import Times, pace_rows, split_by_rank
from dhp.report.charts import Drawing, Line, heat_map, line_chart, stacked_bars
from dhp.report.run_record import RunRecord

MOST_BARS = 32  # ranks that have a bar: of more, those of each stage with the least and the most of it
GIB, MIB = 2**30, 2**20


def time_views(times: Times) -> Iterator[Drawing]:
    """Where a step's time went: by rank, and over work by rank and step."""
    rows = split_by_rank(times)
    if rows:
        yield stacked_bars("step_by_rank", "A mean step by rank", _some(rows), "seconds")
    names, steps, pace = pace_rows(times)
    if names and steps:
        unit = "seconds over predicted work, of the stage's median rank"
        yield heat_map("pace", "Each rank's time over its work, step by step", names, steps, pace, unit)


def _some(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    if len(rows) <= MOST_BARS:
        return rows
    names = list(rows)
    return {name: rows[name] for name in names[: MOST_BARS // 2] + names[-MOST_BARS // 2 :]}


def memory_views(record: RunRecord) -> Iterator[Drawing]:
    """Memory by stage over steps, and by kind as planned."""
    planned = (record.summary or {}).get("planned") or {}
    for key, title in (("memory_bytes", "Device memory"), ("activation_bytes", "Memory of activations")):
        lines = _by_name(record.steps, key, GIB)
        if lines:
            first, last = record.steps[0].step, record.steps[-1].step
            expected = [
                Line(f"{stage}, planned", (first, last), (value / GIB, value / GIB), dashed=True)
                for stage, value in planned.get(key, {}).items()
            ]
            yield line_chart(key, f"{title}, of the fullest rank", [*lines, *expected], "GiB", zero=True)
    kinds = planned.get("memory_kinds")
    if kinds:
        rows = {f"{stage}, planned": {kind: value / GIB for kind, value in of.items()} for stage, of in kinds.items()}
        for stage, most in ((record.summary or {}).get("measured") or {}).get("memory_bytes", {}).items():
            rows[f"{stage}, measured"] = {"all kinds": most / GIB}
        yield stacked_bars("memory_by_kind", "Memory of the fullest rank at its fullest moment", rows, "GiB")


def learning_views(record: RunRecord, links: Mapping[int, str]) -> Iterator[Drawing]:
    """Loss, held-out loss and accuracy, gradient norm, learning rates. links: where points of steps lead to."""
    steps = record.steps
    lines = [Line("loss", *_series(steps, "loss"), links=links)]
    names = dict.fromkeys(one.dataset for one in record.evaluations)
    for name in names:
        found = [one for one in record.evaluations if one.dataset == name and one.loss is not None]
        label = f"held out: {name}" if name else "held out: all"
        lines.append(Line(label, [one.step for one in found], [one.loss or 0.0 for one in found]))
    yield line_chart("loss", "Loss", lines, record.loss_unit)
    accuracy = [
        Line(name or "all", [one.step for one in of], [one.accuracy or 0.0 for one in of])
        for name in names
        if (of := [one for one in record.evaluations if one.dataset == name and one.accuracy is not None])
    ]
    if accuracy:
        title = "Held-out preferences that are won" if record.compares else "Held-out tokens that are the likeliest"
        yield line_chart("accuracy", title, accuracy, "share of 1", zero=True)
    if record.compares:
        yield line_chart("margin", "What the better answers gain beyond the worse ones", _margins(record), "nats")
    norms = [Line("all together", *_series(steps, "grad_norm"), links=links), *_by_name(steps, "stage_norms", 1.0)]
    yield line_chart("grad_norm", "Norm of the gradient before clipping", norms, record.loss_unit, zero=True)
    rates = _by_name(steps, "lr", 1.0)
    if rates:
        yield line_chart("lr", "Learning rates", rates, "factor", zero=True)


def _margins(record: RunRecord) -> list[Line]:
    """Of each step, and of each held-out dataset."""
    found: dict[str, list[tuple[int, float]]] = {}
    for one in (*record.steps, *record.evaluations):
        if one.preferences:
            name = f"held out: {one.dataset or 'all'}" if isinstance(one, EvalMetrics) else "margin"
            found.setdefault(name, []).append((one.step, one.preferences["margin"]))
    return [Line(name, [step for step, _ in of], [value for _, value in of]) for name, of in found.items()]


def load_views(record: RunRecord) -> Iterator[Drawing]:
    """Tokens, padding, balance, speed, and what ranks send."""
    steps = record.steps
    tokens = [Line("tokens", *_series(steps, "tokens")), Line("patches", *_series(steps, "vision_tokens"))]
    tokens.append(Line("learned tokens", *_series(steps, "target_tokens")))
    yield line_chart(
        "tokens", "Tokens and patches of a step", [line for line in tokens if line.steps], "count", zero=True
    )
    shares = [Line("padding", *_series(steps, "pad_ratio")), *_by_name(steps, "dist_ratio", 1.0, "Dist of ")]
    yield line_chart("balance", "Padding, and idle share through imbalance", shares, "share of 1", zero=True)
    yield line_chart("step_s", "Time of a step", [Line("step", *_series(steps, "step_s"))], "seconds", zero=True)
    mfu = Line("mfu", *_series(steps, "mfu"))
    if mfu.steps:
        yield line_chart("mfu", "Model FLOPs utilisation", [mfu], "share of 1", zero=True)
    yield from _expert_loads(steps)
    rows = sent_bytes(steps)
    if rows:
        rows = {name: {kind: value / MIB for kind, value in of.items()} for name, of in rows.items()}
        yield stacked_bars("sent", "What all ranks of a stage send in a mean step", rows, "MiB")


def _expert_loads(steps: Sequence[StepMetrics]) -> Iterator[Drawing]:
    known = [(one.step, one.expert_load) for one in steps if one.expert_load]
    titles = {"hottest": "Rows of each layer's hottest expert", "busiest": "Rows of its busiest actor of text.expert"}
    for kind, title in titles.items():
        layers = list(dict.fromkeys(layer for _, load in known for layer in load.get(kind, ())))
        if layers:
            values = np.array([[load.get(kind, {}).get(layer, np.nan) for _, load in known] for layer in layers])
            names = [f"layer {layer}, mean {mean:.2f}" for layer, mean in zip(layers, np.nanmean(values, 1))]
            at = [step for step, _ in known]
            yield heat_map(f"{kind}_expert", title, names, at, values, "rows over those of the mean")


def sent_bytes(steps: Sequence[StepMetrics]) -> dict[str, dict[str, float]]:
    """Bytes of a mean step by stage and kind."""
    found: dict[str, dict[str, float]] = {}
    known = [one.comm_bytes for one in steps if one.comm_bytes]
    for sent in known:
        for stage, kinds in sent.items():
            row = found.setdefault(stage, {})
            for kind, count in kinds.items():
                row[kind] = row.get(kind, 0.0) + count / len(known)
    return {stage: row for stage, row in found.items() if row}


def _series(steps: Sequence[StepMetrics], name: str) -> tuple[list[int], list[float]]:
    known = [(one.step, float(value)) for one in steps if (value := getattr(one, name)) is not None]
    return [step for step, _ in known], [value for _, value in known]


def _by_name(steps: Sequence[StepMetrics], key: str, unit: float, prefix: str = "") -> list[Line]:
    """A line for each name of a metric that is by name."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for one in steps:
        values: Mapping[str, Any] = getattr(one, key) or {}
        for name, value in values.items():
            at, numbers = found.setdefault(name, ([], []))
            at.append(one.step)
            numbers.append(float(value) / unit)
    return [Line(prefix + name, at, numbers) for name, (at, numbers) in found.items() if np.isfinite(numbers).any()]
