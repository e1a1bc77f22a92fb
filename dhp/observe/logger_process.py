"""Runs one logger: `python -m dhp.observe.logger_process NAME`.

Where each of them sends a run, and with which key, is not set here: WANDB_…, MLFLOW_… and SWANLAB_… in the
environment act as its documentation says.

JSON comes in on stdin, a call a line ([method, arguments …]), and an answer to each goes out on what was stdout;
whatever the logger itself prints goes to stderr, a file. The process ends after the run's end, or when its stdin is
closed: the run is gone, or does without this logger."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, Literal, TextIO

import yaml

from dhp.core.process import STOPPING
from dhp.core.text import from_json


@dataclass(frozen=True)
class RunInfo:
    """project: what runs are grouped by. config: the configuration as YAML. resumed: whether the run continues the one
    that run_dir holds."""

    name: str
    project: str
    run_dir: str
    config: str
    resumed: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Every key of the configuration by its dotted path."""
        return dict(_leaves("", yaml.safe_load(self.config) or {}))

    def id_file(self, logger: str) -> Path:
        """The file of a logger's own name of the run, so that a resumed run goes on in it."""
        return Path(self.run_dir) / "loggers" / f"{logger}.id"

    def earlier_id(self, logger: str) -> str | None:
        """The logger's name of the run that this one continues; None where there is nothing to continue."""
        file = self.id_file(logger)
        return file.read_text(encoding="utf-8").strip() if self.resumed and file.is_file() else None

    def keep_id(self, logger: str, value: str) -> None:
        """Remember the logger's name of the run."""
        self.id_file(logger).write_text(value + "\n", encoding="utf-8")


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


Status = Literal["completed", "failed", "interrupted"]
PARAMETERS = 100  # that MLflow takes in one call
LONGEST = 500  # characters of a parameter's value that every version of MLflow takes


class WeightsAndBiases:
    """Files go to `<run_dir>/wandb`; `wandb sync` sends those of an offline run."""

    def begin(self, about: RunInfo) -> str:
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

    def begin(self, about: RunInfo) -> str:
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

    def begin(self, about: RunInfo) -> str:
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


# begin: open a run, or go on in the one it continues; where it can be seen, in words. log: numbers of a step, by the
# names that TensorBoard has. end: close the run, so that what is held back is written.
ADAPTERS: dict[str, Callable[[], Any]] = {"wandb": WeightsAndBiases, "mlflow": MLflow, "swanlab": SwanLab}

LAST_S = 60.0  # from the end of stdin: a logger that hangs then would outlive its run, which waits for less


def main(name: str) -> None:
    """Answer until the run has ended."""
    for number in STOPPING:  # the run decides when its loggers end
        signal.signal(number, signal.SIG_IGN)
    calls, answers = _message_streams()
    lines: Queue[str] = Queue()
    threading.Thread(target=_read, args=(calls, lines), daemon=True).start()
    logger = ADAPTERS[name]()
    verb = ""
    while verb != "end":
        verb, *arguments = json.loads(lines.get())
        if verb == "begin":
            arguments = [RunInfo(**arguments[0])]
        elif verb == "log":
            arguments[1] = {key: from_json(value) for key, value in arguments[1].items()}
        answer = _outcome(logger, verb, arguments)
        with suppress(BrokenPipeError):  # the run no longer reads; what the logger has is to be closed all the same
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _read(calls: TextIO, lines: Queue[str]) -> None:
    """Hand the lines over, and end the process some time after the last one, whatever the logger is doing then."""
    for line in calls:
        lines.put(line)
    lines.put('["end", "failed"]')
    time.sleep(LAST_S)
    os._exit(1)


def _outcome(logger: Any, verb: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """{verb: what the call gave}, or {verb, error} where it raised: a library may raise anything, SystemExit too."""
    try:
        return {verb: getattr(logger, verb)(*arguments)}
    except BaseException as error:
        lines = str(error).strip().splitlines()
        return {verb: None, "error": f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__}


def _message_streams() -> tuple[TextIO, TextIO]:
    """stdin and stdout for the messages alone: the logger finds an empty stdin, so that it cannot prompt for a key, and
    its output goes where stderr goes."""
    calls, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return calls, answers


if __name__ == "__main__":
    main(sys.argv[1])
