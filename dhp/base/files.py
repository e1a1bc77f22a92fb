"""Writes files and folders that appear whole or not at all, also when several processes write them at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file; its folder is made where there is none. A crash of the machine may leave it empty or
    half: there is no fsync (`dhp.checkpoint.disk` has one). Raises OSError."""
    with replaced(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path to write: takes the place of `path` when the block ends, and is removed when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def require_writable(folder: Path) -> None:
    """Raises OSError for a folder that cannot be made or written to."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".{uuid4().hex}.tmp"
    probe.touch()
    probe.unlink()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary path to create and fill: renamed to `folder` when the block ends, removed when it raises.

    Where another process was faster, `folder` is the one that it made. OSError when nothing can be written there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        yield partial
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
