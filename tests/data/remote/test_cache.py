"""Addresses of files, their copies on the disk."""

import errno
import multiprocessing as mp
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from dhp.core.errors import ConfigError, DataError
from dhp.core.files import is_remote, without_file_scheme
from dhp.data.remote.places import Shards, expand, find_place, find_root, missing_place
from dhp.data.remote.remote_files import FileCache, RemoteFolder
from dhp.data.remote.transfer import LONGEST_PAUSE_S, PACKAGES, RemoteSettings, check_address, open_filesystem, retried
from tests.helpers.buckets import Faults


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("a-{8..11}.tar", ["a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"]),
        ("{x,y}/{0..1}.tar", ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"]),
        ("s3://b/{a,}c", ["s3://b/ac", "s3://b/c"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize("pattern", ["a{5..1}", "a{b}", "a{}", "a{0..9999999}", "{0..9999}{0..9999}"])
def test_patterns_that_stand_for_nothing_or_too_much(pattern: str) -> None:
    with pytest.raises(DataError):
        expand(pattern)


def test_file_addresses_are_paths() -> None:
    assert [is_remote(path) for path in ("/a", "a:b", "file:///a", "s3://a", "C://x")] == [False] * 3 + [True] * 1 + [
        False
    ]
    assert without_file_scheme("file:///a%20b/c") == "/a b/c" and without_file_scheme("file://localhost/a") == "/a"
    assert without_file_scheme("s3://a") == "s3://a"


def test_local_paths_stay_paths(tmp_path: Path, settings: RemoteSettings) -> None:
    assert find_place("/a/b.json", settings) == Path("/a/b.json")
    odd = tmp_path / "a{0..1}.tar"  # a file of that name is what is meant
    odd.touch()
    assert find_place(str(odd), settings) == odd
    shards = find_place(f"{tmp_path}/b{{0..1}}.tar", settings)
    assert shards == Shards(f"{tmp_path}/b{{0..1}}.tar", (tmp_path / "b0.tar", tmp_path / "b1.tar"))
    assert find_root("", settings) is None and find_root(f"file://{tmp_path}", settings) == tmp_path


def test_a_folder_behind_an_address_is_its_shards(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    (far / "deep").mkdir()
    for name in ("b.tar", "a.tar", "deep/c.tar", "notes.txt"):
        (far / name).write_bytes(b"x")
    found = find_place("s3://bucket", settings)
    assert [str(file) for file in found.files] == ["s3://bucket/a.tar", "s3://bucket/b.tar", "s3://bucket/deep/c.tar"]


def test_what_is_missing_is_named(far: Path, faults: Faults, tmp_path: Path, settings: RemoteSettings) -> None:
    (far / "0.tar").write_bytes(b"x")
    assert missing_place("s3://bucket/0.tar", settings) is None
    with pytest.raises(DataError, match="s3://bucket/1.tar cannot be read: FileNotFoundError"):
        missing_place("s3://bucket/{0..1}.tar", settings)
    assert (
        missing_place(f"{far}/{{0..1}}.tar", settings) == f"{far}/1.tar does not exist, which is the only one missing"
    )
    (far / "empty").mkdir()
    assert missing_place("gs://bucket/empty", settings) == "gs://bucket/empty holds no .parquet and no .tar file"


BASE = "s3://bucket/images"


@pytest.mark.parametrize("name", ["a.png", "./a.png", "x//a.png", f"{BASE}/a.png"])
def test_names_below_the_base(name: str, settings: RemoteSettings) -> None:
    found = RemoteFolder(f"{BASE}/", settings).find(name, "image")
    assert found.url in (f"{BASE}/a.png", f"{BASE}/x/a.png")


@pytest.mark.parametrize(
    "name",
    [
        *("../a.png", "x/../../a.png", "..", "/etc/passwd", "x\\..\\a.png", "a\0b", ".", ""),
        *("s3://bucket/other.png", "s3://bucket/images2/a.png", "s3://other/images/a.png", "gs://bucket/images/a.png"),
        *("http://169.254.169.254/latest", "file:///etc/passwd", "x::file:///etc/passwd", f"{BASE}/../a.png"),
        *(f"{BASE}/s3://other/a.png", "memory://a"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str, settings: RemoteSettings) -> None:
    with pytest.raises(DataError):
        RemoteFolder(BASE, settings).find(name, "image")


def test_names_on_the_web_are_quoted(settings: RemoteSettings) -> None:
    web = RemoteFolder("http://host/images", settings)
    assert web.find("a b?x=1#y.png", "image").url == "http://host/images/a%20b%3Fx%3D1%23y.png"
    assert web.find("%2e%2e/a.png", "image").url == "http://host/images/%252e%252e/a.png"


KEY = "data.data_registry.a.annotation_path"


@pytest.mark.parametrize("scheme", ["ssh", "github", "simplecache", "local", "dask", "sftp"])
def test_other_schemes_are_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"^{KEY}={scheme}://a/b: {scheme}:// addresses are not read; read are s3://"):
        check_address(KEY, f"{scheme}://a/b")
    with pytest.raises(DataError, match="addresses are not read"):
        open_filesystem(f"{scheme}://a/b")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://a::file:///etc/passwd", "addresses in one another"),
        ("http://a/b?sign=1", "with a query"),
        ("https://a/b#c", "or a fragment"),
    ],
)
def test_addresses_that_mean_more_than_a_file_are_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_address(KEY, address)


@pytest.mark.parametrize(("address", "package"), [("s3://a/b", "s3fs"), ("gs://a/b", "gcsfs")])
def test_a_missing_package_is_named(address: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: str) -> None:
        raise ImportError(f"Install {package} to access this")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=f"needs {package}, which is not installed here .* `pip install {package}`"):
        check_address(KEY, address)


def test_what_is_read_is_accepted(faults: Faults) -> None:
    for scheme in sorted(PACKAGES.keys() - {"gcs"}):
        check_address(KEY, f"{scheme}://a/b.json")
    assert faults.infos == []  # nothing is asked for


class Flaky:
    """Raises so many times, then answers."""

    def __init__(self, *errors: Exception):
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


def test_a_hiccup_is_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.data.remote.transfer.PAUSE_S", 8.0)
    pauses: list[float] = []
    action = Flaky(OSError("reset"), RuntimeError("of a library"), TimeoutError("slow"), OSError("503"))
    assert retried("s3://a", action, RemoteSettings(tries=5, seconds=900.0), pauses.append) == 7
    assert pauses == [8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S] and action.calls == 5


def test_what_stays_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    action = Flaky(*[OSError("503 slow down")] * 9)
    with pytest.raises(DataError) as caught:
        retried("s3://bucket/a.json", action, RemoteSettings(tries=4, seconds=60.0))
    said = str(caught.value)
    assert said.startswith("s3://bucket/a.json cannot be read: OSError: 503 slow down, after 4 tries in 0 s.")
    assert "data.fetch_tries=4 and data.fetch_s=60" in said and action.calls == 4


@pytest.mark.parametrize("error", [FileNotFoundError("a"), PermissionError("denied"), IsADirectoryError("a")])
def test_what_another_try_does_not_mend_is_said_at_once(error: Exception) -> None:
    action = Flaky(error, OSError("never asked"))
    with pytest.raises(DataError, match=f"cannot be read: {type(error).__name__}"):
        retried("s3://a", action, RemoteSettings(tries=5))
    assert action.calls == 1


def test_what_hangs_is_left_behind() -> None:
    with pytest.raises(DataError, match="no answer within 0 s, after 1 try"):
        retried("s3://a", lambda: time.sleep(30), RemoteSettings(tries=5, seconds=0.2))


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
