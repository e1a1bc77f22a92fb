"""Where rows run: a process that is replaced when a row fails, dies or takes too long. A GPU's context is of no use to
the next row after some failures, and neither is a process that waits in a collective."""

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
from typing import Any

from experiments.gpu_check.rows import Row

SERVE = "--serve"
_SET_PARENT_DEATH_SIGNAL = 1
_MISSING = ("ImportError", "ModuleNotFoundError")  # leave a process as good as it was
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
    """Runs rows one by one on `device`; what they leave for one another lies in `folder`."""

    def __init__(self, device: str, folder: Path):
        self._device, self._folder = device, folder
        self._said = folder / "stderr"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, row: Row, limit_s: float) -> dict[str, Any]:
        """The row's fields, with what it raised as "error" and why it was left out as "skipped"; "seconds" it took."""
        begin = time.perf_counter()
        if row.fresh:
            self.close()
        if self._process is None:
            self._start()
        process = self._process
        line = _ask(process, json.dumps(asdict(row)).encode() + b"\n", limit_s)
        if line is None:
            found = {"error": f"TimeoutError: no answer within {limit_s:.0f} s; {self._last_words()}"}
        elif not line:
            found = {"error": f"the process ended with status {process.wait()}; {self._last_words()}"}
        else:
            found = json.loads(line)
        if row.fresh or ("error" in found and not found["error"].startswith(_MISSING)):
            self.close()
        return found | {"seconds": round(time.perf_counter() - begin, 2)}

    def close(self) -> None:
        """End the process, and the ranks that it started."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-m", "experiments.gpu_check", "--device", self._device, SERVE, str(self._folder)]
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                env=os.environ | ENVIRONMENT | OF_DEVICE[self._device], start_new_session=True,
            )  # fmt: skip

    def _last_words(self) -> str:
        return "it said last: " + self._said.read_text(errors="replace")[-TAIL:]


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


def _read_line(descriptor: int, limit_s: float) -> bytes | None:
    """One line; empty at the end of the stream, None where none comes in time."""
    line, end = b"", time.perf_counter() + limit_s
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.perf_counter()))
        if not ready:
            return None
        read = os.read(descriptor, 1 << 16)
        if not read:
            return b""
        line += read
    return line


def serve(device: str, folder: Path) -> None:
    """In the process: answer rows until there are no more, or who asks is gone."""
    end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), device, folder)) + "\n")
        answers.flush()


def _answer(row: Mapping[str, Any], device: str, folder: Path) -> dict[str, Any]:
    try:
        import torch

        import experiments.gpu_check.stand_ins  # noqa: F401  before dhp
        from experiments.gpu_check.setting import NotHere, Setting

        try:
            function = getattr(import_module(row["module"]), row["function"])
            return function(Setting(device, folder), *row["arguments"])
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
