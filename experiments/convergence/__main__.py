"""`python -m experiments.convergence [--methods …] [--seeds …] [--epochs N] [--read FILE …] [--plot FILE]`."""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from dhp.batch.reader import BatchReader, make_reader
from dhp.checkpoint.folder import step_of
from dhp.cli import export
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.batch import IGNORED
from dhp.observe.metrics import StepMetrics
from dhp.plan.batches import feed_settings
from dhp.report.charts import Line, line_chart
from dhp.tiny.made_pictures import ANNOTATIONS, make_dataset, texts
from dhp.tiny.tiny_model import make_tiny_model
from dhp.trainer.preflight import prepare
from experiments.small import place, train

RANDOM = "random"
FORMS = (18, 16, 12, 10)  # bytes a parameter


def _form(nbytes: int) -> list[str]:
    keys = (f"{part}.{key}" for part in ("vision", "text") for key in ("dtype=bfloat16", f"state_bytes={nbytes}"))
    return ["data.balance=random", *keys]


METHODS = {
    RANDOM: ["data.balance=random"], "isf": ["data.balance=isf"], "balanced": ["data.balance=balanced"],
    "sequence": ["data.balance=random", "vision.parallelism=sequence", "vision.ulysses=2"],
    **{f"bytes_{nbytes}": _form(nbytes) for nbytes in FORMS},
}  # fmt: skip
BASES = {f"bytes_{nbytes}": f"bytes_{FORMS[0]}" for nbytes in FORMS}  # of others it is random batches


def base_of(method: str) -> str:
    """The method whose losses another one's are compared with."""
    return BASES.get(method, RANDOM)


Row = dict[str, Any]


def last_rows(rows: Sequence[Row], method: str) -> list[Row]:
    """The last row of each of a method's runs, by seed."""
    found = {row["seed"]: row for row in sorted(rows, key=lambda row: row["step"]) if row["method"] == method}
    return [found[seed] for seed in sorted(found)]


def methods_of(rows: Sequence[Row]) -> list[str]:
    """In the order in which they appear."""
    return list(dict.fromkeys(row["method"] for row in rows))


def summaries(rows: Sequence[Row]) -> list[Row]:
    """One for each method: held-out loss at the end, mean and standard deviation over seeds, and the difference to the
    base of the same seed, for each and in the mean, the latter also in units of the noise. Null: too few seeds, or no
    base."""
    return [_summary(method, rows) for method in methods_of(rows)]


