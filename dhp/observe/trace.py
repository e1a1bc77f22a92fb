"""What every rank did when, as a Chrome trace: open trace.json in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dhp.base.spans import Span

FILE = "trace.json"


class TraceWriter:
    """Writes events as steps end, so that a run that fails leaves the trace of what it did until then."""

    def __init__(self, run_dir: Path, groups: Mapping[str, int]):
        """groups: for each group of rows, in order, its number of rows (ranks)."""
        self._groups = {name: number for number, name in enumerate(groups)}
        self._file = open(run_dir / FILE, "w")
        self._file.write("[")
        self._separator = "\n"
        for name, rows in groups.items():
            self._describe(name, None, "process_name", name=name)
            self._describe(name, None, "process_sort_index", sort_index=self._groups[name])
            for rank in range(rows):
                self._describe(name, rank, "thread_name", name=f"{name} {rank}")

    def write(self, group: str, rank: int, spans: Iterable[Span], offset_ns: int = 0) -> None:
        """Add a rank's spans. offset_ns: what is added to its clock to give that of the whole trace."""
        for span in spans:
            self._event(
                {
                    "name": span.name,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": (span.start_ns + offset_ns) / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "pid": self._groups[group],
                    "tid": rank,
                }
            )
        self._file.flush()

    def close(self) -> None:
        """End the file. Again is harmless."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _describe(self, group: str, rank: int | None, what: str, **values: Any) -> None:
        self._event({"ph": "M", "name": what, "pid": self._groups[group], "tid": rank or 0, "args": values})

    def _event(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"
