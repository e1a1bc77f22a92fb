"""Training through the real entry, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dhp.observe.metrics import StepMetrics, read_metrics
from experiments.commands import run_module

LIMIT_S = 900.0


def train(
    config: Path, run_dir: Path, overrides: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> list[StepMetrics]:
    """`python -m dhp.train_ray` with that YAML file and those overrides; its steps, oldest first. variables: of its
    environment, beside those of this process.

    Raises RuntimeError with the end of what a failed run printed, subprocess.TimeoutExpired after LIMIT_S seconds.
    """
    command = ["dhp.train_ray", f"--config-path={config.parent}", f"--config-name={config.stem}"]
    run_module([*command, f"run_dir={run_dir}", *overrides], variables, LIMIT_S)
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