def _noise(of_methods: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of one seed's loss from its method's mean, over several: a method alone has few seeds."""
    freedom = sum(len(losses) - 1 for losses in of_methods)
    squares = sum((loss - mean(losses)) ** 2 for losses in of_methods for loss in losses)
    return sqrt(squares / freedom) if freedom else None


def _summary(method: str, rows: Sequence[Row]) -> Row:
    ends, own = last_rows(rows, method), base_of(method)
    base = {row["seed"]: row["heldout_loss"] for row in last_rows(rows, own)}
    beside = [other for other in methods_of(rows) if base_of(other) == own]
    noise = _noise([[row["heldout_loss"] for row in last_rows(rows, other)] for other in beside])
    losses = [row["heldout_loss"] for row in ends]
    differences = [row["heldout_loss"] - base[row["seed"]] for row in ends if row["seed"] in base]
    difference = mean(differences) if differences else None
    return {
        "summary": method, "seeds": [row["seed"] for row in ends], "steps": [row["step"] for row in ends],
        "samples": [row["samples"] for row in ends], "train_loss": _rounded(mean(row["train_loss"] for row in ends)),
        "heldout_mean": _rounded(mean(losses)), "heldout_sd": _rounded(stdev(losses)) if len(losses) > 1 else None,
        "differences": [_rounded(value) for value in differences], "difference": _rounded(difference),
        "difference_in_sd": _rounded(difference / noise) if differences and noise else None,
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


Inputs = dict[str, Tensor]


class HeldOut:
    """The data of a configuration, decoded once: its steps are the batches of an evaluation."""

    def __init__(self, config: Config):
        feed = make_reader(feed_settings(prepare(config)))
        self._batches = [batch for step in range(feed.steps(1)) for batch in _batches(feed, step)]

    def loss(self, checkpoint: Path) -> float:
        """Nats a target token of the exported model. Exports to a folder beside the checkpoint and removes it."""
        folder = checkpoint.with_name(f"{checkpoint.name}_exported")
        with contextlib.redirect_stdout(sys.stderr):  # the report goes to stdout
            export.main([str(checkpoint), str(folder)])
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        shutil.rmtree(folder)
        sums = [_loss_sum(model, batch) for batch in self._batches]
        return sum(total for total, _ in sums) / sum(targets for _, targets in sums)


@torch.inference_mode()
def _loss_sum(model: torch.nn.Module, batch: Inputs) -> tuple[float, int]:
    named = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**named, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((targets != IGNORED).sum())


def _batches(feed: BatchReader, step: int) -> list[Inputs]:
    """The micro-batches of a step, for every replica, as arguments of the plain model."""
    named = feed.model_inputs(step)
    found: dict[str, Inputs] = {}
    for key, tensor in named.items():
        rows, _, name = key.rpartition("/")
        found.setdefault(rows, {})[name] = tensor
    return list(found.values())


CONFIG = Path(__file__).with_name("config.yaml")
HELD_OUT_SEED = 1  # of the generated samples; those of training have seed 0


@dataclass(frozen=True)
class Work:
    """What every run shares: where it writes, passes over the data, steps between two evaluations, and the data."""

    folder: Path
    epochs: int
    save_steps: int
    data: Path
    held_out: HeldOut


def make_work(folder: Path, epochs: int, save_steps: int, samples: int, held_out: int) -> Work:
    """Generate both datasets below `folder`: that many samples to train on and to hold out."""
    logging.disable_progress_bar()  # small files
    data = make_dataset(folder / "data", samples)
    unseen = make_dataset(folder / "unseen", held_out, HELD_OUT_SEED)
    any_model = make_tiny_model(folder / "model-0", texts(data), 0)  # all have the same tokenizer
    own = [*place(any_model, unseen, ANNOTATIONS), f"run_dir={folder / 'read'}"]
    return Work(folder, epochs, save_steps, data, HeldOut(compose_config(CONFIG.stem, str(CONFIG.parent), own)))


def run(method: str, seed: int, work: Work) -> Iterator[dict[str, Any]]:
    """Train with starting weights and data order of that seed; a row for each checkpoint, oldest first."""
    model = make_tiny_model(work.folder / f"model-{seed}", texts(work.data), seed)
    with tempfile.TemporaryDirectory(dir=work.folder) as name:
        run_dir = Path(name) / "run"
        length = [f"training.num_epochs={work.epochs}", f"training.save_steps={work.save_steps}", f"seed={seed}"]
        steps = train(CONFIG, run_dir, [*place(model, work.data, ANNOTATIONS), *METHODS[method], *length])
        last = 0
        for checkpoint in sorted((run_dir / "checkpoints").iterdir(), key=step_of):
            step = step_of(checkpoint)
            yield {
                "method": method, "seed": seed, "step": step, "epoch": round(steps[step - 1].epoch, 3),
                "samples": sum(s.samples for s in steps[:step]), "train_loss": round(_mean_loss(steps[last:step]), 5),
                "heldout_loss": round(work.held_out.loss(checkpoint), 5),
            }  # fmt: skip
            last = step
            shutil.rmtree(checkpoint)


def _mean_loss(steps: Sequence[StepMetrics]) -> float:
    return sum(s.loss * s.target_tokens for s in steps) / sum(s.target_tokens for s in steps)


TITLE = "held-out loss over samples seen, means over seeds"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: for each method the mean over seeds at each checkpoint."""
    curves = {method: _curve(rows, method) for method in methods_of(rows)}
    lines = [Line(name, [x for x, _ in points], [y for _, y in points]) for name, points in curves.items()]
    drawn = line_chart(path.stem, TITLE, lines, "nats a token")
    drawn.write_png(path.parent)


def _curve(rows: Sequence[Row], method: str) -> list[tuple[int, float]]:
    """For each checkpoint in order: means of the samples seen and of the loss, over seeds."""
    by_seed: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["method"] == method:
            by_seed.setdefault(row["seed"], []).append(row)
    together = zip(*by_seed.values(), strict=False)  # a seed's epoch may have a checkpoint more than another's
    return [(round(mean(row["samples"] for row in at)), mean(row["heldout_loss"] for row in at)) for at in together]


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows that earlier runs printed, without their summaries."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "method" in line]


def train_all(given: argparse.Namespace) -> list[Row]:
    """Every method with one seed, then with the next; prints each row when it is known."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(Path(folder), given.epochs, given.save_steps, given.samples, given.held_out)
        for seed in given.seeds:
            for method in given.methods:
                for row in run(method, seed, work):
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only what was read")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=384, help="to train on")
    parser.add_argument("--held-out", type=int, default=128, help="samples")
    parser.add_argument("--save-steps", type=int, default=16, help="optimizer steps between two evaluations")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    given = parser.parse_args(arguments)
    rows = read_rows(given.read)
    rows += train_all(given) if given.seeds else []
    for line in summaries(rows):
        print(json.dumps(line), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
