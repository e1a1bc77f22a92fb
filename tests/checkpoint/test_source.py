"""Saved state is opened by what lies in its folder; a further form of files is a reader in the list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dhp.checkpoint import shard_reader
from dhp.checkpoint.shard_reader import ShardReader, load_shards, mapped_shards, open_source, read_shards
from dhp.checkpoint.shard_writer import ShardWriter, save_shards
from dhp.core.errors import CheckpointError
from tests.helpers.ranks import run_on_ranks


class OneFile:
    """A form of its own: tensors that torch saved whole, in one file."""

    def __init__(self, folder: Path) -> None:
        self._tensors = torch.load(folder / "weights.pt", weights_only=True)

    @staticmethod
    def holds(folder: Path) -> bool:
        return (folder / "weights.pt").is_file()

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def whole(self, name: str) -> Tensor:
        return self._tensors[name]

    def like(self, name: str, held: Tensor) -> Tensor:
        return self._tensors[name]

    def flat(self, name: str, start: int, count: int) -> Tensor:
        return self._tensors[name].flatten()[start : start + count]

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return self._tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def test_pieces_of_ranks_are_read_by_their_reader(tmp_path: Path) -> None:
    save_shards({"a": torch.arange(4.0)}, tmp_path, 0)
    assert isinstance(open_source(tmp_path), ShardReader)


def test_another_form_is_another_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"holds no rank_\*\.json"):
        open_source(tmp_path)
    monkeypatch.setattr(shard_reader, "READERS", [*shard_reader.READERS, OneFile])
    held = {"a": torch.zeros(4)}
    load_shards(held, tmp_path)
    assert held["a"].tolist() == [0.0, 1.0, 2.0, 3.0] == read_shards(tmp_path)["a"].tolist()


def _anonymous(folder: Path, beside: Path) -> int:
    """Bytes of memory that no file stands behind, before and after the tensors were put together."""
    read = lambda: next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("RssAnon")) << 10
    before = read()
    found = mapped_shards(folder, beside, most=8 << 20)
    after = read()
    assert sum(tensor.nbytes for tensor in found.values()) == 8 * (8 << 20)
    return after - before


def test_tensors_are_mapped_not_held(tmp_path: Path) -> None:
    """Of two ranks' pieces new files are made; what one rank has whole is read where it lies."""
    (tmp_path / "beside").mkdir()
    for rank in range(2):
        writer = ShardWriter(tmp_path / "text", rank)
        for number in range(4):
            half = torch.arange(float(1 << 20)) + (rank << 20) + number
            writer.add_flat(f"cut.{number}", half, rank << 20, (2, 1 << 20))
            writer.add(f"whole.{number}", torch.full((1 << 21,), float(number)))
        writer.write()
    [grown] = run_on_ranks(_anonymous, 1, tmp_path / "text", tmp_path / "beside")
    assert grown < 40 << 20  # of 64 MiB; 8 at a time, and what the libraries take
    found = mapped_shards(tmp_path / "text", tmp_path / "beside")
    expected = read_shards(tmp_path / "text")
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
