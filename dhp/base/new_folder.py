"""Creates a folder atomically, also when several processes create it at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


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
