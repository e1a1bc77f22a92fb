"""Writes a rank's share of a checkpoint while the rank goes on: its tensors are copied to host memory that is kept from
one checkpoint to the next, and a thread writes the copies.

New memory is what copying costs: into pages that are there already it takes an eighth of the time. Whatever ranks do
together belongs before the copies: a thread that waited for other ranks would meet them in another order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from dhp.core.errors import CheckpointError
from dhp.core.reports import SavedShare, WrittenFile

Write = Callable[[], tuple[WrittenFile, ...]]


class BackgroundWriter:
    """One at a time: `keep` the tensors, `begin`, and `take` until it is done."""

    def __init__(self, pinned: bool = False) -> None:
        """pinned: the copies are in memory that a GPU writes to without help."""
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._thread: threading.Thread | None = None
        self._saved: SavedShare | None = None
        self._raised: BaseException | None = None

    def keep(self, key: str, piece: Tensor) -> Tensor:
        """A copy of a tensor in host memory. It stays as it is until the next `keep` of the key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != piece.shape or buffer.dtype != piece.dtype:
            buffer = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=self._pinned)
            self._buffers[key] = buffer
        buffer.copy_(piece, non_blocking=self._pinned)
        self._used.add(key)
        return buffer

    def begin(self, write: Write) -> None:
        """Write what was kept, in a thread. Raises RuntimeError while another checkpoint is being written."""
        if self._thread is not None:
            raise RuntimeError("a checkpoint is being written already")
        if self._pinned:
            torch.cuda.synchronize()
        for key in self._buffers.keys() - self._used:  # of tensors that are there no more
            del self._buffers[key]
        self._used = set()
        self._saved = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def take(self, wait: bool) -> SavedShare | None:
        """What has been written; while it is being written, and `wait` is false, that it is not done. None: nothing was
        begun yet. Raises what writing raised, but for files that cannot be written."""
        if self._thread is not None:
            self._thread.join(None if wait else 0)
            if self._thread.is_alive():
                return SavedShare(done=False)
            self._thread = None
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return self._saved

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it keeps."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _run(self, write: Write) -> None:
        try:
            self._saved = run_write(write)
        except BaseException as error:  # a thread's exception reaches nobody by itself: `take` raises it
            self._raised = error


def run_write(write: Write) -> SavedShare:
    """The files that `write` wrote, or why it could not: a full disk ends no run."""
    try:
        return SavedShare(done=True, files=write())
    except CheckpointError as error:
        return SavedShare(done=True, error=str(error))
