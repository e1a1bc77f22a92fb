"""What a run says before its first step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dhp.core.process import INTERRUPTED, StartUp, Unread, say_line


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


ENDED_BY_HANGUP = """
import os, signal
from dhp.core.process import heed
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have it ignore
heed()
os.kill(os.getpid(), signal.SIGHUP)
os._exit(7)
"""


def test_a_signal_ends_a_process_whose_errors_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert (
            subprocess.run([sys.executable, "-c", ENDED_BY_HANGUP], stderr=writer, timeout=60).returncode == INTERRUPTED
        )
    finally:
        os.close(writer)


def test_a_command_whose_output_nobody_reads_ends_well() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dhp", "--help"], stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
