"""Writes a checkpoint's directory whole, with a manifest of checksums."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any
from zlib import crc32

from dhp.checkpoint.shard_files import CHECKSUM, check_part, damaged, read_json, reading, sync, write_text, writing
from dhp.config.parts import PARTS
from dhp.core.errors import CheckpointError, ConfigError
from dhp.core.files import remove
from dhp.core.locks import require_fence
from dhp.core.process import say_nothing
from dhp.core.reports import WrittenFile
from dhp.core.text import did_you_mean, nearest

ABOUT = "checkpoint.json"
MODEL = "model"  # configuration, tokenizer and processors of the model, without weights
OPTIMIZER = "optimizer"  # in each part's folder
FILES = "files"  # in checkpoint.json: bytes and checksum of each of the others
FORMAT = "format"
NEWEST = 2  # format 1 has no number, and sizes alone
EARLY_STOPPING = "early_stopping"  # the state of training.early_stopping; not in those of earlier releases
RESUMED = ("step", "parts", "settings", "skipped_samples", "data", FILES)  # what a resume needs of checkpoint.json

_BYTES = "bytes"
_TYPES = {"step": int, "parts": list, "settings": dict, "skipped_samples": int, "data": dict, FILES: dict}
_CHUNK = 1 << 20
_LARGE = 1 << 30  # bytes, from which on it is said that they are read


class LaterFormat(CheckpointError):
    """A checkpoint of a later release. Nothing is wrong with it, so no older one stands in for it."""


def write_about(folder: Path, about: Mapping[str, Any], files: Iterable[WrittenFile]) -> None:
    """Write checkpoint.json, the last of a checkpoint's files. Raises CheckpointError."""
    listed = {one.name: {_BYTES: one.nbytes, CHECKSUM: one.crc32} for one in sorted(files, key=lambda one: one.name)}
    values = {FORMAT: NEWEST} | dict(about) | {FILES: listed}
    write_text(folder / ABOUT, json.dumps(values | {CHECKSUM: _manifest_checksum(values)}, indent=2) + "\n")


