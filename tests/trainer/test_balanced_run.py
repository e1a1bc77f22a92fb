"""Balanced rows through the real entry: every sample once, no padding, workers ahead, and a resume in mid-epoch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.core.errors import CheckpointError
from dhp.train_ray import main
from tests.helpers.runs import Outcome, tiny, train

SAMPLES = 256  # of the embedded default's dataset
SETTINGS = [
    *("data.balance=balanced", "data.num_workers=2", "training.batch_size=32", "training.micro_batch_size=4"),
    *("vision.num_actors=1", "vision.parallelism=none", "vision.zero_stage=0"),
    *("text.num_actors=2", "text.parallelism=data"),
    *("training.max_steps=null", "training.num_epochs=2", "training.save_steps=5", "training.warmup_ratio=0"),
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balanced") / "run"


@pytest.fixture(scope="module")
def settings(run_dir: Path) -> list[str]:
    return [*SETTINGS, f"data.cache_dir={run_dir.parent / 'cache'}"]


@pytest.fixture(scope="module")
def outcome(tiny_assets: Path, run_dir: Path, settings: list[str]) -> Outcome:
    return train(*tiny(tiny_assets, run_dir, *settings))


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_epochs_show_every_sample_twice_without_padding(outcome: Outcome, run_dir: Path) -> None:
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    lines = lines_of(run_dir)
    assert sum(line["samples"] for line in lines) == 2 * SAMPLES
    assert sum(line["samples"] for line in lines if line["epoch"] <= 1) == SAMPLES
    assert lines[-1]["epoch"] == 2 and [line["skipped_samples"] for line in lines] == [0] * len(lines)
    assert {line["pad_ratio"] for line in lines} == {0}
    assert {line["samples"] for line in lines} != {32}  # packs by load, not by number
    of_text = [line["dist_ratio"]["text"] for line in lines]
    assert sorted(of_text)[len(of_text) // 2] < 0.05 and all(0 <= ratio < 1 for ratio in of_text)


@pytest.mark.slow
def test_a_run_stopped_in_mid_epoch_goes_on_with_the_samples_it_has_not_seen(
    outcome: Outcome, run_dir: Path, settings: list[str], tiny_assets: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(run_dir, stopped)
    for newer in (stopped / "checkpoints").iterdir():
        if newer.name != "step_5":
            shutil.rmtree(newer)
    # No worker this time: who reads changes nothing.
    resumed = train(*tiny(tiny_assets, stopped, *settings, "training.resume=auto", "data.num_workers=0"))
    assert resumed.status == 0, resumed.stderr
    for field in ("loss", "grad_norm", "tokens", "samples", "epoch", "dist_ratio"):
        assert [line[field] for line in lines_of(stopped)] == [line[field] for line in lines_of(run_dir)]
    # Lengths are measured once, by whichever run comes first.
    assert "measuring the samples' lengths: 0%" in outcome.stdout and "measuring" not in resumed.stdout


@pytest.mark.slow
def test_other_data_are_refused(
    outcome: Outcome, run_dir: Path, settings: list[str], tiny_assets: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(run_dir, stopped)
    overrides = [*tiny(tiny_assets, stopped, *settings, "training.resume=auto", "data.balance=isf")[1:]]
    with pytest.raises(CheckpointError, match="balance was balanced and is isf"):
        main(compose_config("tiny", overrides=overrides))
