"""Remote files and shards read as local ones."""

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.media.sources import open_media
from dhp.data.read.annotations import open_rows
from dhp.data.remote.places import find_place
from dhp.data.remote.remote_files import RemoteFile, _cache
from dhp.data.remote.transfer import RemoteSettings
from dhp.data.sampling.dataset import Dataset, open_dataset
from dhp.data.sampling.sampler import BatchLayout, RandomSampler
from tests.helpers.buckets import Faults

QUESTIONS = [f"<image>what is {n}?" for n in range(7)]


def sample(number: int) -> dict:
    turns = [{"from": "human", "value": QUESTIONS[number]}, {"from": "gpt", "value": f"It is {number}."}]
    return {"image": ["a.png", "b.jpg", "sub/c.png"][number % 3], "conversations": turns}


SAMPLES = [sample(number) for number in range(7)]


def write(folder: Path, kind: str) -> str:
    """Files of a kind below a folder; the annotation path that means them."""
    if kind == "json":
        (folder / "rows.json").write_text(json.dumps(SAMPLES))
    elif kind == "jsonl":
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, SAMPLES)))
    elif kind == "csv":
        lines = [f"{one['image']},{one['conversations'][0]['value']},yes" for one in SAMPLES]
        (folder / "rows.csv").write_text("\n".join(["images,query,response", *lines]))
    else:
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        for number, part in enumerate((SAMPLES[:3], SAMPLES[3:5], SAMPLES[5:])):
            parquet.write_table(arrow.Table.from_pylist(part), folder / f"rows-{number}.parquet", row_group_size=2)
        return "rows-{0..2}.parquet"
    return f"rows.{kind}"


def opened(annotations: str, images: str, settings: RemoteSettings) -> Dataset:
    return open_dataset(["a"], {"a": DatasetEntry(annotations, images)}, shuffle=False, remote=settings)


def contents(dataset: Dataset) -> list[tuple]:
    """Of every sample its turns' text and its pictures' bytes."""
    found = []
    for index in range(len(dataset)):
        record = dataset.record(index)
        texts = [part for turn in record.turns for part in turn.parts if isinstance(part, str)]
        found.append((record.position, texts, [shown(file) for file in record.images]))
    return found


def shown(file: Any) -> bytes:
    with open_media(file, "image") as opened:
        return opened.read()


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_they_read_as_local_ones(
    kind: str, far: Path, faults: Faults, images: Path, settings: RemoteSettings, tmp_path: Path
) -> None:
    path = write(far, kind)
    images.rename(far / "images")
    local = contents(opened(f"{far}/{path}", f"{far}/images", settings))
    assert len(local) == 7 and all(pictures for _, _, pictures in local)
    assert faults.infos == []
    for scheme in ("s3", "gs", "hf"):
        there = opened(f"{scheme}://bucket/{path}", f"{scheme}://bucket/images", settings)
        assert contents(there) == local
        assert f"{scheme}://bucket/rows" in there.record(3).where


def test_errors_delays_and_short_reads_are_gone_through(
    far: Path, faults: Faults, images: Path, settings: RemoteSettings
) -> None:
    path = write(far, "jsonl")
    images.rename(far / "images")
    local = contents(opened(f"{far}/{path}", f"{far}/images", settings))
    faults.fail, faults.delay_s = 2, 0.01
    dataset = opened(f"s3://bucket/{path}", "s3://bucket/images", settings)
    faults.short, faults.fail = 1, 1
    assert contents(dataset) == local
    assert (faults.short, faults.fail) == (0, 0)


