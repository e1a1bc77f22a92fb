"""A digest of a step's samples that every layout agrees on, and their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from dhp.config.data import DatasetEntry
from dhp.data.sampling.dataset import Dataset, names, open_dataset, rows_of
from dhp.data.sampling.dataset import digest as digest_rows
from dhp.data.sampling.sampler import BatchLayout, RandomSampler, StepBatch

ASKED = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Yes."}]}


def digest(dataset: Dataset, batch: StepBatch) -> str:
    return digest_rows(rows_of(dataset, batch))


@pytest.fixture
def registry(write_json) -> dict[str, DatasetEntry]:
    made = {"a": write_json([ASKED] * 5), "b": write_json([ASKED] * 7, "b.jsonl")}
    return {name: DatasetEntry(annotation_path=str(path)) for name, path in made.items()}


@pytest.fixture
def dataset(registry: dict[str, DatasetEntry]) -> Dataset:
    return open_dataset(["a", "b"], registry)


def batch(*indices: int, epoch: int = 0) -> StepBatch:
    return StepBatch(0, epoch, 0.0, ((indices,),))


def test_it_is_the_checksum_of_names_and_rows(dataset: Dataset) -> None:
    rows = lambda *own: np.array(own, "<i8").tobytes()
    expected = crc32(b"a\0" + rows(1, 4) + b"b\0" + rows(0, 6))
    assert digest(dataset, batch(11, 4, 5, 1)) == f"{expected:08x}"


def test_every_layout_has_the_same(dataset: Dataset) -> None:
    layouts = [BatchLayout(1, 4, 1), BatchLayout(4, 1, 1), BatchLayout(2, 1, 2), BatchLayout(1, 1, 4)]
    samplers = [RandomSampler(len(dataset), layout, 3, True) for layout in layouts]
    found = [[digest(dataset, sampler.batch(step)) for step in range(6)] for sampler in samplers]
    assert found[1:] == found[:1] * 3
    assert len(set(found[0])) == 6  # three of each epoch, which has an order of its own


@pytest.mark.parametrize("other", [(1, 4, 5), (1, 4, 5, 10), (1, 4, 5, 11, 11), (0, 4, 5, 11)])
def test_other_samples_have_another(other: tuple[int, ...], dataset: Dataset) -> None:
    assert digest(dataset, batch(*other)) != digest(dataset, batch(1, 4, 5, 11))


def test_the_datasets_name_is_part_of_it(registry: dict[str, DatasetEntry]) -> None:
    alone = [open_dataset([name], registry) for name in ("a", "b")]
    assert digest(alone[0], batch(0, 1)) != digest(alone[1], batch(0, 1))
    assert digest(open_dataset(["b", "a"], registry), batch(0, 8)) == digest(
        open_dataset(["a", "b"], registry), batch(5, 1)
    )


def test_names_open_the_sample(dataset: Dataset) -> None:
    first, second = names(dataset, batch(6, 0))
    assert first.startswith("index=6, dataset 'b', line 2 of ") and first.endswith("b.jsonl")
    assert second.startswith("index=0, dataset 'a', element 1 of ")
    assert dataset.record(6).where == first.removeprefix("index=6, ")


def test_a_sample_of_a_later_epoch_has_the_index_of_the_first(registry: dict[str, DatasetEntry]) -> None:
    """An epoch shows half of them: the second one those that the first one did not."""
    half = {**registry, "a": replace(registry["a"], weight=0.4)}
    dataset = open_dataset(["b", "a"], half, shuffle=False)
    assert len(dataset) == 7 + 2
    (known,) = names(dataset, batch(7))
    assert known.startswith("index=7, dataset 'a', element 1 of ")
    (unseen,) = names(dataset, batch(7, epoch=1))
    assert unseen.startswith("dataset 'a', element 3 of ")


def test_a_step_without_samples_has_a_digest_too(dataset: Dataset) -> None:
    assert (digest(dataset, batch()), names(dataset, batch())) == ("00000000", ())


def test_a_path_is_no_part_of_it(registry: dict[str, DatasetEntry], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(Path(registry["b"].annotation_path).read_bytes())
    there = open_dataset(["b"], {"b": DatasetEntry(annotation_path=str(moved))})
    assert digest(there, batch(2, 3)) == digest(open_dataset(["b"], registry), batch(3, 2))
