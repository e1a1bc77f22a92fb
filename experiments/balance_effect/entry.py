"""Training through the real entry, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dhp.observe.metrics import StepMetrics, read_metrics

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
SHOWN_CHARACTERS = 3000  # characters of what a failed run printed


def train(
    config: Path, run_dir: Path, overrides: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> list[StepMetrics]:
    """`python -m dhp.train_ray` with that YAML file and those overrides; its steps, oldest first. variables: of its
    environment, beside those of this process.

    Raises RuntimeError with the end of what a failed run printed, subprocess.TimeoutExpired after LIMIT_S seconds.
    """
    command = [sys.executable, "-m", "dhp.train_ray", f"--config-path={config.parent}", f"--config-name={config.stem}"]
    arguments = [*command, f"run_dir={run_dir}", *overrides]
    own = {**os.environ, **variables}
    done = subprocess.run(arguments, cwd=ROOT, env=own, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-SHOWN_CHARACTERS:]}")
    return read_metrics(run_dir)


def place(model: Path, data: Path, annotations: str) -> list[str]:
    """Overrides that say where the model and the dataset `made` lie; lengths are kept beside the latter."""
    return [
        f"vision.model_name={model}",
        f"text.model_name={model}",
        f"data.data_registry.made.annotation_path={data / annotations}",
        f"data.data_registry.made.data_path={data}",
        f"data.cache_dir={data / 'lengths'}",
    ]
