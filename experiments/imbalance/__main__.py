"""`python -m experiments.imbalance [--training] [--ways WAY …] [--steps 6] [--plot FILE] [--read FILE]`: how uneven are
stages, and what does it give to even them?"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dhp.batch.reader import make_reader
from dhp.config.command_line import compose_config
from dhp.observe.ranks import RankLine, read_rank_lines
from dhp.plan.batches import feed_settings
from dhp.trainer.preflight import prepare
from experiments.commands import ROOT
from experiments.imbalance.inject.sitecustomize import VARIABLE
from experiments.imbalance.training import TABLE_7, training_row
from experiments.published.canvas import BOTTOM, GAP, SIDE, TOP, Canvas
from experiments.small import ANNOTATIONS, make_dataset, make_model, place, texts, train

VISION_STAGES = 2  # of config.yaml; the decoder's first stage shares the device of the last one
REPLICAS = 2
MICRO_BATCH = 4  # samples
IN_FLIGHT = 4  # micro-batches of a step and replica, as many as the chain has devices
BATCHES = {
    "random": ["data.balance=random", "data.packing=false"],
    "balanced": ["data.balance=balanced", "data.packing=true"],
}
FEW = ["text.partition_candidates=4"]
TRIALS = ["text.partition_trials=true"]
# By size: as InternVL's own training cuts, which OmniBal calls parameter-based.
WAYS = {
    "random batches": [*BATCHES["random"], "text.partition=parameters"],
    "balanced batches": [*BATCHES["balanced"], "text.partition=parameters"],
    "balanced batches, counted cut": [*BATCHES["balanced"], "text.partition=exact"],
    "balanced batches, measured cut": [*BATCHES["balanced"], "text.partition=exact", *TRIALS],
    "balanced batches, tried cuts": [*BATCHES["balanced"], "text.partition=bmp", *TRIALS, *FEW],
}
SOURCE = "OmniBal (arXiv 2407.20761), table 1: InternVL-Chat in four stages, random batches"
# Mean and deviation of tokens, of a forward's milliseconds, of gigabytes of a device.
PUBLISHED = {
    "between stages": {"tokens": (1400, 900), "forward_ms": (85, 93), "memory_gb": (39, 23)},
    "stage 1 over time": {"tokens": (1900, 1200), "forward_ms": (136, 155), "memory_gb": (73, 6)},
}


def overrides(way: str, steps: int) -> list[str]:
    """A run with as many micro-batches in flight as 1F1B has, whose activations are counted."""
    together = MICRO_BATCH * REPLICAS * IN_FLIGHT
    length = [f"training.batch_size={together}", f"training.max_steps={steps}"]
    return [*WAYS[way], *length, "training.schedule=1f1b", "memory.accounting=true"]


def published_rows() -> list[dict[str, Any]]:
    """The published table, in the columns of ours."""
    rows = []
    for name, columns in PUBLISHED.items():
        row: dict[str, Any] = {"row": "published", "of": name}
        for column, (mean, deviation) in columns.items():
            row |= {column: mean, f"{column}_sd": deviation, f"{column}_spread": round(deviation / mean, 3)}
        rows.append(row | {"source": SOURCE})
    return rows


TEXT = "text"
MIB = 2**20
Row = dict[str, Any]


def device_of(stage: str) -> int:
    """Of `vision.1` or `text.0`: devices of a chain are numbered along it, and one of them has both."""
    part, _, number = stage.partition(".")
    return int(number or 0) + (VISION_STAGES - 1 if part == TEXT else 0)


def forward_ms(forwards: Sequence[Row], count: int) -> np.ndarray:
    """[micro-batches, devices, replicas]: milliseconds, stages of a device summed. forwards: lines that ranks wrote,
    each rank's in their order; count: of a rank. Raises ValueError where one wrote another number."""
    of_rank: dict[tuple[str, int], list[float]] = {}
    for one in (one for one in forwards if not one["back"]):
        of_rank.setdefault((one["stage"], one["rank"]), []).append(1000 * one["seconds"])
    if counts := {len(own) for own in of_rank.values()} - {count}:
        raise ValueError(f"ranks wrote of {sorted(counts)} forwards, and each has {count}")
    devices, replicas = (1 + max(map(by, of_rank)) for by in (lambda key: device_of(key[0]), lambda key: key[1]))
    found = np.zeros((count, devices, replicas))
    for (stage, rank), own in of_rank.items():
        found[:, device_of(stage), rank] += own
    return found


