"""Runs of dhp as a user starts them: training, the loss, answers, an export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dhp.observe.metrics import StepMetrics, read_metrics
from experiments.commands import ROOT, run_module
from experiments.sight.inject.sitecustomize import MET, VARIABLE

CONFIG = Path(__file__).with_name("config.yaml")
INJECT = Path(__file__).with_name("inject")
_CONFIGURATION = (f"--config-path={CONFIG.parent}", f"--config-name={CONFIG.stem}")


def train(run_dir: Path, settings: Sequence[str], fault: str = "") -> list[StepMetrics]:
    """The steps of a run, oldest first. fault: one of `inject/sitecustomize.py`. Raises RuntimeError for a run that
    fails, and for one without the fault that it should have."""
    met = run_dir.with_name(f"{run_dir.name}.met")
    environment = {"PYTHONPATH": f"{INJECT}:{ROOT}", VARIABLE: fault, MET: str(met)} if fault else {}
    run_module(["dhp.train_ray", *_CONFIGURATION, f"run_dir={run_dir}", *settings], environment)
    if fault and not met.exists():
        raise RuntimeError(f"the run in {run_dir} never met its fault ({fault}): what it replaces has another name now")
    return read_metrics(run_dir)


def losses(model: Path, settings: Sequence[str]) -> dict[str, float]:
    """Nats a target token of all held-out samples together, with their own pictures and with others'."""
    named = ["dhp", "evaluate", "loss", str(model), *_CONFIGURATION, "--json", *settings, "exchange=images"]
    lines = [json.loads(line) for line in run_module(named).splitlines() if line.startswith("{")]
    return {line["images"]: line["loss"] for line in lines if not line["dataset"]}


def answers(model: Path, dataset: str, out: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """A line of `python -m dhp generate` for every sample of a dataset, in its order."""
    asked = [f"checkpoint={model}", f"dataset={dataset}", "max_new_tokens=6", f"out={out}"]
    run_module(["dhp", "generate", *_CONFIGURATION, *asked, *settings])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def export(run_dir: Path, folder: Path) -> Path:
    """The run's newest checkpoint as an ordinary model."""
    run_module(["dhp", "export", str(run_dir), str(folder)])
    return folder
