"""A run of an experiment: its commands, its rows with machine and load, its sentence, its picture."""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from dhp.core.process import count_cores
from dhp.report.charts import spread_bars
from experiments.commands import command_of
from experiments.declared import FIGURES
from experiments.figures import Row, sentence
from experiments.registry import PICTURE, ROWS, Experiment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
LOAD = Path("/proc/loadavg")
LOAD_S = 60.0  # in which the mean of the last minute forgets all but 1/e
TRIED = "tried"  # of results/: what is no full run on a machine that was free for it
MADE = "made_on"  # the key of the row that says on what


@dataclass(frozen=True)
class Outcome:
    """words: the sentence, or why there is none; judged: whether it is a judgement; file: of the rows, None without."""

    words: str
    judged: bool
    status: int = 0
    file: Path | None = None


def run(experiment: Experiment, quick: bool, more: Sequence[str]) -> Outcome:
    """Run it and show its lines as they come. more: further arguments, behind those of a quick run, or in the place of
    those of a full one. Only a full run without any, on a machine that is free for it, replaces rows in results/."""
    commands = [[*one, *more] for one in experiment.commands(quick)] if quick or not more else [list(more)]
    cores, past, begin = count_cores(), load(), time.time()
    before = load_now() if past > cores else past  # the past may be of an experiment before this one, which has ended
    with tempfile.TemporaryDirectory(prefix="dhp-experiment-") as folder:
        picture = Path(folder) / "picture.png"
        rows: list[Row] = []
        for number, arguments in enumerate(commands):
            status = _command(experiment, arguments, Path(folder) / f"{number}.jsonl", picture, rows)
            if status:
                return Outcome(f"{' '.join(_words(experiment, arguments))} ended with status {status}", False, status)
        after = load()
        left = past * math.exp(-(time.time() - begin) / LOAD_S) if past > cores else 0.0
        busy = too_busy(experiment, before, after, cores, left)
        made = {MADE: machine() | {"load": [before, after], "seconds": round(time.time() - begin), "quick": quick}}
        kept = not (quick or more or busy)
        file = store(experiment, rows, made, RESULTS if kept else RESULTS / TRIED) if rows else None
        if file is not None:
            _draw(experiment, rows, picture, file.with_suffix(".png"))
    words = sentence(FIGURES.get(experiment.name, ()), rows) if rows and not busy else None
    return Outcome(_judgement(experiment, rows, busy, words), words is not None, 0, file)


def _words(experiment: Experiment, arguments: Sequence[str]) -> list[str]:
    return ["python", "-m", f"experiments.{experiment.name}", *arguments]


def _command(experiment: Experiment, arguments: Sequence[str], out: Path, picture: Path, rows: list[Row]) -> int:
    """One command; its status. Its rows are added, each with the command where it does not say its own."""
    command = command_of(experiment.name, arguments)
    words = [sys.executable, *_words(experiment, arguments)[1:]]
    words = [word.replace(ROWS, str(out)).replace(PICTURE, str(picture)) for word in words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = list(_shown(process.stdout))
    lines = out.read_text(encoding="utf-8").splitlines() if ROWS in arguments and out.exists() else printed
    rows += [{"command": command} | row for row in map(_row, lines) if row is not None]
    return process.returncode


def _shown(lines: Iterator[str] | Any) -> Iterator[str]:
    for line in lines:
        print(line, end="", flush=True)
        yield line


def _row(line: str) -> Row | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def load() -> float:
    """Processes that wanted to run, in the mean of the last minute."""
    return round(os.getloadavg()[0], 2)


def load_now() -> float:
    """The same in the mean of a second, without this process."""
    if not LOAD.exists():
        return load()
    found = []
    for _ in range(20):
        time.sleep(0.05)
        found.append(int(LOAD.read_text().split()[3].partition("/")[0]) - 1)
    return round(mean(found), 2)


def too_busy(experiment: Experiment, before: float, after: float, cores: int, left: float = 0.0) -> str:
    """Why a run is not judged; empty where nothing is against it. A load that its own processes make is none, nor what
    the mean still has at its end of a load that had ended before it began (left)."""
    if before > cores:
        return f"the load was {before:.1f} on {cores} cores before it began"
    if after > max(cores, experiment.processes) + left:
        own = f", of which {experiment.processes} are its own" if experiment.processes > cores else ""
        return f"the load was {after:.1f} on {cores} cores at its end{own}"
    return ""


def machine() -> Row:
    """What the rows were made on, and when."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": count_cores(), "cpu": model or platform.processor() or "unnamed", "python": platform.python_version(),
        "torch": version("torch"), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def store(experiment: Experiment, rows: Sequence[Row], made: Row, folder: Path) -> Path:
    """Write the rows, and last what they were made on, in the place of an earlier file; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{experiment.result}.jsonl"
    part = file.with_suffix(".partial")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [*rows, made]), encoding="utf-8")
    part.replace(file)
    return file


def _draw(experiment: Experiment, rows: Sequence[Row], picture: Path, target: Path) -> None:
    """The picture of the rows: what the experiment drew itself, or draws of a file, else bars of its figures."""
    if experiment.draws and not picture.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            words = [sys.executable, *_words(experiment, experiment.draws.split())[1:]]
            words = [word.replace(ROWS, file.name).replace(PICTURE, str(picture)) for word in words]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
                print(f"bars in the place of {experiment.name}'s own picture: {why}", file=sys.stderr)
    if picture.exists():
        target.write_bytes(picture.read_bytes())
        return
    found = [(one, bar) for one in FIGURES.get(experiment.name, ()) if (bar := one.bar(rows)) is not None]
    bars = {f"{one.label}{one.unit if one.unit == ' ×' and not one.share else ''}": bar for one, bar in found}
    if bars:
        spread_bars(target.stem, experiment.question, bars, "").write_png(target.parent)


def _judgement(experiment: Experiment, rows: Sequence[Row], busy: str, words: str | None) -> str:
    if not rows:
        return f"{experiment.name} printed no rows: what it found stands above"
    if busy:
        return f"{experiment.name} is not judged: {busy}, so that others' work would count as its own. Run it again"
    return f"{experiment.name}: {words or 'no sentence for these rows, which stand above'}"
