"""What a run says before its first step."""

from __future__ import annotations

import os
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dhp.core.process import StartUp, Unread, say_line


def test_a_line_has_the_seconds_since_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    say = StartUp(time.perf_counter() - 12.0)
    say("starting Ray on this machine")
    assert re.fullmatch(r" 1[23]\.\d s  starting Ray on this machine\n", capsys.readouterr().out)


def test_what_a_table_is_printed_beside_goes_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    StartUp(time.perf_counter(), partial(say_line, file=sys.stderr))("counting")
    told = capsys.readouterr()
    assert told.out == "" and told.err.endswith(" s  counting\n")


def test_lines_that_nobody_reads_are_dropped() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    unread = Unread(stream)
    print("read", file=unread, flush=True)
    assert os.read(reader, 100) == b"read\n"
    os.close(reader)
    for line in range(3):
        print(line, file=unread, flush=True)
    stream.close()


def test_other_errors_of_a_stream_are_raised(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as stream:
        pass
    with pytest.raises(ValueError, match="closed file"):
        print("a", file=Unread(stream))
