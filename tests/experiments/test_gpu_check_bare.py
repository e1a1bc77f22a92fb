"""The whole check of a GPU on a CPU, a row or more of each section, where nothing but the least is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from experiments.gpu_check.probe import USED
from experiments.gpu_check.rows import SECTIONS, UNANSWERED

ROOT = Path(__file__).parents[2]
# Rows of each section.
QUICK = (
    "registry", "tiny 1+1", "3B, plain", "launches", "by cuDNN", "hand-over by shared", "states",
    "4 samples, recompute none", "4 samples, recompute light, state_bytes", "varied data", "parity: 1+1 float32",
    "generation", "as it is", "block, head dim 128, grouped, causal", "varlen, head dim 80", "waits: 1+1", "profile",
    "planner",
)  # fmt: skip
# Nothing of these on a bare machine.
ABSENT = ("ray", "hydra", "omegaconf", "deepspeed", "numba", "av", "tensorboard", "pyarrow", "peft", "accelerate")
BARE = f"""
import importlib.util
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in {ABSENT} else find(name, package)
sys.meta_path.insert(0, Absent())
"""


def _bare(folder: Path) -> dict[str, str]:
    """The environment of a process that finds none of `ABSENT`."""
    (folder / "sitecustomize.py").write_text(BARE)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_what_rows_use_is_imported_on_a_bare_machine(tmp_path: Path) -> None:
    modules = ", ".join(["experiments.gpu_check.stand_ins", *USED])  # the stand-ins first: for what needs Ray
    done = subprocess.run(
        [sys.executable, "-c", f"import {modules}"], cwd=ROOT, env=_bare(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_rows_are_found_on_a_bare_machine(tmp_path: Path) -> None:
    """The command itself, in processes that find no other package than torch's and transformers': a row of each
    section."""
    out = tmp_path / "results" / "gpu.jsonl"
    command = [sys.executable, "-m", "experiments.gpu_check", "--device", "cpu", "--out", str(out), "--only", *QUICK]
    done = subprocess.run(command, cwd=ROOT, env=_bare(tmp_path), capture_output=True, text=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n") == len(rows)
    found = {(row["section"], row["row"]): row for row in rows}
    assert {section for section, _ in found} == {section.name for section in SECTIONS} | {"end"}
    machine = found["probe", "machine"]
    assert machine["serves"] and machine["wanted"]["transformers"] == transformers.__version__
    assert max(found["kernels", "block, head dim 128, grouped, causal"]["errors"].values()) < 1e-5
    varlen = found["kernels", "varlen, head dim 80"]
    assert varlen["skipped"] == "attention over segments of all lengths in one call needs a GPU"
    states = found["full_depth", "states"]  # gradients, in float32 on one rank, stay where autograd puts them
    assert states["between_steps_bytes"] == states["dry_run_least_bytes"]
    plain, ours = found["product", "3B, plain transformers"], found["full_depth", "4 samples, recompute none"]
    assert plain["tflop"] == ours["tflop"] > 0 and plain["step_ms"] > 0
    assert found["product", "tiny 1+1"]["skipped"].startswith("ray is not installed")
    assert found["rates", "launches"]["host_us"] > 0 and found["attention", "by cuDNN"]["skipped"]
    graphs = found["compile", "varied data"]["graphs"]
    assert graphs[0][0] > 0 and graphs[1] == graphs[-1]
    assert len(found["profile", "4 samples, recompute full"]["kernels"]) == 25
    assert 0 < found["parity", "1+1 float32"]["update"] < 1e-3
    assert found["recompute", "planner"]["measured_bytes"] > 0
    assert found["generation", "64 new tokens"]["new_tokens"] == 64
    assert found["waits", "1+1"]["watched"] is False
    assert found["determinism", "as it is"]["equal"]
    assert found["end", "unanswered"]["told"] == list(UNANSWERED)
    assert found["end", "totals"]["status"] == 0
