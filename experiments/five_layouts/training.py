"""The example's training, shortened, in any layout, and the plain model beside it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from dhp.checkpoint.folder import checkpoints, step_of
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.models.registry import load_family
from dhp.observe.metrics import StepMetrics, read_metrics
from dhp.plan.run_plan import plan_run
from dhp.plan.trainable import adapters_of, training_rules
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import stage_settings
from experiments.commands import ROOT, TRAINED
from experiments.small import train
from tests.helpers.oracle import Oracle

CONFIG = ROOT / "examples" / "easy_vqa" / "easy_vqa.yaml"
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


class Training:
    """The example's training, shortened.

    example: the folder of `make example`. folder: what is written. batch: samples of a step, in two micro-batches.
    answer_tokens: of each answer, in `annotations` of a file that is yet to be written; 0: the data's own."""

    def __init__(self, example: Path, folder: Path, steps: int, batch: int, answer_tokens: int = 0):
        self.example, self.folder, self.steps = example.absolute(), folder, steps
        self.batch, self.answer_tokens = batch, answer_tokens
        self.data, self.model = self.example / "data", str(self.example / "models" / "composed")
        self.source = self.data / "train.jsonl"
        self.annotations = folder / f"{answer_tokens}.jsonl" if answer_tokens else self.source

    def settings(self) -> list[str]:
        return [
            f"vision.model_name={self.model}", f"text.model_name={self.model}",
            f"data.cache_dir={self.folder / 'cache'}", f"data.data_registry.train.data_path={self.data}",
            f"data.data_registry.train.annotation_path={self.annotations}", "data.eval_datasets=[]",
            "training.eval_on_start=false", "training.eval_answers=0", f"training.max_steps={self.steps}",
            f"training.batch_size={self.batch}", f"training.micro_batch_size={self.batch // 2}",
            "training.save_steps=null", "training.save_final=false", "training.log_interval=1",
        ]  # fmt: skip

    def words(self) -> list[str]:
        """The arguments of a command with this training, but for its folder."""
        numbers = {"steps": self.steps, "batch": self.batch, "answers": self.answer_tokens}
        return [TRAINED, str(self.example), *(f"--{name}={number}" for name, number in numbers.items())]

    def config(self) -> Config:
        return prepare(compose_config(CONFIG.stem, str(CONFIG.parent), [*self.settings(), "run_dir=unused"]))

    def run(self, name: str, folder: str, *more: str) -> list[StepMetrics]:
        run_dir = self.folder / "".join(letter if letter.isalnum() else "_" for letter in folder)
        return train(CONFIG, run_dir, [*self.settings(), *LAYOUTS[name], *more], limit_s=LIMIT_S)

    def run_killed(self, first: str, then: str, after: int) -> tuple[list[StepMetrics], int]:
        """Steps of a run whose driver is killed (SIGKILL) after step `after`, and which another layout goes on with;
        and the step that it went on from."""
        run_dir = self.folder / "killed"
        asked = [*self.settings(), *LAYOUTS[first], f"training.save_steps={SAVED_EVERY}", f"run_dir={run_dir}"]
        words = [sys.executable, "-m", "dhp.train_ray", str(CONFIG), *asked]
        started = subprocess.Popen(words, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            begun = time.monotonic()
            while not _has(run_dir, after):
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


def _has(run_dir: Path, step: int) -> bool:
    file = run_dir / "metrics.jsonl"
    return file.is_file() and len(read_metrics(run_dir)) >= step and bool(checkpoints(run_dir / "checkpoints"))


def begin_plain(config: Config, steps: int) -> Oracle:
    """The plain model with peft's adapters, which begin with what dhp's begin with, and its optimizer."""
    graph = plan_run(config).graph
    update = stage_settings(config, graph, graph.stages[-1], "cpu", steps).update
    adapters = adapters_of(config)
    rules = training_rules(config.training, load_family(config.text.model_name), adapters)
    return Oracle(config.text.model_name, torch.float32, update, "cpu", rules, adapters)
