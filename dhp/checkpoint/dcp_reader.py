"""Lets torch's distributed checkpoint (DCP) read a checkpoint of dhp, into tensors that are laid out in any way."""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dhp.checkpoint.shard_files import RegionBlock, overlap
from dhp.checkpoint.shard_reader import ShardReader
from dhp.core.errors import CheckpointError


class DcpReader(StorageReader):
    """`torch.distributed.checkpoint.load(state, storage_reader=DcpReader(folder))`.

    Each tensor of `state`, by its name in the checkpoint, is filled from the pieces that dhp's ranks wrote: elements go
    from the mapped file to where they belong, once. A tensor may be plain, a DTensor of any mesh, or from torch 2.14 on
    one that says which pieces it has (CheckpointableTensor)."""

    def __init__(self, folder: Path | str) -> None:
        """folder: of a checkpoint, whose parts' weights are read together; of one part; or of its optimizer's states.
        Raises CheckpointError where there is nothing of this form, or a file is missing."""
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another folder."""
        if checkpoint_id is None:
            return
        folder = Path(checkpoint_id)
        parts = [folder] if ShardReader.holds(folder) else list(filter(ShardReader.holds, sorted(folder.glob("*/"))))
        if not parts:
            raise CheckpointError(f"{folder} holds no tensors as dhp writes them (rank_*.json). Give a step_N folder")
        self._readers = {name: reader for reader in map(ShardReader, parts) for name in reader.names}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes, number formats and pieces of all tensors. Raises CheckpointError where pieces are missing."""
        tensors = {name: _about(reader, name) for name, reader in self._readers.items()}
        return Metadata(state_dict_metadata=dict(tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed: every rank reads for itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner has room for. Raises CheckpointError for pieces that are missing, do not fit or are
        damaged."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            name = item.storage_index.fqn
            reader, block = self._readers[name], _block(item)
            reader.check_values(name, block)
            reader.fill(name, block, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder of this form."""
        folder = Path(checkpoint_id)
        return any(ShardReader.holds(one) for one in (folder, *folder.glob("*/")))


def _about(reader: ShardReader, name: str) -> TensorStorageMetadata:
    blocks, shape = reader.blocks(name), reader.shape(name)
    held = sum(block.count for block in blocks)
    if held != prod(shape) or overlap(blocks):  # DCP leaves what no chunk has as it was
        raise CheckpointError(
            f"the pieces of {name} hold {held} values of the {prod(shape)} of its shape {list(shape)}: a rank's file "
            "is missing or was added twice. Read another checkpoint"
        )
    chunks = [_chunk(block) for block in blocks]
    return TensorStorageMetadata(TensorProperties(dtype=reader.dtype(name)), torch.Size(shape), chunks)


def _chunk(block: RegionBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offset), sizes=torch.Size(block.shape))


def _block(item: ReadItem) -> RegionBlock:
    """The elements of the whole tensor that an item asks for: it counts from the beginning of a chunk."""
    index: MetadataIndex = item.storage_index
    begin: Sequence[int] = index.offset or (0,) * len(item.lengths)
    offset = tuple(first + inside for first, inside in zip(begin, item.storage_offsets, strict=True))
    return RegionBlock(offset, tuple(item.lengths))
