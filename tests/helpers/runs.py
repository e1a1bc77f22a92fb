"""Runs through the real entry, in processes of their own, and what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tests.helpers import forks, shared_ray
from tests.helpers.marks import MARK, mark_of, marked_processes

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # against hangs; nothing here takes a tenth of it, but actors share the machine with whatever runs there
ONE_ACTOR_EACH = (  # for runs in which nothing depends on how many there are: each takes seconds to start
    *("vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0"),
    *("text.parallelism=none", "text.num_actors=1"),
)
FIRST = (  # three steps; one thread, so that it is the same on any machine
    *("training.max_steps=3", "training.warmup_ratio=0", "training.log_interval=1"),
    *("cluster.device=cpu", "cluster.threads_per_actor=1"),
)
LONG = (  # of the run that tests of several folders read: saved, rotated and evaluated at each of its steps
    *("training.max_steps=4", "training.lr_scheduler_type=linear", *FIRST[1:], "data.on_bad_sample=skip"),
    *("training.save_steps=1", "training.save_total_limit=2", "training.best_metric=eval_loss"),
    *("data.eval_datasets=['shapes%5']", "training.eval_answers=1", "training.eval_answer_tokens=4"),
    "training.eval_on_start=true",
)
BROKEN = ("images/00000_0.png", "images/00025_0.png")  # pictures of its second step and of its last, cut off


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: int
    stdout: str
    stderr: str
    left: tuple[str, ...]  # command lines of its processes that were still there some seconds after its end


def train(
    *arguments: str,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    real: bool = False,
    private_ray: bool = False,
    module: str = "dhp.train_ray",
) -> Outcome:
    """`python -m` the module with the arguments; `meanwhile` is called with the started process.

    Its processes are forks of one with the imports done. With `real` they are started as a user's are, and Ray itself
    can kill one that has stopped. A run joins the Ray that all runs share, but with `real` or `private_ray`: then its
    actors are processes of its own, which end with it."""
    mark = uuid4().hex
    start = {} if real else forks.environment()
    starts_ray = module != "dhp" or arguments[0] in ("evaluate", "generate") or arguments[:2] == ("doctor", "loss")
    if starts_ray and not (real or private_ray or any("cluster.address" in word for word in arguments)):
        address, joining = shared_ray.join()
        start, arguments = {**start, **joining}, (*arguments, f"cluster.address={address}")
        if not any("threads_per_actor" in word for word in arguments):
            arguments = (*arguments, "cluster.threads_per_actor=1")  # its CPUs are no cores
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **start, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    try:
        if meanwhile is not None:
            meanwhile(process)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return Outcome(process.returncode, stdout, stderr, _left(mark))


def tiny(assets: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of a run of the embedded default with ready-made assets."""
    return ["--config-name=tiny", f"tiny_assets={assets}", f"run_dir={run_dir}", *overrides]


def heed_interrupts() -> None:
    """In a process that begins: a shell's background jobs, tests among them, ignore SIGINT, and what they start
    inherits it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _left(mark: str) -> tuple[str, ...]:
    """Ray's processes take a moment to end after their driver."""
    deadline = time.monotonic() + 20
    while (found := marked_processes(mark, forks.folder())) and time.monotonic() < deadline:
        time.sleep(0.5)
    return tuple(found.values())


def processes_of(process: subprocess.Popen[str]) -> dict[int, str]:
    """Running processes of a run that `train` started, by its mark: command line by process id."""
    return marked_processes(mark_of(process), forks.folder())


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str] | None = None) -> None:
    """Return when metrics.jsonl has that many steps; raises TimeoutError when it never does. process: the run's, to see
    that it has ended without them."""
    deadline = time.monotonic() + LIMIT_S
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_text().count('"kind": "train"') >= steps:
            return
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode} before step {steps}: {process.communicate()}")
        time.sleep(0.1)
    raise TimeoutError(f"{metrics} did not reach {steps} steps")
