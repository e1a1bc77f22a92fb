"""examples/grpo: rewards alone teach a model to name a colour."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT

SCRIPT = ROOT / "examples" / "grpo" / "grpo.py"
STEPS = 10  # that are compared, from the beginning and from the end


@pytest.mark.example
def test_the_reward_rises(tiny_assets: Path, tmp_path: Path) -> None:
    """From a third, which is chance, or less."""
    words = [sys.executable, str(SCRIPT), f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = json.loads((tmp_path / "run" / "rewards.json").read_text())
    first, last = (sum(of) / STEPS for of in (rewards[:STEPS], rewards[-STEPS:]))
    assert first < 0.45 and last > first + 0.25, (first, last)
    assert f"step {len(rewards)}: reward {rewards[-1]:.2f}" in done.stdout
