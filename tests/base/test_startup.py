"""What a run says before its first step."""

from __future__ import annotations

import re
import time

import pytest

from dhp.base.startup import StartUp


def test_a_line_has_the_seconds_since_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    say = StartUp(time.perf_counter() - 12.0)
    say("starting Ray on this machine")
    assert re.fullmatch(r" 1[23]\.\d s  starting Ray on this machine\n", capsys.readouterr().out)
