"""Copies on the local disk: whole or not there, the least used ones removed, a full disk no obstacle."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from dhp.data.remote.remote_files import FileCache


class Fetch:
    """Writes the bytes, and counts."""

    def __init__(self, content: bytes):
        self.content, self.calls = content, 0

    def __call__(self, target: BinaryIO) -> None:
        self.calls += 1
        target.write(self.content)


def read(cache: FileCache, key: str, fetch: Callable[[BinaryIO], None], size: int | None = None) -> bytes:
    with cache.open(key, size, fetch, 5.0) as file:
        return file.read()


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "files").rglob("*") if path.is_file())


def test_a_file_is_fetched_once_and_another_state_of_it_anew(tmp_path: Path) -> None:
    fetch, other = Fetch(b"first"), Fetch(b"second")
    assert [read(FileCache(tmp_path), "s3://a\0one", fetch) for _ in range(3)] == [b"first"] * 3
    assert (fetch.calls, len(copies(tmp_path))) == (1, 1)
    assert read(FileCache(tmp_path), "s3://a\0two", other) == b"second" and other.calls == 1


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "s3://a/../../b", "a\0b", "ä\udc80", ".", ""])
def test_no_key_leads_out_of_the_folder(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert read(FileCache(folder), key, Fetch(b"x")) == b"x"
    (path,) = copies(folder)
    assert re.fullmatch(r"[0-9a-f]{64}", path.name) and path.parent.name == path.name[:2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


def test_a_copy_of_another_size_is_made_anew(tmp_path: Path) -> None:
    """A machine that crashed while it wrote may have left half of one."""
    read(FileCache(tmp_path), "a", Fetch(b"12345"), 5)
    copies(tmp_path)[0].write_bytes(b"12")
    again = Fetch(b"12345")
    assert read(FileCache(tmp_path), "a", again, 5) == b"12345" and again.calls == 1


def test_what_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def broken(target: BinaryIO) -> None:
        target.write(b"half")
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        read(FileCache(tmp_path), "a", broken)
    assert copies(tmp_path) == []


def test_those_that_were_not_used_for_longest_go(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, limit_bytes=1000)
    for number, name in enumerate(("a", "b", "c")):
        read(cache, name, Fetch(name.encode() * 300))
        os.utime(cache._path(name), (number + 1, number + 1))
    used = Fetch(b"")
    assert len(read(cache, "a", used)) == 300 and used.calls == 0  # now it is the newest
    read(cache, "d", Fetch(b"d" * 300))
    kept = {name for name in "abcd" if cache._path(name).exists()}
    assert kept == {"a", "c", "d"}
    assert sum(path.stat().st_size for path in copies(tmp_path)) <= 1000


def test_without_a_limit_nothing_goes(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    for number in range(20):
        read(cache, str(number), Fetch(b"x" * 1000))
    assert len(copies(tmp_path)) == 20


def test_who_has_a_copy_open_keeps_it(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, limit_bytes=100)
    with cache.open("a", None, Fetch(b"a" * 90), 5.0) as held:
        read(cache, "b", Fetch(b"b" * 90))
        assert not cache._path("a").exists()
        assert held.read() == b"a" * 90


def test_a_file_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, limit_bytes=100)
    assert read(cache, "a", Fetch(b"a" * 200), 200) == b"a" * 200
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_is_named_once_and_reading_goes_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    cache = FileCache(tmp_path)
    monkeypatch.setattr(os, "replace", full)
    assert [read(cache, "a", Fetch(b"content")) for _ in range(2)] == [b"content"] * 2
    assert copies(tmp_path) == []
    said = capfd.readouterr().err
    assert said.count(f"{tmp_path} cannot be written to ({os.strerror(code)})") == 1


def _read_many(folder: str, done: mp.Queue) -> None:
    cache = FileCache(Path(folder), limit_bytes=20_000)
    wrong = 0
    for turn in range(200):
        number = turn * 7 % 40
        content = bytes([number]) * 1000
        wrong += read(cache, str(number), Fetch(content), 1000) != content
    done.put(wrong)


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    """More files than there is room for, so that each removes what others read."""
    context = mp.get_context("fork")
    done = context.Queue()
    processes = [context.Process(target=_read_many, args=(str(tmp_path), done)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [done.get(timeout=60) for _ in processes] == [0, 0, 0]
    for process in processes:
        process.join()
    assert sum(path.stat().st_size for path in copies(tmp_path)) <= 20_000 + 3 * 2_000  # what each may not know of


def test_an_index_is_made_once(tmp_path: Path) -> None:
    made = []
    make = lambda: made.append(1) or np.arange(5)
    for _ in range(3):
        assert FileCache(tmp_path).index("a", make).tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 1
    (path,) = (tmp_path / "index").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert FileCache(tmp_path).index("a", make).tolist() == [0, 1, 2, 3, 4] and len(made) == 2
