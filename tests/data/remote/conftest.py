from collections.abc import Iterator
from pathlib import Path

import pytest

from dhp.data.remote import remote_files, transfer
from dhp.data.remote.transfer import RemoteSettings
from tests.helpers.buckets import Faults, buckets


@pytest.fixture(autouse=True)
def _unknown_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process: nothing is known of any file; and no pause between tries."""
    remote_files._about.cache_clear()
    remote_files._cache.cache_clear()
    monkeypatch.setattr(transfer, "PAUSE_S", 0.0)


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """The folder behind s3://bucket and gs://bucket."""
    folder = tmp_path / "far" / "bucket"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def faults(far: Path) -> Iterator[Faults]:
    with buckets(far.parent, "s3", "gs", "hf") as made:
        yield made


@pytest.fixture
def settings(tmp_path: Path) -> RemoteSettings:
    return RemoteSettings(str(tmp_path / "cache"), None, tries=3, seconds=60.0)
