"""Where rows run: a process that is replaced when a row fails, dies or takes too long. A GPU's context is of no use to
the next row after some failures, and neither is a process that waits in a collective.

Each is a fork of a server that has imported what rows need, for imports take longer than most rows, and has touched no
GPU."""

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from experiments.gpu_check.rows import Row

SERVE = "--serve"
_SET_PARENT_DEATH_SIGNAL = 1
_MISSING = ("ImportError", "ModuleNotFoundError")  # leave a process as good as it was
PID = "row_process"
START_S = 300.0  # until a process for rows is there: all imports, on a busy machine
TAIL = 2000  # characters of what a dead process said
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or asking for a GPU takes one, and processes could not be forked any more
}

OF_DEVICE = {
    "cuda": {"DS_ACCELERATOR": "cuda"},
    # Rows are tried there, not timed, and threads that wait for a core spin.
    "cpu": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
}


class Workshop:
    """Runs rows one by one on `device`; what they leave for one another lies in `folder`. warm: a module to import
    before."""

    def __init__(self, device: str, folder: Path, warm: str | None = None):
        self._device, self._folder, self._warm = device, folder, warm
        self._said = folder / "stderr"
        self._server: subprocess.Popen[bytes] | None = None
        self._row: int | None = None  # the process that the next row runs in

    def run(self, row: Row, limit_s: float) -> dict[str, Any]:
        """The row's fields, with what it raised as "error" and why it was left out as "skipped"; "seconds" it took."""
        if row.fresh and self._row is not None:
            self._end_row()
        if self._row is None:
            self._start()
        begin = time.perf_counter()
        line = _ask(self._server, json.dumps(asdict(row)).encode() + b"\n", limit_s)
        found = {"error": self._last_words("the server ended")} if line == b"" else json.loads(line or b"{}")
        if line is None:
            found = {"error": self._last_words(f"TimeoutError: no answer within {limit_s:.0f} s")}
        elif PID in found:  # of the one in its place
            self._row = found[PID]
            found = {"error": self._last_words(f"the process ended with status {found['status']}")}
        elif row.fresh or ("error" in found and not found["error"].startswith(_MISSING)):
            self._end_row()
        if line is None:
            self._end_row()
        elif line == b"":
            self.close()
        return found | {"seconds": round(time.perf_counter() - begin, 2)}

    def close(self) -> None:
        """End the processes, and what they started."""
        if self._server is not None:
            _end_group(self._server.pid)  # first, or it would start another one
            if self._row is not None:
                _end_group(self._row)
            self._server.wait()
            self._server.stdin.close()
            self._server.stdout.close()
        self._server = self._row = None

    def _start(self) -> None:
        command = [sys.executable, "-m", "experiments.gpu_check", "--device", self._device, SERVE, str(self._folder)]
        with self._said.open("ab") as said:
            self._server = subprocess.Popen(
                command + (["--warm", self._warm] if self._warm else []), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=said, env=os.environ | ENVIRONMENT | OF_DEVICE[self._device], start_new_session=True,
            )  # fmt: skip
        self._row = self._next_row()

    def _end_row(self) -> None:
        """And wait for the one in its place."""
        _end_group(self._row)
        self._row = self._next_row()

    def _next_row(self) -> int:
        line = _read_line(self._server.stdout.fileno(), START_S)
        if not line:
            raise RuntimeError(self._last_words("rows have no process to run in"))
        return json.loads(line)[PID]

    def _last_words(self, what: str) -> str:
        return f"{what}; it said last: " + self._said.read_text(errors="replace")[-TAIL:]


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it does, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _ask(process: subprocess.Popen[bytes], question: bytes, limit_s: float) -> bytes | None:
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return _read_line(process.stdout.fileno(), limit_s)


def _read_line(descriptor: int, limit_s: float | None) -> bytes | None:
    """One line; empty at the end of the stream, None where none comes in time."""
    line, end = b"", time.perf_counter() + (limit_s or 0.0)
    while not line.endswith(b"\n"):
        left = None if limit_s is None else max(0.0, end - time.perf_counter())
        ready, _, _ = select.select([descriptor], [], [], left)
        if not ready:
            return None
        read = os.read(descriptor, 1 << 16)
        if not read:
            return b""
        line += read
    return line


def serve(device: str, folder: Path, warm: str | None) -> None:
    """In the server: fork a process that answers rows, and another one whenever it has ended, until who asks is gone.
    warm: the module whose imports each fork finds done; one that is missing is told by the rows."""
    end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    if warm:
        try:
            import_module(warm)
        except Exception:
            traceback.print_exc()
    status: int | None = None
    while status != 0:
        if not (child := os.fork()):
            return _serve_rows(answers, device, folder)
        os.setpgid(child, child)  # what a row starts ends with its group
        _tell(answers, {PID: child, "status": status})
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve_rows(answers: TextIO, device: str, folder: Path) -> None:
    end_with_parent()
    while line := _read_line(sys.stdin.fileno(), None):
        _tell(answers, _answer(json.loads(line), device, folder))


def _tell(answers: TextIO, what: Mapping[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _answer(row: Mapping[str, Any], device: str, folder: Path) -> dict[str, Any]:
    try:
        import torch

        import experiments.gpu_check.stand_ins  # noqa: F401  before dhp
        from experiments.gpu_check.setting import NotHere, Setting

        try:
            function = getattr(import_module(row["module"]), row["function"])
            return function(Setting(device, folder), *row["arguments"], **row["keywords"])
        except NotHere as reason:
            return {"skipped": str(reason)}
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    except Exception as error:  # a row of its own, not the end of the others
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error}"[-TAIL:], "at": f"{where.filename}:{where.lineno}"}
