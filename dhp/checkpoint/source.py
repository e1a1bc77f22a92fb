"""Opens the saved state of a part, by what lies in its folder: each form of files has a reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp.checkpoint.files import read_extents
from dhp.checkpoint.shard_reader import EXTENTS, ShardReader
from dhp.checkpoint.tensor_file import write_tensors
from dhp.core.errors import CheckpointError
from dhp.core.state import StateSource


class Reader(Protocol):
    """A form of files."""

    @staticmethod
    def holds(folder: Path) -> bool:
        """Whether the folder has files of this form."""

    def __call__(self, folder: Path) -> StateSource:
        """Its tensors. Raises CheckpointError where files are missing or damaged."""


READERS: list[Reader] = [ShardReader]  # another form of files is another line


def open_source(folder: Path) -> StateSource:
    """The tensors of a folder. Raises CheckpointError where no reader knows its files, or one finds them damaged."""
    for reader in READERS:
        if reader.holds(folder):
            return reader(folder)
    raise CheckpointError(f"{folder} holds no rank_*.json: it is no part of a checkpoint")


def stored_formats(folder: Path) -> set[str]:
    """Number formats of a part's weights, as safetensors names them; none known of a checkpoint of format 1. Raises
    CheckpointError for damaged files."""
    extents = (extent for file in sorted(folder.glob(EXTENTS)) for extent in read_extents(file).values())
    return {extent["dtype"] for extent in extents if "dtype" in extent}


def load_shards(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Give a part the weights that `save_shards` wrote. Raises CheckpointError when they are not this model's."""
    reader = open_source(folder)
    with torch.no_grad():
        for name, weight in weights.items():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.copy_(reader.like(name, weight))


def mapped_shards(folder: Path, beside: Path, most: int = 1 << 30) -> Mapping[str, Tensor]:
    """The whole tensors of a part by name, in files that are mapped, so that they take memory only as far as there is
    some to spare: the checkpoint's own, and of those that several ranks had pieces of new ones below `beside`.

    most: bytes that are put together in memory at a time, or one tensor's. Raises CheckpointError as `read_shards`.
    """
    reader, found = open_source(folder), dict[str, Tensor]()
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        file = beside / f"{folder.name}_{len(found)}.safetensors"
        write_tensors(waiting, file)
        with safe_open(file, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in waiting})
        waiting.clear()

    for name in reader.names:
        stored = reader.stored(name)
        if stored is not None:
            found[name] = stored
            continue
        waiting[name] = reader.whole(name)
        if sum(tensor.nbytes for tensor in waiting.values()) >= most:
            write()
    if waiting:
        write()
    return {name: found[name] for name in reader.names}


def read_shards(folder: Path) -> Mapping[str, Tensor]:
    """The whole tensors of a part by name.

    Raises CheckpointError when a piece is missing or does not fit.
    """
    reader = open_source(folder)
    return {name: reader.whole(name) for name in reader.names}
