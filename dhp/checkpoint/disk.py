"""Reads and writes a checkpoint's files: writing survives a crash; errors in reading name the damaged file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dhp.base.errors import CheckpointError

REMEDY = "Resume from an earlier checkpoint (training.resume=auto finds the newest one that is whole)"
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of file systems that cannot do it for a directory


def damaged(file: Path, reason: object) -> CheckpointError:
    """The error for a file that is not what a run wrote."""
    return CheckpointError(f"{file} is damaged ({reason}). {REMEDY}")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what a library says of an empty, cut or overwritten file into CheckpointError with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the checkpoint is incomplete. {REMEDY}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}). {REMEDY}") from error
    except (SafetensorError, ValueError) as error:
        raise damaged(file, error) from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn a full disk, or another failure to write, into CheckpointError with the file's name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{file} cannot be written ({reason}); the checkpoint is not there. Make room, or set another "
            "training.checkpoint_dir; training.resume continues from the last one that is complete"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """An object of JSON. Raises CheckpointError when it is none."""
    with reading(file):
        values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise damaged(file, f"an object of JSON is expected, and it holds {type(values).__name__}")
    return values


def write_text(file: Path, text: str) -> None:
    """Write a file and wait until it is on the disk. Raises CheckpointError."""
    with writing(file):
        file.write_text(text, encoding="utf-8")
        sync(file)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
