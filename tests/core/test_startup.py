"""What a run says before its first step."""

from __future__ import annotations

import re
import sys
import time
from functools import partial

import pytest

from dhp.core.process import StartUp, say_line


def test_a_line_has_the_seconds_since_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    say = StartUp(time.perf_counter() - 12.0)
    say("starting Ray on this machine")
    assert re.fullmatch(r" 1[23]\.\d s  starting Ray on this machine\n", capsys.readouterr().out)


def test_what_a_table_is_printed_beside_goes_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    StartUp(time.perf_counter(), partial(say_line, file=sys.stderr))("counting")
    told = capsys.readouterr()
    assert told.out == "" and told.err.endswith(" s  counting\n")
