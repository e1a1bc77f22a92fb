"""Processes as others on their node see them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

from dhp.cluster.hangs.lookout import GONE, RUNS, STOPPED, NodeWatch, look
from dhp.cluster.hangs.vitals import Beat
from tests.helpers.posts import post_of


def test_a_process_runs_is_stopped_or_is_gone(tmp_path: Path) -> None:
    beat = tmp_path / "text-1.heartbeat"
    beat.write_text(json.dumps(asdict(Beat(2, "forward_step", 0, time.monotonic() - 5))))
    process = subprocess.Popen(["sleep", "600"])
    try:
        post = post_of(process.pid, "text-1", heartbeat=str(beat))
        (sight,) = NodeWatch().look([post], stacks=False)
        assert (sight.post, sight.state, sight.stacks) == (post, RUNS, "")
        assert sight.beat is not None and sight.beat.verb == "forward_step" and 5 <= sight.beat.verb_s < 60
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert [one.state for one in look([post, replace(post, begun=0.0)], stacks=False)] == [STOPPED, GONE]
    finally:
        process.kill()
        process.wait()
    (sight,) = look([post], stacks=True)
    assert (sight.state, sight.stacks) == (GONE, "")
