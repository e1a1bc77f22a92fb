"""`python -m experiments.five_layouts --trained DIR [--steps N] [--batch N] [--read FILE …] [--plot FILE]`.

DIR: that of `make example`, whose composed model and data are used."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dhp.batch.reader import make_reader
from dhp.checkpoint.folder import checkpoints, step_of
from dhp.config.command_line import compose_config
from dhp.models.registry import load_family
from dhp.observe.metrics import StepMetrics, read_metrics
from dhp.plan.batches import feed_settings
from dhp.plan.run_plan import plan_run
from dhp.plan.trainable import adapters_of, training_rules
from dhp.report.charts import BOTTOM, HEIGHT, INK, LEFT, RIGHT, TOP, WIDTH, Label, Line, Polyline, Scale, line_chart
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import stage_settings
from experiments.commands import ROOT, TRAINED
from experiments.small import train
from tests.helpers.oracle import Oracle

CONFIG = ROOT / "examples" / "easy_vqa" / "easy_vqa.yaml"
PLAIN, KILLED = "plain transformers and peft", "ulysses 2 + tensor 3, killed, then pipeline 2"
_TWO = ("vision.parallelism=data", "vision.num_actors=2", "text.num_actors=2")
LAYOUTS = {
    "1 + 1": (),
    "ulysses 2 + tensor 3": (
        *("vision.parallelism=sequence", "vision.num_actors=2", "text.parallelism=tensor", "text.num_actors=3"),
        "cluster.collocate=true",
    ),
    "data 2": (*_TWO, "text.parallelism=data"),
    "pipeline 2": ("text.parallelism=pipeline", "text.num_actors=2", "training.schedule=1f1b"),
    "ring 2": (*_TWO, "text.parallelism=sequence", "text.ring=2"),
    "ulysses 2 + tensor 2, 5 and 4 of 9 heads": (
        *("vision.parallelism=sequence", "vision.num_actors=2", "text.parallelism=tensor", "text.num_actors=2"),
    ),
}
SAVED_EVERY = 4  # steps of the run that is killed
LIMIT_S = 1800.0
Row = dict[str, Any]


class Training:
    """The example's training, shortened, in any layout."""

    def __init__(self, example: Path, folder: Path, steps: int, batch: int):
        self._example, self._folder, self.steps, self._batch = example.absolute(), folder, steps, batch

    def settings(self) -> list[str]:
        model, data = self._example / "models" / "composed", self._example / "data"
        return [
            f"vision.model_name={model}", f"text.model_name={model}", f"data.cache_dir={self._folder / 'cache'}",
            f"data.data_registry.train.annotation_path={data / 'train.jsonl'}",
            f"data.data_registry.train.data_path={data}", "data.eval_datasets=[]",
            "training.eval_on_start=false", "training.eval_answers=0", f"training.max_steps={self.steps}",
            f"training.batch_size={self._batch}", f"training.micro_batch_size={self._batch // 2}",
            "training.save_steps=null", "training.save_final=false", "training.log_interval=1",
        ]  # fmt: skip

    def run(self, name: str) -> list[StepMetrics]:
        return train(CONFIG, self._folder / name.replace(" ", "_"), [*self.settings(), *LAYOUTS[name]], limit_s=LIMIT_S)

    def run_killed(self, first: str, then: str, after: int) -> tuple[list[StepMetrics], int]:
        """Steps of a run whose driver is killed (SIGKILL) after step `after`, and which another layout goes on with;
        and the step that it went on from."""
        run_dir = self._folder / "killed"
        asked = [*self.settings(), *LAYOUTS[first], f"training.save_steps={SAVED_EVERY}", f"run_dir={run_dir}"]
        words = [sys.executable, "-m", "dhp.train_ray", str(CONFIG), *asked]
        started = subprocess.Popen(words, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            begun = time.monotonic()
            while not self._has(run_dir, after):
                if started.poll() is not None or time.monotonic() - begun > LIMIT_S:
                    raise RuntimeError(f"the run that is to be killed did not come to step {after}")
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        before = read_metrics(run_dir)
        saved = max(map(step_of, checkpoints(run_dir / "checkpoints")))
        resume = ["training.resume=auto", *LAYOUTS[then]]
        found = train(CONFIG, run_dir, [*self.settings(), *resume], limit_s=LIMIT_S)
        after_it = [one for one in found if one.step > saved]
        return [*(one for one in before if one.step <= saved), *after_it], saved

    def _has(self, run_dir: Path, step: int) -> bool:
        file = run_dir / "metrics.jsonl"
        return file.is_file() and len(read_metrics(run_dir)) >= step and bool(checkpoints(run_dir / "checkpoints"))

    def plain(self) -> list[tuple[float, float]]:
        """Loss and seconds of each step by the plain model with peft's adapters, each sample by itself."""
        config = prepare(compose_config(CONFIG.stem, str(CONFIG.parent), [*self.settings(), "run_dir=unused"]))
        graph = plan_run(config).graph
        update = stage_settings(config, graph, graph.stages[-1], "cpu", self.steps).update
        adapters = adapters_of(config)
        rules = training_rules(config.training, load_family(config.text.model_name), adapters)
        oracle = Oracle(config.text.model_name, torch.float32, update, "cpu", rules, adapters)
        feed, found = make_reader(feed_settings(config)), []
        for step in range(self.steps):
            samples = [s for rows in feed.samples(step).samples for row in rows for s in row]
            begun = time.perf_counter()
            found.append((oracle.step(samples).loss, time.perf_counter() - begun))
        return found


def rows_of(training: Training) -> Iterator[Row]:
    """The plain loop, each layout, and one that is killed on its way."""
    plain = training.plain()
    losses = [loss for loss, _ in plain]
    yield _row(PLAIN, losses, losses, [seconds for _, seconds in plain])
    for name in LAYOUTS:
        found = training.run(name)
        yield _row(name, [one.loss or 0.0 for one in found], losses, [one.step_s for one in found])
    found, saved = training.run_killed("ulysses 2 + tensor 3", "pipeline 2", training.steps // 2)
    yield _row(KILLED, [one.loss or 0.0 for one in found], losses, [one.step_s for one in found]) | {"killed": saved}


def _row(name: str, found: Sequence[float], plain: Sequence[float], seconds: Sequence[float]) -> Row:
    apart = max(abs(a - b) / b for a, b in zip(found, plain, strict=True))
    return {
        "layout": name, "steps": len(found), "loss_error": apart, "step_s": round(median(seconds[2:]), 3),
        "losses": list(found),
    }  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: losses over steps. Curves that are equal lie on one another, so that each has points of its own."""
    steps = range(1, max(row["steps"] for row in rows) + 1)
    lines = [
        Line(row["layout"], list(steps), row["losses"], links={step: "" for step in steps[number :: len(rows)]})
        for number, row in enumerate(rows)
    ]
    chart = line_chart(path.stem, "losses of one training in every layout", lines, "loss")
    killed = Scale(1, len(steps), LEFT, WIDTH - RIGHT)(next(row["killed"] for row in rows if "killed" in row))
    mark = [
        Polyline([(killed, TOP), (killed, HEIGHT - BOTTOM)], INK, dashed=True, thin=True),
        Label(killed + 4, TOP + 12, "killed; pipeline 2 goes on"),
    ]
    replace(chart, shapes=[*chart.shapes, *mark]).write_png(path.parent)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(TRAINED, type=Path, help="the folder of `make example`")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    given = parser.parse_args(arguments)
    rows = [json.loads(line) for file in given.read for line in file.read_text(encoding="utf-8").splitlines()]
    if given.trained is not None:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of(Training(given.trained, Path(folder), given.steps, given.batch)):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
