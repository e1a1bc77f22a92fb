"""A process: its start, its limits, its harmless errors."""

import os
import pickle
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from dhp.__main__ import main
from dhp.config.command_line import hydra_entry
from dhp.core.errors import CheckpointError, DataError, UnreadableVideo
from dhp.core.process import INTERRUPTED, OutOfTime, StartUp, Unread, say_line, time_limit
from dhp.core.text import harmless, one_line
from dhp.data.media.images import open_image
from dhp.data.media.sources import MediaResolver


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


def loop() -> None:
    while True:
        pass


def test_what_never_ends_is_ended() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05):
        loop()


def test_in_any_thread_and_in_that_one_alone() -> None:
    ended: list[BaseException] = []

    def run() -> None:
        try:
            with time_limit(0.05):
                loop()
        except OutOfTime as error:
            ended.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    with time_limit(600):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ended) == 2


def test_one_thread_watches_all_limits() -> None:
    with time_limit(600):
        before = threading.active_count()
        for _ in range(20):
            with time_limit(600):
                assert threading.active_count() == before


def test_an_earlier_limit_within_a_later_one() -> None:
    with time_limit(600):
        test_what_never_ends_is_ended()


def test_what_ends_in_time_leaves_a_profiled_thread_as_fast() -> None:
    """An exception that is cancelled though none was raised makes a profiled thread of CPython 3.11 stand still."""
    program = "import cProfile; from dhp.core.process import time_limit\nwith cProfile.Profile():\n"
    program += "    for _ in range(20):\n        with time_limit(600): sorted(range(9))\nprint('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"


def test_a_fork_has_a_watch_of_its_own() -> None:
    with time_limit(600):
        child = os.fork()
        if not child:
            try:
                with time_limit(0.05):
                    loop()
            except OutOfTime:
                os._exit(7)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_error_goes_through_as_it_is() -> None:
    with pytest.raises(KeyError), time_limit(600):
        raise KeyError


def test_what_comes_at_the_end_is_raised_or_forgotten_but_not_left() -> None:
    """However close the end of the code is to the end of the time."""
    for _ in range(200):
        try:
            with time_limit(0):
                pass
        except OutOfTime:
            pass
        for _ in range(100):  # where it would come if it had been left
            pass


TITLE = "a\x1b]0;PWNED\x07\x1b[2J\nConfigError: all is well"


def test_control_characters_are_spelt_out() -> None:
    assert harmless("a\x1b\u202e\n\t\ud800é") == "a\\x1b\\u202e\n\t\\ud800é"
    assert one_line("a\u2028b\nc\r") == "a\\u2028b\\nc\\r"
    assert one_line(one_line(TITLE)) == one_line(TITLE)


@pytest.mark.parametrize("name", [f"{TITLE}.png", f"https://x/{TITLE}", f"../{TITLE}", f"ftp://x/{TITLE}"])
def test_names_in_errors_of_data(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_image(MediaResolver(tmp_path).find(name, "image"))
    told = str(caught.value)
    assert "PWNED" in told and not {"\x1b", "\x07", "\n"} & set(told)
    again = pickle.loads(pickle.dumps(caught.value))  # as it comes from another process
    assert (type(again), str(again)) == (DataError, told)


def test_an_error_with_a_file_keeps_it() -> None:
    again = pickle.loads(pickle.dumps(UnreadableVideo(TITLE, Path("a"))))
    assert again.file == Path("a") and str(again) == one_line(TITLE)


def test_what_ends_a_command_is_shown_harmless(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise CheckpointError(TITLE)  # names in a checkpoint are a stranger's, too

    monkeypatch.setattr("dhp.cli.export.main", fail)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    assert main(["export"]) == 1
    with pytest.raises(SystemExit):
        hydra_entry(fail, ["--config-name=tiny"])
    told = capsys.readouterr().err
    assert told.count("PWNED") == 2 and not {"\x1b", "\x07"} & set(told)