def activation_mib(lines: Sequence[RankLine]) -> np.ndarray:
    """[steps, devices, replicas]: the most that was kept for backward, stages of a device summed. Raises ValueError
    where a rank measured none."""
    found = []
    for line in lines:
        devices: dict[int, np.ndarray] = {}
        for stage, of in line.activation_bytes.items():
            if None in of:
                raise ValueError(f"step {line.step}: a rank of {stage} measured no activations")
            devices[device_of(stage)] = devices.get(device_of(stage), 0) + np.array(of, dtype=float) / MIB
        found.append(np.stack([devices[device] for device in sorted(devices)]))
    return np.stack(found)


def device_tokens(patches: np.ndarray, tokens: np.ndarray, devices: int) -> np.ndarray:
    """[micro-batches, devices, replicas]: patches on devices with layers of the tower, tokens on those with the
    decoder's, both on the one with both. patches, tokens: [micro-batches, replicas]."""
    own = [(device < VISION_STAGES, device >= VISION_STAGES - 1) for device in range(devices)]
    return np.stack([patches * tower + tokens * decoder for tower, decoder in own], axis=1)


def spreads(columns: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """Rows in the columns of OmniBal's table 1. columns: by name, [micro-batches or steps, devices, replicas].

    A stage's deviation is over time and replicas. Between stages it is that of one replica's stages at one time, in the
    mean of all of these."""
    devices = next(iter(columns.values())).shape[1]
    for device in range(devices):
        row: Row = {"row": "over time", "stage": device + 1}
        for name, values in columns.items():
            row |= _column(name, float(values[:, device].mean()), float(values[:, device].std()))
        yield row
    row = {"row": "between stages"}
    for name, values in columns.items():
        row |= _column(name, float(values.mean(axis=1).mean()), float(values.std(axis=1).mean()))
    yield row


def _column(name: str, mean: float, deviation: float) -> Row:
    return {name: round(mean, 2), f"{name}_sd": round(deviation, 2), f"{name}_spread": round(deviation / mean, 3)}


def moments(columns: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """Rows in the panels of OmniBal's figures 1 and 2: the first and the last micro-batch or step that counts, each
    replica, all stages, and their deviation."""
    replicas = next(iter(columns.values())).shape[2]
    for moment, at in (("T-0", 0), ("T-1", -1)):
        for replica in range(replicas):
            row: Row = {"row": "moment", "moment": moment, "replica": f"DP-{replica}"}
            for name, values in columns.items():
                own = values[at, :, replica]
                row |= {name: [round(float(one), 2) for one in own], f"{name}_sd": round(float(own.std()), 2)}
            yield row


CONFIG = Path(__file__).with_name("config.yaml")
INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class Work:
    """What all runs share. made: overrides that say where model and data lie."""

    folder: Path
    made: Sequence[str]


def make_work(folder: Path, steps: int) -> Work:
    """The samples of so many steps, and the model, below `folder`."""
    data = make_dataset(folder / "data", steps * IN_FLIGHT * MICRO_BATCH * REPLICAS, seed=0)
    return Work(folder, place(make_model(folder, texts(data)), data, ANNOTATIONS))


def measure(way: str, steps: int, work: Work) -> Iterator[dict[str, Any]]:
    """The rows of one way. steps: of a run, the first of which counts for bytes alone."""
    forwards, lines, _ = run(work, overrides(way, steps))
    seconds, kept = forward_ms(forwards, steps * IN_FLIGHT)[IN_FLIGHT:], activation_mib(lines)
    tokens = tokens_of(work, overrides(way, steps), steps, seconds.shape[1])[IN_FLIGHT:]
    timed = {"tokens": tokens, "forward_ms": seconds}
    for row in (*spreads(timed | {"activation_mib": kept}), *moments({**timed, "activation_mib": kept})):
        yield {"way": way, "micro_batches": len(seconds), "steps": steps} | row


def run(work: Work, given: Sequence[str], way: str = "") -> tuple[list[Row], list[RankLine], Row]:
    """What each rank's passes took of its core, each rank's in their order, what ranks.jsonl has of the run, and of a
    way of table 7 its row."""
    with tempfile.TemporaryDirectory(dir=work.folder) as name:
        forwards = Path(name) / "forwards"
        forwards.mkdir()
        variables = {VARIABLE: str(forwards), "PYTHONPATH": f"{INJECT}:{ROOT}"}
        metrics = train(CONFIG, Path(name) / "run", [*work.made, *given], variables)
        files = sorted(forwards.iterdir(), key=lambda file: file.stat().st_mtime)
        of_run = {
            file.stem.rpartition("-")[0]: file for file in files
        }  # of a rank, those of trials were written before
        passes = [
            json.loads(line) for file in of_run.values() for line in file.read_text(encoding="utf-8").splitlines()
        ]
        row = training_row(way, Path(name) / "run", passes, metrics, WARM) if way else {}
        return passes, read_rank_lines(Path(name) / "run"), row


def tokens_of(work: Work, given: Sequence[str], steps: int, devices: int) -> np.ndarray:
    """[micro-batches, devices, replicas]: what goes into the stages of each device, padding included; by reading the
    data of a run once more."""
    own = [*work.made, *given, f"run_dir={work.folder / 'read'}"]
    reader = make_reader(feed_settings(prepare(compose_config(CONFIG.stem, str(CONFIG.parent), own))))
    read = [reader.step(step).work for step in range(steps)]
    patches = [[len(of.pixels) for of in shards] for one in read for shards in one["vision"]]
    tokens = [[of.tensors["input_ids"].numel() for of in shards] for one in read for shards in one["text"]]
    return device_tokens(np.array(patches), np.array(tokens), devices)


QUANTITIES = {"forward_ms": "forward, ms", "activation_mib": "activations, MiB"}
COLOURS = {
    ("T-0", "DP-0"): "#00798c",
    ("T-0", "DP-1"): "#66a182",
    ("T-1", "DP-0"): "#d1495b",
    ("T-1", "DP-1"): "#edae49",
}
MARGIN = 24  # pixels of a panel that nothing is drawn in


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the rows of moments. Raises ValueError where there are none."""
    found = [row for row in rows if row.get("row") == "moment"]
    if not found:
        raise ValueError("no row is of a moment")
    ways = list(dict.fromkeys(row["way"] for row in found))
    canvas = Canvas(len(ways) * len(QUANTITIES))
    for at, (name, title) in enumerate(QUANTITIES.items()):
        most = max(value for row in found for value in row[name])
        for number, way in enumerate(ways):
            left = canvas.left(at * len(ways) + number)
            canvas.frame(left)
            canvas.text(left, TOP - 36, way)
            canvas.text(left, TOP - 18, f"{title} (most: {most:.0f})")
            for row in (row for row in found if row["way"] == way):
                _draw_line(canvas, left, row, [value / most for value in row[name]])
    for number, ((moment, replica), colour) in enumerate(COLOURS.items()):
        x = canvas.left(0) + number * (SIDE + GAP) / 3
        canvas.dot(x, TOP + SIDE + BOTTOM - 14, colour)
        canvas.text(x + 8, TOP + SIDE + BOTTOM - 21, f"{moment}, {replica}")
    canvas.save(path)


def _draw_line(canvas: Canvas, left: float, row: Row, shares: Sequence[float]) -> None:
    colour, wide = COLOURS[row["moment"], row["replica"]], (SIDE - 2 * MARGIN) / max(1, len(shares) - 1)
    points = [(left + MARGIN + wide * at, TOP + SIDE - (SIDE - MARGIN) * share) for at, share in enumerate(shares)]
    canvas.line([point for pair in zip(points, points[1:]) for point in pair], colour)
    for at, (x, y) in enumerate(points):
        canvas.dot(x, y, colour)
        canvas.text(x - 3, TOP + SIDE + 4, str(at + 1))


STEPS = 6
WARM = 2  # steps of table 7's runs that do not count: recompute=auto may measure in them


def trained_rows(steps: int) -> Iterator[Row]:
    """Of table 7's ways, one after another."""
    together = MICRO_BATCH * REPLICAS * IN_FLIGHT
    length = [f"training.batch_size={together}", f"training.max_steps={steps}", "training.schedule=1f1b"]
    with tempfile.TemporaryDirectory(prefix="dhp-imbalance-") as folder:
        work = make_work(Path(folder), steps)
        for way, given in TABLE_7.items():
            yield run(work, [*given, *length], way)[2]


def measured_rows(ways: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """Of each way, one after another, then what was published."""
    with tempfile.TemporaryDirectory(prefix="dhp-imbalance-") as folder:
        work = make_work(Path(folder), steps)
        for way in ways:
            yield from measure(way, steps, work)
    yield from published_rows()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.imbalance", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=" | ".join(WAYS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of 32 samples; in the first nothing is timed")
    parser.add_argument("--training", action="store_true", help="OmniBal's table 7 as training runs, and nothing else")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    parser.add_argument("--read", type=Path, help="a file of rows to draw; nothing is trained")
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error(f"--steps {given.steps}: nothing is timed in the first step; take 2 or more")
    if given.training and (given.steps <= WARM or given.plot):
        parser.error(f"--training takes more than {WARM} steps, and has no plot")
    if given.read is not None:
        rows = [json.loads(line) for line in given.read.read_text(encoding="utf-8").splitlines()]
    else:
        chosen = "" if given.ways == list(WAYS) else " --ways " + " ".join(f"'{way}'" for way in given.ways)
        chosen = " --training" if given.training else chosen
        command = {"command": f"python -m experiments.imbalance{chosen} --steps {given.steps}"}
        rows = []
        for row in trained_rows(given.steps) if given.training else measured_rows(given.ways, given.steps):
            rows.append(row | command)
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
