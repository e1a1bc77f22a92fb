"""`dhp report RUN [RUN …] [--out FILE.html] [--png DIR]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dhp.cli.common import make_parser
from dhp.core.errors import ConfigError
from dhp.report.bound import sentence
from dhp.report.page import FILE, write_report
from dhp.report.record import read_run
from dhp.report.split import times_of


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
        print(head + sentence(record, times_of(record)))
    print(path)
    return 0
