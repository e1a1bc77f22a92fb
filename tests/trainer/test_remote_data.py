"""Runs whose annotations and pictures are behind addresses."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, DhpError
from dhp.data.remote import remote_files
from dhp.trainer.preflight import prepare
from dhp.trainer.recipe import held_files
from dhp.trainer.settings import needed_paths
from tests.helpers.buckets import Faults, buckets
from tests.helpers.runs import tiny, train

SHAPES = "data.data_registry.shapes"


@pytest.fixture
def far(tiny_assets: Path, tmp_path: Path) -> Iterator[Faults]:
    """s3://bucket has the tiny dataset, and nothing is known of it."""
    shutil.copytree(tiny_assets / "data", tmp_path / "far" / "bucket")
    remote_files._about.cache_clear()
    remote_files._cache.cache_clear()
    with buckets(tmp_path / "far", "s3", "gs") as faults:
        yield faults


def prepared(assets: Path, tmp_path: Path, *overrides: str) -> Config:
    own = [f"tiny_assets={assets}", f"run_dir={tmp_path / 'new'}", f"data.cache_dir={tmp_path / 'cache'}"]
    return prepare(compose_config("tiny", overrides=[*own, *overrides]))


def there(base: str) -> list[str]:
    return [f"{SHAPES}.annotation_path={base}/annotations.json", f"{SHAPES}.data_path={base}"]


def test_addresses_stay_as_they_are(far: Faults, tiny_assets: Path, tmp_path: Path) -> None:
    config = prepared(tiny_assets, tmp_path, *there("s3://bucket"))
    entry = config.data.data_registry["shapes"]
    assert (entry.annotation_path, entry.data_path) == ("s3://bucket/annotations.json", "s3://bucket")
    assert not any("s3:" in path for needs in needed_paths(config, None).values() for path in needs.values())


def test_the_same_annotations_are_the_same_wherever_they_are(far: Faults, tiny_assets: Path, tmp_path: Path) -> None:
    """A run may go on with its data moved into a bucket, but not with other data."""
    local = held_files(prepared(tiny_assets, tmp_path))
    assert held_files(prepared(tiny_assets, tmp_path, *there("s3://bucket"))) == local
    moved = tmp_path / "far" / "bucket" / "annotations.json"
    moved.write_text(json.dumps(json.loads(moved.read_text())[:-1]))
    remote_files._about.cache_clear()
    changed = held_files(prepared(tiny_assets, tmp_path, *there("s3://bucket")))
    assert {key for key in local if local[key] != changed[key]} == {f"contents of {SHAPES}.annotation_path"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (there("s3://bucket/none"), "annotation_path=s3://bucket/none/annotations.json cannot be read: "),
        ([f"{SHAPES}.data_path=ssh://host/a"], "data_path=ssh://host/a: ssh:// addresses are not read"),
        (
            [f"{SHAPES}.annotation_path='s3://bucket/{{0..1}}.tar'"],
            "s3://bucket/{0..1}.tar cannot be read: s3://bucket/",
        ),
        (
            [f"{SHAPES}.annotation_path='/none/{{0..1}}.tar'"],
            "is not whole: /none/0.tar does not exist, which is one of",
        ),
        ([f"{SHAPES}.annotation_path='/none/{{0.tar'"], "annotation_path=/none/{0.tar"),
        (["data.fetch_tries=0"], "data.fetch_tries=0 is out of range"),
        (["data.cache_gib=-1"], "data.cache_gib=-1"),
    ],
)
def test_what_cannot_be_read_is_named_before_anything_starts(
    overrides: list[str], said: str, far: Faults, tiny_assets: Path, tmp_path: Path
) -> None:
    with pytest.raises(DhpError) as caught:
        prepared(tiny_assets, tmp_path, *overrides)
    assert said in str(caught.value)


def test_a_package_that_is_not_installed_is_named(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(scheme: str) -> None:
        raise ImportError("no")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(
        ConfigError, match=f"{SHAPES}.annotation_path=gs://b/annotations.json needs gcsfs, .* install gcsfs"
    ):
        prepared(tiny_assets, tmp_path, *there("gs://b"))


class Unsteady(SimpleHTTPRequestHandler):
    """Refuses every seventh request, and breaks every eleventh answer off."""

    count = 0

    def do_GET(self) -> None:
        Unsteady.count += 1
        if Unsteady.count % 7 == 0:
            self.send_error(503)
            return
        if Unsteady.count % 11 == 0:
            path = Path(self.translate_path(self.path))
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            self.wfile.write(path.read_bytes()[:50])
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tiny_assets: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    handler = partial(Unsteady, directory=str(tiny_assets / "data"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_a_run_from_an_unsteady_server_equals_one_from_the_disk(served: str, tiny_assets: Path, tmp_path: Path) -> None:
    found = {}
    for name, more in (("near", []), ("far", there(served))):
        own = [f"data.cache_dir={tmp_path / 'cache'}", "training.max_steps=3", "data.num_workers=2", *more]
        outcome = train(*tiny(tiny_assets, tmp_path / name, *own))
        assert outcome.status == 0, outcome.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [(line["loss"], line["grad_norm"], line["sample_digest"], line["images"]) for line in lines]
    assert found["far"] == found["near"] and len(found["near"]) == 3
    assert Unsteady.count > 7
    assert any(path.is_file() for path in (tmp_path / "cache" / "remote" / "files").rglob("*"))
