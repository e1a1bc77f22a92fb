"""WebDataset shards behind addresses: any sample, in any order, the same after a resume."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.media.sources import open_media
from dhp.data.remote.remote_files import RemoteFile
from dhp.data.remote.transfer import RemoteSettings
from dhp.data.sampling.dataset import Dataset, open_dataset
from dhp.data.sampling.sampler import BatchLayout, RandomSampler
from tests.helpers.buckets import Faults

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


def opened(path: str, settings: RemoteSettings) -> Dataset:
    return open_dataset(["a"], {"a": DatasetEntry(path)}, remote=settings)


def read(dataset: Dataset, index: int) -> tuple[str, bytes]:
    record = dataset.record(index)
    (image,) = record.images
    with open_media(image, "image") as opened:
        return str(record.turns[-1].parts[0]), opened.read()


def forget(settings: RemoteSettings) -> None:
    """Every copy is gone; what is known of shards stays."""
    for path in (Path(str(settings.folder)) / "remote" / "files").rglob("*"):
        if path.is_file():
            path.unlink()


@pytest.mark.parametrize("text", ["shard-{00..03}.tar", "shard-0{0,1,2,3}.tar", ""])
def test_they_read_as_local_ones(text: str, far: Path, faults: Faults, settings: RemoteSettings) -> None:
    write_shards(far)
    local = opened(f"{far}/{text}", settings)
    there = opened(f"s3://bucket/{text}", settings)
    assert len(there) == len(local) == sum(SIZES)
    assert [read(there, index) for index in range(14)] == [read(local, index) for index in range(14)]
    assert there.record(4).where == "dataset 'a', sample 2 of s3://bucket/shard-01.tar"
    assert local.record(4).where == f"dataset 'a', sample 2 of {far}/shard-01.tar"


def test_a_range_takes_those_shards_alone(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    write_shards(far)
    dataset = opened("s3://bucket/shard-{01..02}.tar", settings)
    assert [read(dataset, index)[0] for index in range(len(dataset))] == [f"{n}." for n in range(3, 10)]


def test_a_run_that_goes_on_has_the_same_steps_and_counts_no_shard_anew(
    far: Path, faults: Faults, settings: RemoteSettings
) -> None:
    write_shards(far)
    layout = BatchLayout(1, 2, 2)
    dataset = opened("s3://bucket/shard-{00..03}.tar", settings)
    sampler = RandomSampler(len(dataset), layout, 4, True)
    indices = [np.array(sampler.batch(step).samples).flatten().tolist() for step in range(3)]
    expected = [[read(dataset, index) for index in of_step] for of_step in indices]
    state = sampler.order(2)
    forget(settings)
    faults.opened.clear()
    again = opened("s3://bucket/shard-{00..03}.tar", settings)
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
    dataset = opened("s3://bucket/shard-{00..03}.tar", small)
    local = opened(f"{far}/shard-{{00..03}}.tar", small)
    order = [13, 0, 5, 9, 1, 12, 3, 8]
    assert [read(dataset, index) for index in order] == [read(local, index) for index in order]
    kept = [p.stat().st_size for p in (Path(str(settings.folder)) / "remote" / "files").rglob("*") if p.is_file()]
    assert sum(kept) <= 2.5 * size


def test_shards_are_looked_up_once_and_together(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    write_shards(far)
    faults.fail = 2
    assert len(opened("s3://bucket/shard-{00..03}.tar", settings)) == 14
    assert sorted(faults.infos) == [f"bucket/shard-0{n}.tar" for n in range(4)]
    with pytest.raises(DataError, match="shard-04.tar cannot be read: FileNotFoundError"):
        opened("s3://bucket/shard-{00..04}.tar", settings)


def test_an_index_belongs_to_the_state_of_its_shard(far: Path, faults: Faults, settings: RemoteSettings) -> None:
    from dhp.data.remote import remote_files

    write_shards(far)
    assert len(opened("s3://bucket/shard-00.tar", settings)) == 3
    (far / "shard-00.tar").write_bytes((far / "shard-01.tar").read_bytes())
    remote_files._about.cache_clear()  # another run
    assert len(opened("s3://bucket/shard-00.tar", settings)) == 5
    assert RemoteFile("s3://bucket/shard-00.tar", settings).suffix == ".tar"
