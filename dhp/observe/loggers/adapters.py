"""The loggers behind three methods. These run in the logger's own process (`dhp.observe.loggers.process`).

Where each of them sends a run, and with which key, is not set here: WANDB_…, MLFLOW_… and SWANLAB_… in the
environment act as its documentation says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from dhp.observe.loggers.about import About

Status = Literal["completed", "failed", "interrupted"]
PARAMETERS = 100  # that MLflow takes in one call
LONGEST = 500  # characters of a parameter's value that every version of MLflow takes


class Logger(Protocol):
    """One run in one logger."""

    def begin(self, about: About) -> str:
        """Open the run, or go on in the one it continues; where it can be seen, in words."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of one step, by the names that TensorBoard has."""

    def end(self, status: Status) -> None:
        """Close the run; what it holds back is written."""


class WeightsAndBiases:
    """Files go to `<run_dir>/wandb`; `wandb sync` sends those of an offline run."""

    def begin(self, about: About) -> str:
        import wandb

        self._run = wandb.init(
            project=about.project,
            name=about.name,
            dir=about.run_dir,
            config=about.settings,
            id=about.earlier_id("wandb"),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        about.keep_id("wandb", self._run.id)
        # A resumed run repeats the steps after its checkpoint, and wandb's own count never goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        text = Path(self._run.dir) / "dhp_config.yaml"  # config.yaml is a file of wandb's own
        text.write_text(about.config, encoding="utf-8")
        self._run.save(str(text), base_path=self._run.dir, policy="now")
        return str(self._run.url or text.parent.parent)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def end(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "completed" else 1)


class MLflow:
    """Without MLFLOW_TRACKING_URI a run is kept in `<run_dir>/mlflow`."""

    def begin(self, about: About) -> str:
        from mlflow import MlflowClient

        given, own = os.environ.get("MLFLOW_TRACKING_URI"), Path(about.run_dir).absolute() / "mlflow"
        if not given:
            own.mkdir(exist_ok=True)
        address = given or f"sqlite:///{own / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=address)
        earlier = about.earlier_id("mlflow")
        if earlier is not None:
            self._run = earlier
            self._client.update_run(earlier, status="RUNNING")
        else:
            experiment = self._experiment(about.project, None if given else (own / "artifacts").as_uri())
            self._run = self._client.create_run(experiment, run_name=about.name).info.run_id
            about.keep_id("mlflow", self._run)
            self._log_parameters(about.settings)
        self._client.log_text(self._run, about.config, "config.yaml")
        return f"run {self._run} in {address}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, status: Status) -> None:
        ends = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, status=ends[status])

    def _experiment(self, name: str, artifacts: str | None) -> str:
        known = self._client.get_experiment_by_name(name)
        return known.experiment_id if known else self._client.create_experiment(name, artifact_location=artifacts)

    def _log_parameters(self, settings: Mapping[str, Any]) -> None:
        """Log the run's first settings: MLflow does not let them change, and config.yaml has those of a resumed one."""
        from mlflow.entities import Param

        found = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for first in range(0, len(found), PARAMETERS):
            self._client.log_batch(self._run, params=found[first : first + PARAMETERS])


class SwanLab:
    """Files go to `<run_dir>/swanlog`; `swanlab sync` sends those of an offline run."""

    def begin(self, about: About) -> str:
        import swanlab

        folder = str(Path(about.run_dir) / "swanlog")
        self._run = swanlab.init(
            project=about.project,
            experiment_name=about.name,
            logdir=folder,
            config=about.settings,
            id=about.earlier_id("swanlab"),
            resume="allow",
        )
        about.keep_id("swanlab", str(self._run.id))
        self._run.log({"config.yaml": swanlab.Text(about.config)}, step=0)
        try:
            return str(self._run.url)
        except ValueError:  # it has none unless SwanLab is online
            return folder

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def end(self, status: Status) -> None:
        ends = {"completed": "success", "failed": "crashed", "interrupted": "aborted"}
        self._run.finish(state=ends[status], error="see summary.json" if status == "failed" else None)


ADAPTERS: dict[str, Callable[[], Logger]] = {"wandb": WeightsAndBiases, "mlflow": MLflow, "swanlab": SwanLab}
