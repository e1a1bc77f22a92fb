"""Writes spans of all ranks as a Chrome trace."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dhp.core.text import json_safe
from dhp.core.tracing import DATA, Span

FILE = "trace.json"
RUN, STEPS, STEP = "run", "steps", "step"  # the run loop's own group, its row, and the kind of its events


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One object of trace.json, in the words of Chrome's trace format. Each field's string says its unit and when it is
    left out."""

    name: str
    """What was done: a verb and its micro-batch (`forward_step 0`), a collective (`all_reduce`), what a rank waited for
    (`for backward_step 1`), a step (`step 12`). Of `ph` M: what is described. Unit: text."""
    ph: str
    """`X`, a stretch of time; `i`, an instant: the end of a step, a line through all rows; `M`, the name or place of a
    row. Unit: a word."""
    cat: str | None = None
    """Kind of the event: `forward`, `backward`, `transfer` (to and from other stages), `collective` (inside a stage;
    it lies within what called it), `wait` (for the next call), `data`, `optimizer`, `checkpoint`, `step`. Unit: a word.
    Null: left out of `ph` M."""
    ts: float | None = None
    """When it began, on the driver's clock. Unit: microseconds. Null: left out of `ph` M."""
    dur: float | None = None
    """How long it took; on a GPU, how long the host took to submit it. Unit: microseconds. Null: left out of all but
    `ph` X."""
    pid: int
    """Group of rows: the stages in their order, then data (the actors that read), then run (the run loop). Unit: a
    number."""
    tid: int
    """Row in its group: the rank; of run, the one row of steps. Unit: a number."""
    s: str | None = None
    """How far an instant reaches: `g`, all rows. Unit: a word. Null: left out of all but `ph` i."""
    args: Mapping[str, Any] | None = None
    """Of `ph` M: the name or place. Of a step: its loss. Unit: names and values. Null: left out where there are
    none."""


_FIELDS = tuple(field.name for field in fields(TraceEvent))


class TraceWriter:
    """Writes events as steps end, so that a run that fails leaves the trace of what it did until then."""

    def __init__(self, run_dir: Path, groups: Mapping[str, int]):
        """groups: for each group of rows, in order, its number of rows (ranks)."""
        rows = {**groups, RUN: 1}
        self._groups = {name: number for number, name in enumerate(rows)}
        self._file = open(run_dir / FILE, "w")
        self._file.write("[")
        self._separator = "\n"
        for name, count in rows.items():
            self._describe(name, 0, "process_name", name=name)
            # The run's steps above all other rows, where they are a scale for these.
            self._describe(name, 0, "process_sort_index", sort_index=-1 if name == RUN else self._groups[name])
            for rank in range(count):
                self._describe(name, rank, "thread_name", name=STEPS if name == RUN else f"{name} {rank}")

    def write(self, group: str, rank: int, spans: Iterable[Span], offset_ns: int = 0) -> None:
        """Add a rank's spans. offset_ns: what is added to its clock to give that of the whole trace."""
        for span in spans:
            self._stretch(group, rank, span, offset_ns)
        self._file.flush()

    def mark_step(self, step: int, start_s: float, data_s: float, end_s: float, **values: float | None) -> None:
        """Add a step of the run, with the wait for its data at its beginning, and a line through all rows at its end.

        start_s, end_s: on this process's monotonic clock (`time.perf_counter`). values: to be shown with it."""
        start, end = int(start_s * 1e9), int(end_s * 1e9)
        self._stretch(RUN, 0, Span(f"step {step}", STEP, start, end), args=json_safe(values))
        if data_s:
            self._stretch(RUN, 0, Span("for data", DATA, start, start + int(data_s * 1e9)))
        place: dict[str, Any] = {"pid": self._groups[RUN], "tid": 0}
        self._event(TraceEvent(name=f"end of step {step}", ph="i", cat=STEP, ts=end / 1e3, s="g", **place))
        self._file.flush()

    def close(self) -> None:
        """End the file. Again is harmless."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _stretch(self, group: str, row: int, span: Span, offset_ns: int = 0, **more: Any) -> None:
        times: dict[str, Any] = {"ts": (span.start_ns + offset_ns) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3}
        place: dict[str, Any] = {"pid": self._groups[group], "tid": row}
        self._event(TraceEvent(name=span.name, ph="X", cat=span.kind, **times, **place, **more))

    def _describe(self, group: str, row: int, what: str, **values: Any) -> None:
        self._event(TraceEvent(name=what, ph="M", pid=self._groups[group], tid=row, args=values))

    def _event(self, event: TraceEvent) -> None:
        values = {name: getattr(event, name) for name in _FIELDS}
        known = {name: value for name, value in values.items() if value is not None}
        self._file.write(self._separator + json.dumps(known))
        self._separator = ",\n"
