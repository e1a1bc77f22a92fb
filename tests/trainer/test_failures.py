"""What goes wrong during a run ends it with one clear message, status 1, a summary, and nothing of Ray left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from dhp.checkpoint.folder import check_checkpoint
from tests.helpers.rows import slow
from tests.helpers.runs import ONE_ACTOR_EACH, processes_of, tiny, train, wait_for_steps

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
    outcome = train(*tiny(tiny_assets, run_dir, *on(broken_set)), own_ray=True)
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
    arguments = tiny(tiny_assets, run_dir, "training.max_steps=1000")
    outcome = train(*arguments, meanwhile=lambda process: kill_a_rank(run_dir, process), own_ray=True)
    assert outcome.status == 1
    assert "PartFailed" in outcome.stderr and " rank " in outcome.stderr and "died" in outcome.stderr
    assert summary(run_dir)["status"] == "failed"
    kept = re.search(r"the logs of Ray's own processes stay in (\S+)", outcome.stderr)
    assert kept and list(Path(kept[1]).glob("ray/session_latest/logs/raylet.*"))
    shutil.rmtree(kept[1])
    assert outcome.left == ()


@pytest.mark.parametrize(
    ("number", "layout", "again"),
    [(signal.SIGINT, (), "training.resume=auto"), slow(signal.SIGTERM, ONE_ACTOR_EACH, "overwrite=true")],
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

    outcome = train(*tiny(tiny_assets, run_dir, "training.max_steps=1000", *layout), meanwhile=interrupt, own_ray=True)
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
