"""Checks some samples before a run starts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dhp.config.data import DatasetEntry
from dhp.config.parts import split_share
from dhp.core.errors import DataError
from dhp.data.media.images import is_dim
from dhp.data.media.sources import Frames, Picture, Video, files_of, open_media
from dhp.data.read.annotations import Annotations
from dhp.data.read.records import ANSWERS, Record, located
from dhp.data.sample.tokens import refuse_sound
from dhp.data.sampling.dataset import open_dataset

PROBED_SAMPLES = 16  # samples of each dataset, spread over it
COUNTED_SAMPLES = 1000  # the same, where keys are counted
_CHEAP = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")  # of other files, a sample may be a group of rows or an index
_CHEAP_BYTES = 1 << 28


def check_some_samples(
    names: Sequence[str],
    registry: Mapping[str, DatasetEntry],
    seed: int,
    allow_http: bool,
    audio_allowed: bool = True,
    skips: bool = False,
    no_videos: str = "",
    end: str = "",
    of_videos: str | None = None,
    compares: str = "",
) -> list[str]:
    """Read some annotations of each named dataset, and check that the files that they name exist. audio_allowed:
    whether the run may use audio; no_videos: why its model sees none, "": it sees them. skips: defective samples are
    left out, so they are no error here. end: what the chat template writes behind an answer. of_videos: a line for data
    with videos. compares: as `dhp.data.read.annotations.Annotations` has it.

    Returns a line for each dataset that has keys which were not read, for one whose answers have that end already, and
    for one of grey pictures that would be nearly black. Datasets that are large or of another kind are not looked at,
    and no video is opened. Raises DataError for a dataset that cannot be opened, and otherwise as reading the sample
    does."""
    cheap = [name for name in names if _is_cheap(registry[split_share(name)[0]].annotation_path)]
    notes, moving = [], len(cheap) < len(names)  # of what is not looked at, it is not known
    for name in dict.fromkeys(cheap):
        dataset = open_dataset([name], registry, seed, allow_http=allow_http, compares=compares)
        unread: Counter[str] = Counter()
        answers, dim = list[str](), 0
        chosen = _spread(len(dataset), PROBED_SAMPLES)
        for index in chosen:
            try:
                record = dataset.record(index)
                _check(record, audio_allowed, no_videos)
                unread.update(record.unread)
                dim += any(is_dim(file) for file, what in _files(record) if what == "image")
                moving |= any(isinstance(part, Video) for part in record.media)
                answers += [str(turn.parts[-1]).rstrip() for turn in record.turns if turn.role == ANSWERS]
            except DataError:
                if not skips:
                    raise
        notes += tell_unread(split_share(name)[0], unread, len(chosen))
        if dim:
            notes.append(
                f"warning: {split_share(name)[0]}: {dim} of {len(chosen)} samples looked at show grey of 16 bits that "
                "uses less than an eighth of them. The upper 8 are kept, so it is nearly black: stretch the values"
            )
        doubled = sum(answer.endswith(end) for answer in answers) if end.strip() else 0
        if doubled:
            notes.append(
                f"warning: {split_share(name)[0]}: {doubled} of {len(answers)} answers looked at end in {end}, the "
                "template's own end token, which is learned twice then. Take it out of the texts"
            )
    return [*notes, of_videos] if moving and of_videos else notes


def count_unread(annotations: Annotations) -> list[str]:
    """A line about the keys of a dataset that were not read, by samples spread over it; none where all were. Defective
    samples are passed over."""
    unread: Counter[str] = Counter()
    chosen = _spread(len(annotations), COUNTED_SAMPLES)
    for index in chosen:
        try:
            unread.update(annotations.record(index).unread)
        except DataError:
            continue
    return tell_unread(annotations.dataset, unread, len(chosen))


def tell_unread(dataset: str, unread: Counter[str], looked: int) -> list[str]:
    """The line. unread: how many samples have each key. looked: how many were looked at."""
    if not unread:
        return []
    keys = ", ".join(f"{key} ({count})" for key, count in unread.most_common())
    return [f"{dataset}: keys that are not read, of {looked} samples: {keys}"]


def _spread(samples: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, samples - 1, most).astype(int)).tolist()


def _is_cheap(annotation_path: str) -> bool:
    path = Path(annotation_path)
    return path.suffix.lower() in _CHEAP and path.is_file() and path.stat().st_size <= _CHEAP_BYTES


def _check(record: Record, audio_allowed: bool, no_videos: str) -> None:
    with located(record.where):
        if not audio_allowed:
            refuse_sound(record)
        if no_videos and any(isinstance(part, Video) for part in record.media):
            raise DataError(
                f"a video, but {no_videos}. Leave videos out of its data, set "
                "data.on_bad_sample=skip, or take a model that sees them (docs/reference/families.md)"
            )
        for file, what in _files(record):
            open_media(file, what).close()


def _files(record: Record) -> list[tuple[Path, str]]:
    shown = [(file, _kind(part)) for part in record.media for file in files_of(part)]
    audio = [(file, "audio") for file in record.sounds]
    return [(file, what) for file, what in shown + audio if isinstance(file, Path)]


def _kind(part: Picture) -> str:
    return "video" if isinstance(part, Video) and not isinstance(part.file, Frames) else "image"
