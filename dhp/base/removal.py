"""Removes a run's own files and folders, never the target of a link."""

from __future__ import annotations

import shutil
from pathlib import Path


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link as such; nothing there is no error. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
