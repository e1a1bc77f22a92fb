"""What the loggers get of a run, and that a run does not notice how they fail."""

import math
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from dhp.observe import loggers
from dhp.observe import loggers as guard
from dhp.observe.logger_process import RunInfo
from dhp.observe.loggers import Loggers
from tests.helpers.marks import MARK, marked_processes
from tests.observe.stand_ins import calls, install

CONFIG = "name: tiny\ntraining:\n  betas:\n  - 0.9\n  learning_rate: 0.001\ndata:\n  data_registry: {}\n"
STEPS = ((1, {"loss": 2.0, "lr/vision": 0.5}), (2, {"loss": math.nan}))

Begin = Callable[..., Loggers]


def about(run_dir: Path, resumed: bool = False) -> RunInfo:
    return RunInfo("first", "receipts", str(run_dir), CONFIG, resumed)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Starts loggers on stand-ins. more: by name, what the stand-in does besides."""

    def begun(*names: str, resumed: bool = False, **more: str) -> Loggers:
        for name in names:
            if not (tmp_path / "packages" / name).exists():
                install(tmp_path / "packages", name, more.get(name, ""))
        monkeypatch.chdir(tmp_path)  # where no `dhp` is
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
        monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
        monkeypatch.setenv(MARK, str(tmp_path))
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        found = Loggers(names, about(tmp_path, resumed))
        found.begin()
        return found

    return begun


def ended(found: Loggers, status: str = "completed") -> list[str]:
    """What is said until the end, after two steps."""
    said: list[str] = []
    for step, numbers in STEPS:
        found.log(step, numbers)
    found.end(status)
    found.wait(said.append)
    return [line for line in said if not line.startswith("waiting for")]


def test_wandb(begin: Begin, tmp_path: Path) -> None:
    assert ended(begin("wandb")) == [f"logging to wandb: {tmp_path}/wandb/offline-run"]
    init, step, others, save, *logged, finish = calls(tmp_path / "calls")
    settings = {"name": "tiny", "training.betas": [0.9], "training.learning_rate": 0.001, "data.data_registry": {}}
    asked = {"project": "receipts", "name": "first", "dir": str(tmp_path), "id": None, "resume": "allow"}
    assert init == ["init", [], {**asked, "config": settings, "console": "off"}]
    assert (step, others) == (["define_metric", ["step"], {}], ["define_metric", ["*"], {"step_metric": "step"}])
    assert save[1][1:] == [CONFIG, "now"] and save[1][0].endswith("/files/dhp_config.yaml")
    assert [entry[1][0]["step"] for entry in logged] == [1, 2] and math.isnan(logged[1][1][0]["loss"])
    assert logged[0][1] == [{"step": 1, "loss": 2.0, "lr/vision": 0.5}]
    assert finish == ["finish", [0], {}]
    assert (tmp_path / "loggers" / "wandb.id").read_text() == "new-id\n"
    assert "bye" in (tmp_path / "loggers" / "wandb.log").read_text()


def test_mlflow(begin: Begin, tmp_path: Path) -> None:
    assert ended(begin("mlflow"), "interrupted") == [
        f"logging to mlflow: run new-id in sqlite:///{tmp_path}/mlflow/mlflow.db"
    ]
    client, experiment, run, parameters, text, first, second, last = calls(tmp_path / "calls")
    assert client[1] == [f"sqlite:///{tmp_path}/mlflow/mlflow.db"]
    assert experiment[1] == ["receipts", f"file://{tmp_path}/mlflow/artifacts"] and run[1] == ["1", "first"]
    assert parameters[1][2] == [
        *(["name", "tiny"], ["training.betas", "[0.9]"], ["training.learning_rate", "0.001"]),
        ["data.data_registry", "{}"],
    ]
    assert text[1] == ["new-id", CONFIG, "config.yaml"]
    assert first[1] == ["new-id", [["loss", 2.0, 1], ["lr/vision", 0.5, 1]], []] and second[1][1][0][2] == 2
    assert last == ["set_terminated", ["new-id", "KILLED"], {}]


def test_mlflow_goes_where_its_environment_says(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = begin()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    install(tmp_path / "packages", "mlflow")
    found = Loggers(["mlflow"], about(tmp_path))
    found.begin()
    assert ended(found) == ["logging to mlflow: run new-id in http://127.0.0.1:5000"]
    client, experiment, *_ = calls(tmp_path / "calls")
    assert client[1] == ["http://127.0.0.1:5000"] and experiment[1] == ["receipts", None]
    assert not (tmp_path / "mlflow").exists()


def test_swanlab(begin: Begin, tmp_path: Path) -> None:
    assert ended(begin("swanlab"), "failed") == [f"logging to swanlab: {tmp_path}/swanlog"]
    init, text, first, second, finish = calls(tmp_path / "calls")
    assert (init[2]["project"], init[2]["experiment_name"], init[2]["logdir"], init[2]["id"]) == (
        *("receipts", "first", f"{tmp_path}/swanlog"),
        None,
    )
    assert text[1] == [{"config.yaml": CONFIG}, 0]
    assert first[1] == [{"loss": 2.0, "lr/vision": 0.5}, 1] and second[1][1] == 2
    assert finish[1] == ["crashed", "see summary.json"]


@pytest.mark.parametrize(
    ("name", "call", "place"), [("wandb", "init", "id"), ("swanlab", "init", "id"), ("mlflow", "update_run", 0)]
)
def test_a_resumed_run_goes_on_in_the_loggers(
    begin: Begin, tmp_path: Path, name: str, call: str, place: object
) -> None:
    ended(begin(name))
    (tmp_path / "calls").unlink()
    (tmp_path / "loggers" / f"{name}.id").write_text("earlier\n")
    ended(begin(name, resumed=True))
    (found,) = (entry for entry in calls(tmp_path / "calls") if entry[0] == call)
    assert (found[1][0] if place == 0 else found[2]["id"]) == "earlier"
    assert not any(entry[0] == "create_run" for entry in calls(tmp_path / "calls"))


def test_a_new_run_in_an_old_place_is_a_new_one(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "loggers").mkdir()
    (tmp_path / "loggers" / "wandb.id").write_text("earlier\n")
    ended(begin("wandb"))
    assert calls(tmp_path / "calls")[0][2]["id"] is None


RAISING = """
def log(self, values):
    raise ConnectionError("no route to host")
