"""Saved state is opened by what lies in its folder; a further form of files is a reader in the list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dhp.checkpoint import source
from dhp.checkpoint.shard_reader import ShardReader
from dhp.checkpoint.shard_writer import save_shards
from dhp.checkpoint.source import load_shards, open_source, read_shards
from dhp.core.errors import CheckpointError


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
    monkeypatch.setattr(source, "READERS", [*source.READERS, OneFile])
    held = {"a": torch.zeros(4)}
    load_shards(held, tmp_path)
    assert held["a"].tolist() == [0.0, 1.0, 2.0, 3.0] == read_shards(tmp_path)["a"].tolist()
