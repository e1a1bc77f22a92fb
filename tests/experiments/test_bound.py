"""The experiment about the report's sentence: its cases name functions that are there, and its fault takes longer."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

from dhp.config.command_line import compose_config
from experiments.bound.__main__ import INJECT
from experiments.bound.cases import cases, with_long_samples
from tests.helpers.figures import ROOT

CODE = """
import time, sys
sys.path.insert(0, {folder!r})
import slow_module
begun = time.perf_counter()
slow_module.Thing().work()
print(time.perf_counter() - begun)
"""


def test_cases_name_functions_and_keys_that_are_there(tmp_path: Path) -> None:
    found = cases(tmp_path)
    assert {case.kind for case in found} == {"data", "slow rank", "heavy part", "link", "save", "long sample", ""}
    for case in found:
        for overrides in (case.bound, case.changed):
            compose_config("tiny", None, list(overrides))
        if case.slowed is not None:
            module = importlib.import_module(case.slowed.module)
            for function in case.slowed.functions:
                assert callable(reduce(getattr, function.split("."), module))


def test_one_sample_in_so_many_is_long(tmp_path: Path) -> None:
    samples = json.loads(with_long_samples(tmp_path, 60, 32).read_text())
    lengths = [len(sample["conversations"]) for sample in samples]
    assert [number for number, length in enumerate(lengths) if length > 50] == [*range(0, len(samples), 32)]


def test_a_function_takes_longer_in_the_processes_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("class Thing:\n    def work(self): pass\n")
    plan = {"module": "slow_module", "functions": ["Thing.work"], "processes": "", "seconds": 0.2, "times": 0.0}
    for processes, slow in (("", True), ("text-1", False)):
        environment = {
            **os.environ,
            "PYTHONPATH": f"{INJECT}:{ROOT}",
            "DHP_SLOWED": json.dumps(plan | {"processes": processes}),
        }
        command = [sys.executable, "-c", CODE.format(folder=str(tmp_path))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert (float(done.stdout) >= 0.2) == slow
