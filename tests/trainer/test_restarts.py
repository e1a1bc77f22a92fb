"""A run that loses a rank or its driver goes on by itself, and ends as one that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.rows import slow
from tests.helpers.runs import FIRST, ONE_ACTOR_EACH, processes_of, tiny, train, wait_for_steps

STEPS = 80  # so many that a fault comes before the last one, as fast as they are
LONG = (f"training.max_steps={STEPS}", "training.save_steps=20", *FIRST[1:], *ONE_ACTOR_EACH)
AGAIN = ("training.max_restarts=2", "training.restart_wait_s=0.1")


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    outcome = train(*tiny(tiny_assets, run_dir, *LONG))
    assert outcome.status == 0, outcome.stderr
    return losses(run_dir)


def wait_for_checkpoint(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Until the first one, which is written behind the steps, is complete, and two more steps are done."""
    wait_for_steps(run_dir, 20, process)
    while process.poll() is None and not (run_dir / "checkpoints" / "step_20").exists():
        time.sleep(0.02)
    done = (run_dir / "metrics.jsonl").read_text().count("\n")
    wait_for_steps(run_dir, min(done + 2, STEPS), process)


def a_rank(process: subprocess.Popen[str]) -> int:
    return next(pid for pid, command in processes_of(process).items() if "ray::Worker" in command)


def the_driver(process: subprocess.Popen[str]) -> int:
    return next(
        pid for pid, command in processes_of(process).items() if "-m dhp.train_ray" in command and pid != process.pid
    )


def the_control_store(process: subprocess.Popen[str]) -> int:
    return next(pid for pid, command in processes_of(process).items() if "gcs_server" in command.split(" ")[0])


@pytest.mark.parametrize(
    ("victim", "kind", "said"),
    [
        (a_rank, "died", " died during "),
        slow(the_driver, "killed", "the driver was ended by SIGKILL while "),
        slow(the_control_store, "cluster", "Ray's gcs_server (its control store, process "),
    ],
)
def test_it_goes_on_from_its_newest_checkpoint(
    tiny_assets: Path,
    tmp_path: Path,
    undisturbed: list[tuple[int, float]],
    victim: Callable[[subprocess.Popen[str]], int],
    kind: str,
    said: str,
) -> None:
    run_dir = tmp_path / "run"

    def kill(process: subprocess.Popen[str]) -> None:
        wait_for_checkpoint(run_dir, process)
        os.kill(
            victim(process), signal.SIGKILL
        )  # while, or after, the checkpoint of step 2 is written behind the steps

    # Without its driver Ray leaves agents, which its supervisor ends where they are no forks of the tests' own server.
    real = victim is the_driver
    outcome = train(*tiny(tiny_assets, run_dir, *LONG, *AGAIN), meanwhile=kill, own_ray=True, real=real)
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    assert losses(run_dir) == undisturbed
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["steps"]) == ("completed", 1, STEPS)
    first, second = (json.loads(file.read_text()) for file in sorted((run_dir / "faults").iterdir()))
    assert (first["kind"], second["kind"]) == (kind, "completed") and said in first["message"]
    assert f"restart 1 of 2, after 0.1 s, from {run_dir}/checkpoints/step_" in outcome.stdout
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step_20",
        "step_40",
        "step_60",
        "step_80",
    ]


@pytest.mark.slow
def test_on_a_shared_cluster_the_devices_of_a_killed_driver_are_reserved_again(
    tiny_assets: Path, tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    run_dir = tmp_path / "run"

    def kill(process: subprocess.Popen[str]) -> None:
        wait_for_checkpoint(run_dir, process)
        os.kill(the_driver(process), signal.SIGKILL)

    outcome = train(*tiny(tiny_assets, run_dir, *LONG, *AGAIN), meanwhile=kill)
    assert outcome.status == 0, outcome.stderr
    assert losses(run_dir) == undisturbed
    assert json.loads((run_dir / "summary.json").read_text())["restarts"] == 1


def test_a_refused_run_is_not_started_again_and_leaves_nothing(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = train(*tiny(tiny_assets, run_dir, *AGAIN, "training.learning_rate=-1"))
    assert outcome.status == 1 and outcome.stderr.count("ConfigError: ") == 1 and not run_dir.exists()


@pytest.mark.slow
def test_a_signal_ends_a_supervised_run(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def stop(process: subprocess.Popen[str]) -> None:
        wait_for_steps(run_dir, 1, process)
        process.send_signal(signal.SIGTERM)

    arguments = tiny(tiny_assets, run_dir, *LONG, *AGAIN, "training.max_steps=1000")
    outcome = train(*arguments, meanwhile=stop, own_ray=True)
    assert outcome.status == 130 and outcome.left == ()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert not (run_dir / "faults").exists()
