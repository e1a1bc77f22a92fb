"""Rotation of a run's checkpoints: the newest ones and the best are kept."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from dhp.base.errors import CheckpointError
from dhp.base.removal import remove
from dhp.checkpoint.disk import read_json, write_text
from dhp.checkpoint.folder import checkpoints, step_of

BEST = "best"  # in the directory of checkpoints: a link to the best one
ABOUT_BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far. value: of `metric`, the lower the better."""

    step: int
    metric: str
    value: float


def read_best(parent: Path, metric: str) -> Best | None:
    """The best checkpoint by `metric`, as their directory records it, if it is still there. Raises
    CheckpointError for a damaged file."""
    file = parent / ABOUT_BEST
    if not file.is_file():
        return None
    try:
        best = Best(**read_json(file))
    except TypeError as error:  # a key is missing, or unknown
        raise CheckpointError(f"{file} is damaged ({error}). Remove it, or write into it what is best") from error
    return best if best.metric == metric and best.step in map(step_of, checkpoints(parent)) else None


def mark_best(parent: Path, best: Best) -> None:
    """Say in the directory of checkpoints which one is best, and let `best` link there. Each is written completely or
    not at all."""
    link = parent / f"{BEST}.{os.getpid()}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(f"step_{best.step}", target_is_directory=True)
    os.replace(link, parent / BEST)
    unfinished = parent / f"{ABOUT_BEST}.{os.getpid()}.tmp"
    write_text(unfinished, json.dumps(asdict(best), indent=1) + "\n")
    os.replace(unfinished, parent / ABOUT_BEST)


def remove_old(parent: Path, limit: int, best: Best | None) -> list[Path]:
    """Remove all complete checkpoints but the `limit` newest ones and the best; those that went.

    A checkpoint loses its name first, so that no part of one is ever taken for a whole. Of one that is a link, the link
    is removed, and what it points to stays.
    """
    kept = {None if best is None else best.step}
    old = [checkpoint for checkpoint in checkpoints(parent)[limit:] if step_of(checkpoint) not in kept]
    for checkpoint in old:
        gone = checkpoint.with_name(f"{checkpoint.name}.removed")
        remove(gone)
        checkpoint.rename(gone)
        remove(gone)
    return old
