"""Which addresses are read, and how requests are tried again."""

from __future__ import annotations

import time

import pytest

from dhp.core.errors import ConfigError, DataError
from dhp.data.remote.transfer import LONGEST_PAUSE_S, PACKAGES, RemoteSettings, check_address, open_filesystem, retried
from tests.helpers.buckets import Faults

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
