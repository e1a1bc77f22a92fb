"""A token in the directory of checkpoints says which run may write there, so that a process that wakes later cannot.

A lock alone does not do: a network file system may hand it on while its holder is stopped, or cut off from it, and
lives. Before a holder gives a checkpoint its name or removes one, it reads the token again.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from dhp.core.errors import CheckpointError
from dhp.core.files import write_whole

NAME = ".attempt.json"


class TakenOver(CheckpointError):
    """Another run has the directory of checkpoints now."""


@dataclass(frozen=True)
class Token:
    """Who may write. id: of one attempt of one run, unlike any other's."""

    id: str
    host: str
    pid: int


_OWN: dict[Path, Token] = {}  # of this process, by directory


@contextmanager
def fenced(folder: Path) -> Iterator[None]:
    """From here on no other process's run finishes or removes a checkpoint in `folder`, which exists. The
    caller holds the directory's lock. Raises OSError where nothing can be written there."""
    path, token = folder.resolve(), Token(uuid4().hex, socket.gethostname(), os.getpid())
    write_whole(path / NAME, json.dumps(asdict(token)))
    _OWN[path] = token
    try:
        yield
    finally:
        del _OWN[path]
        with suppress(OSError):  # the error to report is the run's own
            if read_token(path) == token:
                (path / NAME).unlink()


def require_own(folder: Path) -> None:
    """Raise TakenOver where this process has fenced `folder` and another run has done so since, or has done so
    and ended; CheckpointError where it cannot be read."""
    own = _OWN.get(folder.resolve())
    if own is None:
        return
    now = read_token(folder)
    if now == own:
        return
    if now is None and not _is_readable(folder):
        raise CheckpointError(f"training.checkpoint_dir={folder} cannot be read, so nothing is added to it now")
    other = "whose run has ended" if now is None else f"process {now.pid} on host {now.host}"
    raise TakenOver(
        f"training.checkpoint_dir={folder} was taken over by another attempt of this run, or another run "
        f"({other}), while this process was stopped or cut off from it. Nothing was renamed or removed; this process "
        "has nothing left to do"
    )


def _is_readable(folder: Path) -> bool:
    """Whether what is in the folder can be read: of a disk that fails, it cannot."""
    try:
        return NAME not in os.listdir(folder) or bool((folder / NAME).read_bytes())
    except OSError:
        return False


def read_token(folder: Path) -> Token | None:
    """The token there; None: there is none, or no whole one."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return Token(str(found["id"]), str(found["host"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