Run.log = log
"""
SOMETIMES = """
def log(self, values):
    if values["step"] == 1:
        raise ConnectionError("no route to host")
Run.log = log
"""
HANGING = """
def log(self, values):
    time.sleep(3600)
Run.log = log
"""
DYING = """
def log(self, values):
    os._exit(7)
Run.log = log
"""
LEAVING = """
def init(**named):
    sys.exit("no key")
"""
ASKING = """
def init(**named):
    raise ValueError("answered: " + sys.stdin.readline() + "nothing")
"""
STAYING = """
def finish(self, exit_code):
    import atexit
    atexit.register(time.sleep, 3600)
Run.finish = finish
"""


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (RAISING, "it failed 3 times in a row (ConnectionError: no route to host)"),
        (DYING, "its process ended (status 7)"),
        (LEAVING, "it could not begin (SystemExit: no key)"),
        (ASKING, "it could not begin (ValueError: answered: nothing)"),
        ("raise ImportError('broken')", "it could not begin (ImportError: broken)"),
    ],
    ids=["raises", "dies", "leaves", "asks", "does not import"],
)
def test_a_logger_that_fails_is_told_once_with_what_it_lacks(
    begin: Begin, tmp_path: Path, does: str, told: str
) -> None:
    found = begin("wandb", wandb=does)
    found.log(0, {"loss": 3.0})
    said = ended(found)
    stopped = f"logging to wandb has stopped, training goes on: {told}; see {tmp_path}/loggers/wandb.log"
    assert [line for line in said if "stopped" in line] == [stopped]
    assert said[-1] == "wandb lacks steps 0 to 2; metrics.jsonl has every step"


def test_a_single_failure_is_told_at_the_end(begin: Begin) -> None:
    said = ended(begin("wandb", wandb=SOMETIMES))
    assert said[-1] == "wandb lacks step 1; metrics.jsonl has every step" and "stopped" not in said[-2]


def test_a_logger_that_hangs_is_not_waited_for(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes nothing any more, so the run gives it up as soon as it is too far behind, and kills it at the end."""
    monkeypatch.setattr(guard, "BACKLOG", 5)
    monkeypatch.setattr(loggers, "END_S", 1.0)
    monkeypatch.setattr(loggers, "PATIENCE_S", 0.5)
    found = begin("wandb", wandb=HANGING)
    said: list[str] = []
    for step in range(20, 30):
        found.log(step, {"loss": 1.0})
        said += found.take_messages()
    assert "logging to wandb has stopped, training goes on: it is 5 steps behind; see" in "".join(said)
    assert "wandb lacks 12 steps between 1 and 29; metrics.jsonl has every step" in ended(found)
    assert not marked_processes(str(tmp_path))


@pytest.mark.parametrize("does", [HANGING, STAYING], ids=["hangs", "does not leave"])
def test_nothing_of_a_logger_is_left_behind(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(loggers, "END_S", 1.0)
    found = begin("wandb", wandb=does)
    while not found.take_messages():  # until it has begun
        time.sleep(0.02)
    said = ended(found)
    assert ("it did not end in time" in "".join(said)) == (does == HANGING)
    assert not marked_processes(str(tmp_path))


def test_a_run_that_is_killed_takes_its_loggers_along(begin: Begin, tmp_path: Path) -> None:
    """The logger's process closes the run when nobody speaks to it any more."""
    found = begin("wandb")
    found.log(1, {"loss": 1.0})
    (logger,) = found._loggers
    logger._calls.put(None)  # what the end of the run's process does to the pipe
    logger._process.wait(20)
    assert calls(tmp_path / "calls")[-1] == ["finish", [1], {}]


REAL = {"wandb": "WANDB_MODE", "mlflow": None, "swanlab": "SWANLAB_MODE"}


@pytest.mark.parametrize("name", REAL)
def test_the_package_itself_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if REAL[name]:
        monkeypatch.setenv(REAL[name], "offline")
    for resumed in (False, True):
        found = Loggers([name], about(tmp_path, resumed))
        found.begin()
        (said,) = ended(found)
        assert said.startswith(f"logging to {name}: "), (tmp_path / "loggers" / f"{name}.log").read_text()
    assert any(file.is_file() for folder in ("wandb", "mlflow", "swanlog") for file in (tmp_path / folder).rglob("*"))
    assert os.listdir(tmp_path / "loggers")
