"""A cluster that asks for a token says so to whoever has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ATTACH = """
import sys
from dhp.cluster.ray_session import ray_session
from dhp.core.errors import ConfigError
try:
    with ray_session(sys.argv[1], cpus=0):
        print("let in")
except ConfigError as error:
    print(error)
"""


def test_without_a_token_one_is_told_what_is_missing(two_nodes: str, tmp_path: Path) -> None:
    without = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")} | without
    command = [sys.executable, "-c", ATTACH, two_nodes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"cluster.address={two_nodes}: something listens there, but a connection to Ray failed" in done.stdout
    assert "RAY_AUTH_MODE=token" in done.stdout
