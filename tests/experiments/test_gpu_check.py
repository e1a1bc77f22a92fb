"""The check of a GPU, tried on the CPU: its rows are written one by one, and one that fails ends none of the others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import varlen

from dhp.parallel.attention import kernels
from experiments.gpu_check import environment, older_torch
from experiments.gpu_check.__main__ import NO_DEVICE, WRONG, check_rows, main
from experiments.gpu_check.rows import ROWS, Row
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.workshop import Workshop

ROOT = Path(__file__).parents[2]
PLANTED = "tests.experiments.test_gpu_check"
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


def raising(_: Any) -> dict[str, Any]:
    raise ValueError("planted")


def dying(_: Any) -> dict[str, Any]:
    os._exit(7)


def hanging(_: Any) -> dict[str, Any]:
    time.sleep(600)
    return {}


def lacking(_: Any) -> dict[str, Any]:
    return {"error": "dhp cannot be imported", "serves": False}


def who(_: Any) -> dict[str, Any]:
    return {"ok": True, "pid": os.getpid()}


def telling(_: Any, file: str) -> dict[str, Any]:
    """Says which process it is, whole at once, and hangs."""
    Path(f"{file}.new").write_text(str(os.getpid()))
    os.rename(f"{file}.new", file)
    return hanging(_)


def is_running(pid: int) -> bool:
    """A process that nobody waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def deviating(_: Any) -> dict[str, Any]:
    return {"ok": False, "error_of_loss": 1.0}


def named(name: str) -> Row:
    (row,) = (row for row in ROWS if row.name == name)
    return row


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_are_found_on_a_bare_machine(tmp_path: Path) -> None:
    """The command itself, in processes that find no other package than torch's and transformers'."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    out = tmp_path / "results" / "gpu.jsonl"
    rows = ["kernel, head dim 128, grouped", "varlen, head dim 80", "parity 1+1 float32, recompute none", "memory of"]
    command = [sys.executable, "-m", "experiments.gpu_check", "--device", "cpu", "--out", str(out), "--only", *rows]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    found = {row.pop("row"): row for row in read(out)}
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n") == len(found)
    assert max(found["kernel, head dim 128, grouped, causal"]["errors"].values()) < 1e-5
    parity = found["parity 1+1 float32, recompute none, shared_memory"]
    assert 0 < parity["gradient"] < 1e-4
    assert found["varlen, head dim 80"]["skipped"] == "attention over segments of all lengths in one call needs a GPU"
    for part in ("vision", "text"):  # whose gradients, in float32 on one rank, stay where autograd puts them
        memory = found[f"memory of {part}"]
        assert memory["between_steps_bytes"] == memory["weights_bytes"] + memory["optimizer_bytes"]
    assert found["environment"]["serves"] and found["environment"]["wanted"]["transformers"] == transformers.__version__
    assert found["totals"]["right"] == 6
    assert found["totals"]["status"] == 0


def test_a_row_that_fails_is_told_and_ends_no_other(tmp_path: Path) -> None:
    planted = {name: Row(name, PLANTED, name) for name in ("raising", "dying", "hanging", "deviating")}
    absent = Row("absent", "experiments.gpu_check.no_such_module")
    rows = [planted["raising"], absent, planted["dying"], planted["deviating"]]
    out = tmp_path / "gpu.jsonl"
    out.write_text('{"row": "of an earlier run"}\n')
    assert check_rows(rows, "cpu", out) == WRONG
    kept, raised, missing, died, deviates, totals = read(out)
    assert kept == {"row": "of an earlier run"}
    assert raised["error"] == "ValueError: planted"
    assert raised["at"].startswith(str(Path(__file__)))
    assert raised["seconds"] > 0
    assert missing["error"].startswith("ModuleNotFoundError: ")
    assert died["error"].startswith("the process ended with status 7; ")
    assert deviates["error_of_loss"] == 1.0
    assert totals["failed"] == ["raising", "absent", "dying"]
    assert totals["deviating"] == ["deviating"]
    assert (totals["right"], totals["status"]) == (0, WRONG)


def test_what_cannot_be_imported_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first row, with what is here and what is wanted; no other row is tried."""
    monkeypatch.setattr(environment, "USED", ("json", "no_such_module"))
    found = environment.check(Setting("cpu", tmp_path))
    assert found["serves"] is False
    wanted = (
        f"dhp cannot be imported: torch {torch.__version__.partition('+')[0]}\\S* is here, \\S+ is wanted, transformers"
    )
    assert re.match(wanted, found["error"]) and "No module named 'no_such_module'" in found["error"]
    out = tmp_path / "gpu.jsonl"
    assert check_rows([Row("lacking", PLANTED, "lacking"), named("environment")], "cpu", out) == WRONG
    assert [row["row"] for row in read(out)] == ["lacking", "totals"]


