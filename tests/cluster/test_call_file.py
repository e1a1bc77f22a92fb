"""The file that a hang's message quotes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dhp.cluster.call_file import call_file, keep_calls, read_calls
from dhp.cluster.watch import Watched, _stuck


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_file_says_what_was_last(tmp_path: Path) -> None:
    said, path = ["12 collectives so far, the last one of many"], call_file(str(tmp_path), "text", 1)
    keep_calls(path, lambda: said[0], period_s=0.01)
    wait_until(lambda: read_calls(path) == said[0])
    said[0] = "13 collectives"
    wait_until(lambda: read_calls(path) == "13 collectives")
    assert (tmp_path / "text-1.calls").read_text() == "13 collectives\n"


def test_where_it_cannot_be_written_there_is_none(tmp_path: Path) -> None:
    assert call_file(None, "text", 0) is None and read_calls(None) == ""
    keep_calls(str(tmp_path / "missing" / "text-0.calls"), lambda: "1", period_s=0.01)
    assert read_calls(str(tmp_path / "missing" / "text-0.calls")) == ""


def test_a_hang_quotes_each_rank_once(tmp_path: Path) -> None:
    for rank, count in enumerate((7, 8)):
        Path(call_file(str(tmp_path), "vision", rank) or "").write_text(f"{count} collectives so far\n")
    waiting = [
        Watched(f"vision rank {rank}", what, object(), calls=call_file(str(tmp_path), "vision", rank))
        for rank in (0, 1)
        for what in ("forward_step", "backward_step")
    ]
    message = str(_stuck([*waiting, Watched("dataset actor", "step", object())], 30))
    assert "Unfinished: dataset actor in step; vision rank 0 in forward_step; vision rank 1 in forward_step" in message
    told = message.splitlines()[1:]
    assert told == ["  vision rank 0: 7 collectives so far", "  vision rank 1: 8 collectives so far"]
