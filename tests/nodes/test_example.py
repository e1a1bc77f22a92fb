"""The walk of examples/two_nodes: a node is killed, and the run ends with the losses that it would have had."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.two_nodes.two_nodes import KILLED_AFTER, STEPS, command, losses
from tests.helpers import forks
from tests.helpers.runs import ROOT, train

WALK = ROOT / "examples" / "two_nodes"


@pytest.mark.slow
def test_the_run_survives_its_node(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with forks.of_rays_here():
        done = subprocess.run(
            [sys.executable, str(WALK / "two_nodes.py"), str(run_dir), f"tiny_assets={tiny_assets}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"after step {KILLED_AFTER}: the node 127.0.0.3 is killed" in done.stdout
    verdicts = [json.loads(file.read_text()) for file in sorted((run_dir / "faults").iterdir())]
    assert verdicts[-1]["kind"] == "completed" and verdicts[0]["kind"] in ("lost", "died", "raised")
    assert any("in the layout text.num_actors=1" in verdict["followed_by"] for verdict in verdicts)
    assert (run_dir / "report.html").exists()
    plain = tmp_path / "plain"
    settings = [one for one in command("local", plain)[3:] if not one.startswith(("training.elastic", "cluster"))]
    assert train(*settings, f"tiny_assets={tiny_assets}").status == 0
    assert losses(run_dir) == pytest.approx(losses(plain), rel=1e-5) and len(losses(plain)) == STEPS


def test_the_page_has_the_keys_of_the_script() -> None:
    page, given = (WALK / "README.md").read_text(), " ".join(command("x", Path("y")))
    for key, value in re.findall(r"^\| `(training\.\w+)` \| `?([^|`]+?)`? \|", page, re.MULTILINE):
        assert f"{key}={value}" in given or f"{key}=['{value}']" in given