def read_about(checkpoint: Path, needed: Sequence[str] = ("step",)) -> dict[str, Any]:
    """The contents of checkpoint.json: format, step, model_name, parts, settings, skipped_samples, data, files, crc32.

    Raises CheckpointError when the file is damaged, of a later format, lacks one of `needed`, or names what is no part
    of a model or is outside the checkpoint."""
    file = checkpoint / ABOUT
    if not file.is_file() and checkpoint.is_dir():
        raise CheckpointError(f"{file} is missing: without it nothing says whether the checkpoint is whole")
    about = read_json(file)
    number = about.get(FORMAT, 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise damaged(file, f"{FORMAT} should be a number from 1 on, and is {number!r:.200}")
    if number > 1 and about.get(CHECKSUM) != _manifest_checksum(about):
        raise damaged(file, "its crc32 is not that of what it says")
    if number > NEWEST:
        raise LaterFormat(
            f"{checkpoint} has format {number}, and this release of dhp reads formats up to {NEWEST}: a later release "
            "wrote it. Use that release; nothing was changed"
        )
    for name in needed:
        kind = _TYPES[name]
        value = about.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise damaged(file, f"{name} should be {kind.__name__}, and is {about.get(name, 'missing')!r:.200}")
    for part in about.get("parts", ()):
        if part not in PARTS:
            raise damaged(file, f"parts has {part!r:.200}, which is no part of a model")
    for name, listed in about.get(FILES, {}).items():
        if not _is_inside(name) or not all(type(n) is int and n >= 0 for n in _read_entry(listed, number)):
            raise damaged(file, f"files has {name!r:.200} of {listed!r:.200}")
    return about


def check_checkpoint(checkpoint: Path, say: Callable[[str], None] = say_nothing, contents: bool = True) -> None:
    """Raise CheckpointError, naming the file, unless everything in it is as it was written and can be read.

    contents: all bytes are read and summed up; else sizes, headers and extents are looked at alone, as they are of a
    checkpoint of format 1, which has no checksums. say: receives a line before much is read."""
    about = read_about(checkpoint, RESUMED)
    sizes = {name: _read_entry(listed, about.get(FORMAT, 1)) for name, listed in about[FILES].items()}
    for name, (size, *_) in sizes.items():  # a copy that was cut off lacks some that no other file mentions
        with reading(checkpoint / name):
            found = (checkpoint / name).stat().st_size
        if found != size:
            raise damaged(checkpoint / name, f"it has {found} bytes of {size}")
    if contents:
        _check_sums(checkpoint, {name: sums[0] for name, (_, *sums) in sizes.items() if sums}, say)
    for part in about["parts"]:
        folder = checkpoint / str(part)
        check_part(folder)
        check_part(folder / OPTIMIZER)
    for file in sorted((checkpoint / MODEL).glob("*.json")):
        read_json(file)


def has_checksums(about: Mapping[str, Any]) -> bool:
    """Whether the files of a checkpoint have checksums: from format 2 on."""
    return bool(about.get(FORMAT, 1) >= 2)


def file_checksum(file: Path) -> int:
    """The crc32 of a file's bytes. Raises OSError."""
    checksum = 0
    with open(file, "rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK):
            checksum = crc32(chunk, checksum)
    return checksum


def _check_sums(checkpoint: Path, sums: Mapping[str, int], say: Callable[[str], None]) -> None:
    total = sum((checkpoint / name).stat().st_size for name in sums)
    if total >= _LARGE:
        say(f"reading {total / 1e9:.1f} GB of {checkpoint.name} to compare checksums")

    def check(name: str) -> None:
        file = checkpoint / name
        with reading(file):
            found = file_checksum(file)
        if found != sums[name]:
            raise damaged(file, f"its crc32 is {found:08x}, and {sums[name]:08x} was written")

    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:  # reading and summing leave Python's lock
        for _ in pool.map(check, sums):
            pass


def _manifest_checksum(about: Mapping[str, Any]) -> int:
    """Of what checkpoint.json says, but for the checksum itself, however it is laid out in lines."""
    values = {key: value for key, value in about.items() if key != CHECKSUM}
    return crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _read_entry(listed: Any, number: int) -> tuple[Any, ...]:
    """Bytes of a file, and from format 2 on its checksum, as checkpoint.json lists them."""
    if number == 1:
        return (listed,)
    return (listed.get(_BYTES), listed.get(CHECKSUM)) if isinstance(listed, dict) else (None,)


def _is_inside(name: str) -> bool:
    """Whether a name in a file leads to somewhere below the file's own folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE_KEY = "chat_template"  # in the following, of which the first beats chat_template.jinja
_WITH_TEMPLATE = ("processor_config.json", "tokenizer_config.json")


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


def remove_unfinished(parent: Path) -> None:
    """Remove what runs have left half written or half removed in a directory of checkpoints that no other holds."""
    for leftover in [*parent.glob("step_*.partial"), *parent.glob("step_*.removed")]:
        if leftover.name.split(".")[0][5:].isdecimal():
            shutil.rmtree(leftover, ignore_errors=True)


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
            with suppress(CheckpointError):  # TakenOver: then a folder of that name is the other run's
                require_fence(folder.parent)
                shutil.rmtree(folder, ignore_errors=True)


def read_model_files(files: Sequence[Path], chat_template: str | None = None) -> dict[str, bytes]:
    """The contents of `files` by their names. chat_template: the one that was trained with, where it is not the model's
    own; it takes the place of those in all files that hold one. Raises OSError for a file that cannot be read,
    CheckpointError for one of these that is no JSON object."""
    found = {file.name: file.read_bytes() for file in files}
    if chat_template is None:
        return found
    for name in TEMPLATES:
        found.pop(name, None)
    for name in _WITH_TEMPLATE:
        try:
            kept = dict(json.loads(found.get(name, b"{}")))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{name} of the model is no JSON object ({error}). Copy it again") from error
        if kept.pop(_TEMPLATE_KEY, None) is not None:
            found[name] = (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
    return found | {TEMPLATES[0]: chat_template.encode()}


def finish_checkpoint(
    folder: Path, about: Mapping[str, Any], model_files: Mapping[str, bytes], written: Iterable[WrittenFile] = ()
) -> Path:
    """Add what an export needs besides weights, and give the directory its final name, which is returned.

    model_files: of the model's directory but its weights, by name. written: files that ranks wrote, by their names in
    the checkpoint; others are read for their checksums. Raises CheckpointError where one is not there in its size."""
    final = folder.with_suffix("")
    with writing(folder):
        (folder / MODEL).mkdir()
        for name, content in model_files.items():
            (folder / MODEL / name).write_bytes(content)
            sync(folder / MODEL / name)
        write_about(folder, about, _list_files(folder, written))
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            sync(inner)
        sync(folder)
        _require_none(final)
        require_fence(final.parent)
        folder.rename(final)
        sync(final.parent)
    return final


def quarantine(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to `step_N.damaged`, or `step_N.damaged.2` and so on where there is one, so that the
    run may write its step again; its new path."""
    names = (f"{checkpoint.name}.damaged{f'.{number}' if number > 1 else ''}" for number in count(1))
    aside = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    with writing(aside):
        return checkpoint.rename(aside)


def _list_files(folder: Path, written: Iterable[WrittenFile]) -> list[WrittenFile]:
    """All files in a folder, with their sizes and checksums. written: those that are known."""
    known = {one.name: one for one in written}
    there = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    for name, one in known.items():
        size = there[name].stat().st_size if name in there else None
        if size != one.nbytes:
            found = "is not there" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{folder / name} {found}, and a rank wrote {one.nbytes} bytes: training.checkpoint_dir is not the "
                "same directory on all nodes, or something else writes to it. The checkpoint is not there"
            )
    return [
        known.get(name) or WrittenFile(name, file.stat().st_size, file_checksum(file)) for name, file in there.items()
    ]


def _require_none(final: Path) -> None:
    """Raise CheckpointError where something has the checkpoint's name already: it is never written over."""
    if (final / ABOUT).is_file():
        raise CheckpointError(
            f"{final} is complete already: this step was saved before, or another run writes to the same "
            "training.checkpoint_dir. Move it away, or give each run its own"
        )
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(
            f"{final} is there, without a {ABOUT}: something else wrote it, or its {ABOUT} is lost. Move it away"
        )


def find_checkpoint(run_or_checkpoint: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run directory or of a directory of checkpoints.

    Raises CheckpointError when there is none."""
    if not run_or_checkpoint.is_dir():
        beside = [one.name for one in sorted(run_or_checkpoint.parent.glob("*")) if one.is_dir()]
        meant = nearest(run_or_checkpoint.name, beside)
        hint = did_you_mean([str(run_or_checkpoint.with_name(meant)) if meant else None])
        raise CheckpointError(
            f"{run_or_checkpoint} is no directory{hint or '; give a run directory or a checkpoint in it'}"
        )
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
    return [folder for folder in step_folders(parent) if (folder / ABOUT).is_file()]


def step_folders(parent: Path) -> list[Path]:
    """All that have a checkpoint's name in a directory of them, the latest step first: also those whose checkpoint.json
    is lost. A run names nothing so that is not complete."""
    found = [f for f in parent.glob("step_*") if f.name[5:].isdecimal() and f.is_dir() and any(f.iterdir())]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The number in a checkpoint's name."""
    return int(checkpoint.name[5:])


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
    is removed, and what it points to stays."""
    kept = {None if best is None else best.step}
    old = [checkpoint for checkpoint in checkpoints(parent)[limit:] if step_of(checkpoint) not in kept]
    for checkpoint in old:
        gone = checkpoint.with_name(f"{checkpoint.name}.removed")
        remove(gone)
        checkpoint.rename(gone)
        remove(gone)
    return old
