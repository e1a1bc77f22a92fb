"""Faults end a run or start it again."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from dhp.checkpoint.folder import check_checkpoint
from tests.helpers.rows import slow
from tests.helpers.runs import FIRST, ONE_ACTOR_EACH, processes_of, tiny, train, wait_for_steps

FOUR = ["training.batch_size=4", "training.micro_batch_size=2", "training.max_steps=2", "data.shuffle=false"]


@pytest.fixture
def broken_set(tmp_path: Path) -> Path:
    """Four samples a step for two steps; the sixth one's picture is cut off in the middle."""
    Image.new("RGB", (60, 60), "red").save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    samples = [
        {
            "image": "broken.png" if number == 5 else "good.png",
            "conversations": [{"from": "human", "value": "<image>\nColour?"}, {"from": "gpt", "value": "red"}],
        }
        for number in range(8)
    ]
    (tmp_path / "set.json").write_text(json.dumps(samples))
    return tmp_path


def on(folder: Path) -> list[str]:
    registry = "data.data_registry.broken"
    return [
        "data.datasets=[broken]",
        f"{registry}.annotation_path={folder / 'set.json'}",
        f"{registry}.data_path={folder}",
        *FOUR,
        *ONE_ACTOR_EACH,
    ]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
def test_a_broken_image_ends_the_run_by_name(tiny_assets: Path, broken_set: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = train(*tiny(tiny_assets, run_dir, *on(broken_set)), private_ray=True)
    assert outcome.status == 1
    for told in ("DataError", "broken", "6", "broken.png"):
        assert told in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert summary(run_dir)["status"] == "failed" and "broken.png" in summary(run_dir)["error"]
    assert outcome.left == ()


def kill_a_rank(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """SIGKILL to one of the run's worker processes, once it trains."""
    wait_for_steps(run_dir, 1, process)
    workers = [pid for pid, command in processes_of(process).items() if "ray::Worker" in command]
    os.kill(workers[0], signal.SIGKILL)


def test_a_killed_rank_ends_the_run_by_name(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = tiny(tiny_assets, run_dir, "training.max_steps=1000", *ONE_ACTOR_EACH)
    outcome = train(*arguments, meanwhile=lambda process: kill_a_rank(run_dir, process), private_ray=True)
    assert outcome.status == 1
    assert "PartFailed" in outcome.stderr and " rank " in outcome.stderr and "died" in outcome.stderr
    assert summary(run_dir)["status"] == "failed"
    kept = re.search(r"the logs of Ray's own processes stay in (\S+)", outcome.stderr)
    assert kept and list(Path(kept[1]).glob("ray/session_latest/logs/raylet.*"))
    shutil.rmtree(kept[1])
    assert outcome.left == ()


@pytest.mark.parametrize(
    ("number", "layout", "again"),
    [slow(signal.SIGINT, ONE_ACTOR_EACH, "training.resume=auto"), slow(signal.SIGTERM, (), "overwrite=true")],
)
def test_an_interrupted_run_says_so_and_nothing_that_a_second_one_did_in_its_directory(
    tiny_assets: Path, tmp_path: Path, number: signal.Signals, layout: tuple[str, ...], again: str
) -> None:
    run_dir = tmp_path / "run"

    def interrupt(process: subprocess.Popen[str]) -> None:
        wait_for_steps(run_dir, 1, process)
        holder = json.loads((run_dir / ".running.json").read_text())["pid"]
        second = train(*tiny(tiny_assets, run_dir, "training.max_steps=1000", *layout, again))
        assert second.status == 1 and f"run_dir={run_dir} is in use: process {holder} on host " in second.stderr
        process.send_signal(number)

    outcome = train(
        *tiny(tiny_assets, run_dir, "training.max_steps=1000", *layout), meanwhile=interrupt, private_ray=True
    )
    assert outcome.status == 130, outcome.stderr
    done = summary(run_dir)["steps"]
    assert [one.name for one in (run_dir / "checkpoints").iterdir()] == [f"step_{done}"]  # what was trained is saved
    check_checkpoint(run_dir / "checkpoints" / f"step_{done}")
    assert "stay in" not in outcome.stderr  # Ray's folder is gone
    for log in (run_dir / "logs").glob("*.log"):
        assert "Warning" not in log.read_text()
    assert summary(run_dir)["status"] == "interrupted" and summary(run_dir)["steps"] >= 1
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, summary(run_dir)["steps"] + 1))
    assert outcome.left == ()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "kind", "said"),
    [
        (a_rank, "died", " died during "),
        (the_driver, "killed", "the driver was ended by SIGKILL while "),
        (the_control_store, "cluster", "Ray's gcs_server (its control store, process "),
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
    outcome = train(*tiny(tiny_assets, run_dir, *LONG, *AGAIN), meanwhile=kill, private_ray=True, real=real)
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    assert losses(run_dir) == undisturbed
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["steps"]) == ("completed", 1, STEPS)
    first, second = (json.loads(file.read_text()) for file in sorted((run_dir / "faults").iterdir()))
    assert (first["kind"], second["kind"]) == (kind, "completed") and said in first["message"]
    assert f"restart 1 of 2, after 0.1 s, from {run_dir}/checkpoints/step_" in outcome.stdout
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step_20", "step_40", "step_60", "step_80"]


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
    outcome = train(*arguments, meanwhile=stop, private_ray=True)
    assert outcome.status == 130 and outcome.left == ()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert not (run_dir / "faults").exists()
