"""A rank's share of a checkpoint: what it holds, written at once or behind the steps that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from dhp.checkpoint.background import BackgroundWriter, Write, run_write
from dhp.checkpoint.manifest import OPTIMIZER
from dhp.checkpoint.shard_writer import ShardWriter
from dhp.core.reports import SavedShare, WrittenFile
from dhp.parallel.optim.base import StageOptimizer


class ShareSaver:
    """Saves what one rank holds of its part.

    number: of the rank in its part; rank: in its stage. writes: false for a rank that others write everything for.
    once: this rank writes what all ranks of the part have alike.
    buffers: persistent ones, saved with the weights. only: names of weights that are saved; None: all.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        writes: bool,
        once: bool,
        buffers: Mapping[str, Tensor],
        only: frozenset[str] | None,
        pinned: bool,
    ) -> None:
        self._number, self._rank, self._writes, self._once = number, rank, writes, once
        self._buffers, self._only = buffers, only
        self._behind = BackgroundWriter(pinned)
        self._saved: SavedShare | None = SavedShare(done=True)  # None: what is behind says it

    def save(self, optimizer: StageOptimizer, folder: Path, background: bool) -> None:
        """Write below the part's `folder`. background: copy it, and write the copies while the rank goes on."""
        self._behind.take(wait=True)  # a checkpoint before
        if background:
            self._saved = None
            self._behind.begin(self._staged(optimizer, folder, self._behind.keep))
        else:
            self._saved = run_write(lambda: self._staged(optimizer, folder, None)())

    def saved(self, wait: bool) -> SavedShare:
        """What the last `save` has written. wait: until all of it is on the disk."""
        found = self._behind.take(wait) if self._saved is None else self._saved
        assert found is not None  # something was begun
        return found

    def _staged(self, optimizer: StageOptimizer, folder: Path, keep: Callable[[str, Tensor], Tensor] | None) -> Write:
        """What writes the share. keep: copies its tensors now; None: they are written as they are met."""
        writers = []
        if self._writes:
            state = ShardWriter(folder / OPTIMIZER, self._number, self._rank, keep=keep, once=self._once)
            optimizer.save_state(state)
            weights = ShardWriter(folder, self._number, self._rank, self._only, keep=keep)
            optimizer.save_weights(weights)
            for name, buffer in self._buffers.items():
                weights.add(name, buffer)
            writers = [(f"{OPTIMIZER}/", state), ("", weights)]

        def write() -> tuple[WrittenFile, ...]:
            files: list[WrittenFile] = []
            for below, writer in writers:
                files += [replace(file, name=f"{below}{file.name}") for file in writer.write()]
            return tuple(files)

        return write
