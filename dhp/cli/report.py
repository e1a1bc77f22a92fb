"""`dhp report RUN [RUN …] [--out FILE.html] [--png DIR]`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dhp.cli.common import make_parser
from dhp.core.errors import ConfigError
from dhp.core.text import harmless
from dhp.report.bound import sentence, times_of
from dhp.report.page import FILE, write_report
from dhp.report.run_record import RunRecord, read_run


def main(arguments: Sequence[str]) -> int:
    """Write what bounds a run, where its time went and what it learned as one page of HTML; of several runs, what
    differs between them first. The run may still go on, or have failed."""
    parser = make_parser("report", main.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("--out", type=Path, help=f"the file; by default {FILE} in the first run's directory")
    parser.add_argument("--png", metavar="DIR", type=Path, help="write each chart as a picture too")
    given = parser.parse_args(arguments)
    if len({run.absolute() for run in given.runs}) < len(given.runs):
        raise ConfigError(f"a run is named twice: {', '.join(map(str, given.runs))}. Name each once")
    name = FILE if len(given.runs) == 1 else "compared.html"
    path = write_report(given.runs, given.out or given.runs[0] / name, given.png)
    for run in given.runs:
        record = read_run(run)
        head = f"{record.name}: " if len(given.runs) > 1 else ""
        for said in [*_exceptions(record), sentence(record, times_of(record))]:
            print(head + said)
    print(path)
    return 0


def _exceptions(record: RunRecord) -> Iterator[str]:
    """What the sentence about the times leaves out: that the run did not complete, and what of it cannot be read."""
    if record.status != "completed":
        why = (
            "it goes on, or was killed" if record.summary is None else harmless(str(record.summary.get("error") or ""))
        )
        yield f"{record.status} after step {record.steps[-1].step}" + (f": {why}" if why else "")
    if record.broken:
        lines = "1 line" if record.broken == 1 else f"{record.broken} lines"
        yield f"left out: {lines} of metrics.jsonl that cannot be read"