def test_each_file_is_fetched_once_for_all_readers(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    path = write(far, "jsonl")
    for _ in range(2):
        dataset = opened(f"s3://bucket/{path}", "", settings)
        _cache.cache_clear()  # another process
        for index in range(7):
            dataset._portions[0].annotations.rows.read(index)
    assert faults.opened == ["bucket/rows.jsonl"]


def test_a_copy_that_was_removed_is_fetched_again(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    dataset = opened(f"s3://bucket/{write(far, 'jsonl')}", "", settings)
    rows = dataset._portions[0].annotations.rows
    before = [rows.read(index).value for index in range(7)]
    for copy in (Path(str(settings.folder)) / "remote" / "files").rglob("*"):
        if copy.is_file():
            copy.unlink()
    assert [rows.read(index).value for index in range(7)] == before and len(faults.opened) == 2


def test_short_reads_without_end_are_named(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    (far / "a.png").write_bytes(b"x" * 100)
    faults.short = 99
    with pytest.raises(
        DataError, match="s3://bucket/a.png cannot be read: OSError: 50 of 100 bytes came, after 3 tries"
    ):
        open_media(RemoteFile("s3://bucket/a.png", settings), "image")


def test_a_file_that_changes_under_a_run_is_named(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    (far / "a.bin").write_bytes(b"x" * 100)
    file = RemoteFile("s3://bucket/a.bin", settings)
    assert file.size == 100
    (far / "a.bin").write_bytes(b"y" * 70)
    with pytest.raises(DataError, match="s3://bucket/a.bin has changed since it was opened"):
        file.open()


def test_another_state_of_a_file_has_another_copy(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    from dhp.data.remote import remote_files

    (far / "a.bin").write_bytes(b"old")
    file = RemoteFile("s3://bucket/a.bin", settings)
    assert file.read_bytes() == b"old"
    (far / "a.bin").write_bytes(b"new")
    remote_files._about.cache_clear()  # another run
    assert file.read_bytes() == b"new"


def test_an_empty_picture_and_none(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    (far / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"image s3://bucket/a.png is empty \(0 bytes\)"):
        open_media(RemoteFile("s3://bucket/a.png", settings), "image")
    faults.opened.clear()
    with pytest.raises(DataError, match="s3://bucket/b.png cannot be read: FileNotFoundError"):
        open_media(RemoteFile("s3://bucket/b.png", settings), "image")


def test_without_a_cache_all_is_read_all_the_same(far: Path, faults: Faults) -> None:
    dataset = opened(f"s3://bucket/{write(far, 'json')}", "", RemoteSettings())
    assert len(dataset) == 7


def test_parquet_is_indexed_once(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    """A run that goes on fetches the shards that it still reads, none to count its rows."""
    path = write(far, "parquet")
    dataset = opened(f"s3://bucket/{path}", "", settings)
    expected = dataset._portions[0].annotations.rows.read(6).value
    for copy in (Path(str(settings.folder)) / "remote" / "files").rglob("*"):
        if copy.is_file():
            copy.unlink()
    faults.opened.clear()
    rows = open_rows(find_place(f"s3://bucket/{path}", settings))
    assert len(rows) == 7 and faults.opened == []
    assert rows.read(6).value == expected and faults.opened == ["bucket/rows-2.parquet"]


def test_memory_is_a_file_system_too(settings: RemoteSettings) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/made/rows.json", json.dumps(SAMPLES).encode())
    try:
        assert len(opened("memory://made/rows.json", "", settings)) == 7
    finally:
        memory.rm("/made", recursive=True)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(far: Path) -> Iterator[str]:
    """The address of a server of the files below `far`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(far)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_on_the_web(far: Path, images: Path, served: str, settings: RemoteSettings) -> None:
    pytest.importorskip("aiohttp")
    path = write(far, "jsonl")
    images.rename(far / "images")
    local = contents(opened(f"{far}/{path}", f"{far}/images", settings))
    assert contents(opened(f"{served}/{path}", f"{served}/images", settings)) == local
    with pytest.raises(DataError, match="FileNotFoundError"):
        opened(f"{served}/none.jsonl", "", settings)


SIZES = (3, 5, 2, 4)


def write_shards(folder: Path) -> None:
    """shard-00.tar and on: a picture of its own for each sample."""
    number = 0
    for shard, samples in enumerate(SIZES):
        with tarfile.open(folder / f"shard-{shard:02d}.tar", "w") as archive:
            for _ in range(samples):
                picture = io.BytesIO()
                Image.new("RGB", (30, 30), (number * 10, 5, 5)).save(picture, "png")
                turns = [{"from": "human", "value": f"<image>{number}?"}, {"from": "gpt", "value": f"{number}."}]
                _add(archive, f"{number:04d}.json", json.dumps({"conversations": turns}).encode())
                _add(archive, f"{number:04d}.png", picture.getvalue())
                number += 1


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def opened_of_shards(path: str, settings: RemoteSettings) -> Dataset:
    return open_dataset(["a"], {"a": DatasetEntry(path)}, remote=settings)


def read(dataset: Dataset, index: int) -> tuple[str, bytes]:
    record = dataset.record(index)
    (image,) = record.images
    with open_media(image, "image") as opened_of_shards:
        return str(record.turns[-1].parts[0]), opened_of_shards.read()


def forget(settings: RemoteSettings) -> None:
    """Every copy is gone; what is known of shards stays."""
    for path in (Path(str(settings.folder)) / "remote" / "files").rglob("*"):
        if path.is_file():
            path.unlink()


@pytest.mark.parametrize("text", ["shard-{00..03}.tar", "shard-0{0,1,2,3}.tar", ""])
def test_they_read_as_local_ones_of_shards(text: str, far: Path, faults: Faults, settings: RemoteSettings) -> None:
    write_shards(far)
    local = opened_of_shards(f"{far}/{text}", settings)
    there = opened_of_shards(f"s3://bucket/{text}", settings)
    assert len(there) == len(local) == sum(SIZES)
    assert [read(there, index) for index in range(14)] == [read(local, index) for index in range(14)]
    assert there.record(4).where == "dataset 'a', sample 2 of s3://bucket/shard-01.tar"
    assert local.record(4).where == f"dataset 'a', sample 2 of {far}/shard-01.tar"


def test_a_range_takes_those_shards_alone(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    write_shards(far)
    dataset = opened_of_shards("s3://bucket/shard-{01..02}.tar", settings)
    assert [read(dataset, index)[0] for index in range(len(dataset))] == [f"{n}." for n in range(3, 10)]


def test_a_run_that_goes_on_has_the_same_steps_and_counts_no_shard_anew(
    far: Path, faults: Faults, settings: RemoteSettings
) -> None:
    write_shards(far)
    layout = BatchLayout(1, 2, 2)
    dataset = opened_of_shards("s3://bucket/shard-{00..03}.tar", settings)
    sampler = RandomSampler(len(dataset), layout, 4, True)
    indices = [np.array(sampler.batch(step).samples).flatten().tolist() for step in range(3)]
    expected = [[read(dataset, index) for index in of_step] for of_step in indices]
    state = sampler.order(2)
    forget(settings)
    faults.opened.clear()
    again = opened_of_shards("s3://bucket/shard-{00..03}.tar", settings)
    resumed = RandomSampler(len(again), layout, 4, True)
    resumed.load_state_dict({"step": 2, "order": state})
    assert set(faults.opened) <= {f"bucket/shard-0{n}.tar" for n in range(4)}
    before = list(faults.opened)  # the first samples, whose keys tell the format
    following = np.array(next(resumed).samples).flatten().tolist()
    assert following == indices[2]
    assert [read(again, index) for index in following] == expected[2]
    assert len(faults.opened) <= len(before) + len(following)


def test_shards_are_fetched_one_by_one_within_the_limit(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    """Room for two shards of four: each is fetched when it is read, and the folder stays within its limit."""
    from dataclasses import replace

    write_shards(far)
    size = max(path.stat().st_size for path in far.iterdir())
    small = replace(settings, limit_bytes=int(2.5 * size))
    dataset = opened_of_shards("s3://bucket/shard-{00..03}.tar", small)
    local = opened_of_shards(f"{far}/shard-{{00..03}}.tar", small)
    order = [13, 0, 5, 9, 1, 12, 3, 8]
    assert [read(dataset, index) for index in order] == [read(local, index) for index in order]
    kept = [p.stat().st_size for p in (Path(str(settings.folder)) / "remote" / "files").rglob("*") if p.is_file()]
    assert sum(kept) <= 2.5 * size


def test_shards_are_looked_up_once_and_together(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    write_shards(far)
    faults.fail = 2
    assert len(opened_of_shards("s3://bucket/shard-{00..03}.tar", settings)) == 14
    assert sorted(faults.infos) == [f"bucket/shard-0{n}.tar" for n in range(4)]
    with pytest.raises(DataError, match="shard-04.tar cannot be read: FileNotFoundError"):
        opened_of_shards("s3://bucket/shard-{00..04}.tar", settings)


def test_an_index_belongs_to_the_state_of_its_shard(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    from dhp.data.remote import remote_files

    write_shards(far)
    assert len(opened_of_shards("s3://bucket/shard-00.tar", settings)) == 3
    (far / "shard-00.tar").write_bytes((far / "shard-01.tar").read_bytes())
    remote_files._about.cache_clear()  # another run
    assert len(opened_of_shards("s3://bucket/shard-00.tar", settings)) == 5
    assert RemoteFile("s3://bucket/shard-00.tar", settings).suffix == ".tar"
