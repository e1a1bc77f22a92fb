"""What annotation paths stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.core.files import is_remote, without_file_scheme
from dhp.data.remote.places import Shards, expand, find_place, find_root, missing_place
from dhp.data.remote.remote_files import RemoteFolder
from dhp.data.remote.transfer import RemoteSettings
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