def test_a_row_that_lacks_a_module_costs_no_process(tmp_path: Path) -> None:
    workshop = Workshop("cpu", tmp_path)
    try:
        first = workshop.run(Row("who", PLANTED, "who"), 60.0)["pid"]
        assert workshop.run(Row("absent", "experiments.gpu_check.no_such_module"), 60.0)["error"]
        assert workshop.run(Row("who", PLANTED, "who"), 60.0)["pid"] == first
        assert workshop.run(Row("raising", PLANTED, "raising"), 60.0)["error"]
        assert workshop.run(Row("who", PLANTED, "who"), 60.0)["pid"] != first
    finally:
        workshop.close()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_ended_from_outside_it_leaves_no_process(by: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM is what `timeout` sends."""
    program = (
        "import sys; from experiments.gpu_check import __main__ as check; from experiments.gpu_check.rows import Row;"
        f"check.ROWS = (Row('telling', {PLANTED!r}, 'telling', ({str(tmp_path / 'pid')!r},)),);"
        f"sys.argv[1:] = ['--device', 'cpu', '--out', {str(tmp_path / 'gpu.jsonl')!r}]; check.main()"
    )
    running = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (tmp_path / "pid").exists():
        assert running.poll() is None
        time.sleep(0.05)
    row = int((tmp_path / "pid").read_text())
    running.send_signal(by)
    running.wait()
    while is_running(row):  # the kernel takes a moment; the test's own limit is the end of it
        time.sleep(0.05)


def test_a_row_that_hangs_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    rows = [Row("hanging", PLANTED, "hanging"), named("environment")]
    assert check_rows(rows, "cpu", out, limit_s=0.5, row_limit_s=0.5) == WRONG
    hung, late, totals = read(out)
    assert hung["error"].startswith("TimeoutError: ")
    assert late["no time"]
    assert totals["no time"] == ["environment"]


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out)])
    assert main() == NO_DEVICE
    (row,) = read(out)
    assert row["error"].startswith("no CUDA device")


def test_an_older_torch_gets_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as dhp calls it, on a device without values: the kernel itself is there on GPUs alone."""

    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # noqa: ANN202
        raise AssertionError("called")

    assert older_torch.WAY == "torch's own"
    monkeypatch.setattr(kernels, "varlen_attn", of_2_10)
    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    assert older_torch._provide() == "a stand-in for torch's, which lacks enable_gqa, scale, window_size"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels.has_varlen(torch.device("cuda"), torch.bfloat16)  # the product takes it
    make = lambda heads: torch.empty(9, heads, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    states = [make(16), make(2), make(2)]
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    output = kernels.attend_varlen(*states, bounds, 5, True, 0.1)
    gradients = torch.autograd.grad(output, states, torch.empty_like(output))
    assert [t.shape for t in (output, *gradients)] == [states[0].shape, *(state.shape for state in states)]
    with pytest.raises(NotImplementedError, match="no windows, and \\(4, 0\\) is one"):
        kernels.attend_varlen(*states, bounds, 5, True, 0.1, window=5)


def test_names_of_rows_are_their_own() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
