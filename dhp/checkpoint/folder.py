"""A checkpoint's directory: written as `.partial`, then renamed, so that a name without `.partial` is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any

from dhp.checkpoint.files import check_part, damaged, read_header, read_json, reading, sync, write_text, writing
from dhp.config.parts import PARTS
from dhp.core.errors import CheckpointError, ConfigError
from dhp.core.fencing import require_own
from dhp.core.files import remove

ABOUT = "checkpoint.json"
MODEL = "model"  # configuration, tokenizer and processors of the model, without weights
TEMPLATES = ("chat_template.jinja", "chat_template.json")  # the first beats what tokenizer_config.json says
OPTIMIZER, RANDOM = "optimizer", "random"  # in each part's folder
FILES = "files"  # in checkpoint.json: bytes of each of the others
RESUMED = ("step", "parts", "settings", "skipped_samples", "data", FILES)  # what a resume needs of checkpoint.json

_ABOUT_TYPES = {"step": int, "parts": list, "settings": dict, "skipped_samples": int, "data": dict, FILES: dict}


def check_writable(parent: Path) -> None:
    """Make the directory of checkpoints. Raises ConfigError when it cannot be written: better now than after hours of
    training."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ConfigError(f"training.checkpoint_dir={parent} cannot be written ({error}); choose another") from error


def open_checkpoint(parent: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into. Raises CheckpointError when there is one already."""
    _require_none(parent.absolute() / f"step_{step}")
    folder = parent.absolute() / f"step_{step}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        folder.mkdir(parents=True)
    return folder


class Unfinished:
    """The checkpoints that a run has begun and not finished. Leaving it as a context removes them, as far as it can: a
    run that ended meanwhile never finishes them, and a full disk needs the room."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()

    def add(self, folder: Path) -> Path:
        """Remember one that was opened, which is returned."""
        self._folders.add(folder)
        return folder

    def discard(self, folder: Path) -> None:
        """Forget one that is finished."""
        self._folders.discard(folder)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:  # kept in mind: ranks that still run may write into it once more
            shutil.rmtree(folder, ignore_errors=True)


def finish_checkpoint(
    folder: Path, about: Mapping[str, Any], model_files: Sequence[Path], chat_template: str | None = None
) -> Path:
    """Add what an export needs besides weights, and give the directory its final name, which is returned.

    chat_template: the one that was trained with, where it is not the model's own.
    """
    final = folder.with_suffix("")
    with writing(folder):
        (folder / MODEL).mkdir()
        if chat_template is not None:
            model_files = [file for file in model_files if file.name not in TEMPLATES]
            write_text(folder / MODEL / TEMPLATES[0], chat_template)
        for file in model_files:
            copy = Path(shutil.copy(file, folder / MODEL / file.name))
            sync(copy)
        files = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)}
        write_text(folder / ABOUT, json.dumps(dict(about) | {FILES: files}, indent=2) + "\n")
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            sync(inner)
        sync(folder)
        _require_none(final)
        shutil.rmtree(final, ignore_errors=True)
        require_own(final.parent)
        folder.rename(final)
        sync(final.parent)
    return final


def check_checkpoint(checkpoint: Path) -> None:
    """Raise CheckpointError, naming the file, unless everything in it that a resume reads can be read."""
    about = read_about(checkpoint, RESUMED)
    for name, size in about[FILES].items():  # a copy that was cut off lacks some that no other file mentions
        with reading(checkpoint / name):
            found = (checkpoint / name).stat().st_size
        if found != size:
            raise damaged(checkpoint / name, f"it has {found} bytes of {size}")
    for part in about["parts"]:
        folder = checkpoint / str(part)
        check_part(folder)
        check_part(folder / OPTIMIZER)
        for file in sorted((folder / RANDOM).glob("rank_*.safetensors")):
            read_header(file)
    for file in sorted((checkpoint / MODEL).glob("*.json")):
        read_json(file)


def quarantine(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to `step_N.damaged`, so that the run may write its step again; its new path."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)  # of the same step, damaged before
    with writing(aside):
        return checkpoint.rename(aside)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _require_none(final: Path) -> None:
    """Raise CheckpointError where the checkpoint is there already."""
    if (final / ABOUT).is_file():
        raise CheckpointError(
            f"{final} is complete already: another run writes to the same training.checkpoint_dir. Give each its own"
        )


def find_checkpoint(run_or_checkpoint: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run directory or of a directory of checkpoints.

    Raises CheckpointError when there is none.
    """
    if not run_or_checkpoint.is_dir():
        raise CheckpointError(f"{run_or_checkpoint} is no directory; give a run directory or a checkpoint in it")
    if (run_or_checkpoint / ABOUT).is_file():
        return run_or_checkpoint
    for parent in (run_or_checkpoint / "checkpoints", run_or_checkpoint):
        newest = newest_checkpoint(parent)
        if newest is not None:
            return newest
    raise CheckpointError(
        f"{run_or_checkpoint} holds no complete checkpoint (a step_N directory with {ABOUT}); "
        "a run leaves one every training.save_steps steps and one at its end"
    )


def newest_checkpoint(parent: Path) -> Path | None:
    """The complete checkpoint of the latest step in a directory of checkpoints, if there is one."""
    return next(iter(checkpoints(parent)), None)


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints in a directory of them, the latest step first. Complete ones may be damaged since."""
    found = [f for f in parent.glob("step_*") if (f / ABOUT).is_file() and f.name[5:].isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The number in a checkpoint's name."""
    return int(checkpoint.name[5:])


def read_about(checkpoint: Path, needed: Sequence[str] = ("step",)) -> dict[str, Any]:
    """The contents of checkpoint.json: step, model_name, parts, settings, skipped_samples, data, files.

    Raises CheckpointError when the file is damaged, lacks one of `needed`, or names what is no part of a model or is
    outside the checkpoint.
    """
    file = checkpoint / ABOUT
    about = read_json(file)
    for name in needed:
        kind = _ABOUT_TYPES[name]
        value = about.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise damaged(file, f"{name} should be {kind.__name__}, and is {about.get(name, 'missing')!r:.200}")
    for part in about.get("parts", ()):
        if part not in PARTS:
            raise damaged(file, f"parts has {part!r:.200}, which is no part of a model")
    for name, size in about.get(FILES, {}).items():
        if not _is_inside(name) or not isinstance(size, int) or size < 0:
            raise damaged(file, f"files has {name!r:.200} of {size!r:.200} bytes")
    return about


def _is_inside(name: str) -> bool:
    """Whether a name in a file leads to somewhere below the file's own folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


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
