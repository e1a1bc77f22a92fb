"""Packages that stand for wandb, mlflow and swanlab: they have what the adapters call, and write each call down."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Ahead of each package: `told` appends a line of JSON to the file that CALLS names.
TELL = """
import json, os, sys, time

def told(called, /, *values, **named):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([called, list(values), named], default=str) + "\\n")
"""

WANDB = """
class Settings:
    def __init__(self, **named):
        self.named = named

class Run:
    url = None
    def __init__(self, id, dir):
        self.id, self.dir = id or "new-id", dir + "/wandb/offline-run/files"
        os.makedirs(self.dir, exist_ok=True)
    def define_metric(self, name, **named):
        told("define_metric", name, **named)
    def save(self, path, base_path, policy):
        told("save", path, open(path).read(), policy)
    def log(self, values):
        told("log", values)
    def finish(self, exit_code):
        print("bye")
        told("finish", exit_code)

def init(settings, **named):
    told("init", **named, **settings.named)
    return Run(named["id"], named["dir"])
"""

MLFLOW = """
from types import SimpleNamespace

class MlflowClient:
    def __init__(self, tracking_uri):
        told("client", tracking_uri)
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name, artifact_location):
        told("create_experiment", name, artifact_location)
        return "1"
    def create_run(self, experiment, run_name):
        told("create_run", experiment, run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="new-id"))
    def update_run(self, run, status):
        told("update_run", run, status)
    def log_text(self, run, text, file):
        told("log_text", run, text, file)
    def log_batch(self, run, metrics=(), params=()):
        told("log_batch", run, [[m.key, m.value, m.step] for m in metrics], [[p.key, p.value] for p in params])
    def set_terminated(self, run, status):
        told("set_terminated", run, status)
"""
ENTITIES = """
class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.step = key, value, step

class Param:
    def __init__(self, key, value):
        self.key, self.value = key, value
"""

SWANLAB = """
class Text(str):
    pass

class Run:
    def __init__(self, id):
        self.id = id or "new-id"
    @property
    def url(self):
        raise ValueError("offline")
    def log(self, values, step):
        told("log", values, step)
    def finish(self, state, error):
        told("finish", state, error)

def init(**named):
    told("init", **named)
    return Run(named["id"])
"""
PACKAGES = {"wandb": WANDB, "mlflow": MLFLOW, "swanlab": SWANLAB}


def install(folder: Path, name: str, more: str = "") -> None:
    """Put a package into a folder of the import path. more: statements at its end, which may change what it does."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TELL + PACKAGES[name] + more)
    (package / "entities.py").write_text(ENTITIES)


def calls(file: Path) -> Sequence[Any]:
    """[name, values, named values] of each call, in turn."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
