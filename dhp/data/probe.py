"""A look at some samples before anything is started: a wrong folder of images is wrong for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dhp.config.mixing import split_share
from dhp.config.schema import DatasetEntry
from dhp.data.media.sources import Frames, Picture, Video, files_of, open_media
from dhp.data.records import Record, located
from dhp.data.sounds import refuse_sound
from dhp.data.source import Dataset, open_dataset

PROBED_SAMPLES = 16  # samples of each dataset, spread over it
_CHEAP = (".json", ".jsonl", ".ndjson")  # of other files, a sample may be a group of rows or an archive's whole index
_CHEAP_BYTES = 1 << 28


def check_some_samples(
    names: Sequence[str], registry: Mapping[str, DatasetEntry], seed: int, allow_http: bool, hears: bool = True
) -> None:
    """Read some annotations of each named dataset, and see whether the files that they name are there. hears: whether
    the run may use sound.

    Datasets that are large or not JSON are not looked at, and no file of an image or video is opened. Raises DataError
    for a dataset that cannot be opened, and otherwise as reading the sample does.
    """
    cheap = [name for name in names if _is_cheap(registry[split_share(name)[0]].annotation_path)]
    for name in cheap:
        dataset = open_dataset([name], registry, seed, allow_http=allow_http)
        for index in np.unique(np.linspace(0, len(dataset) - 1, PROBED_SAMPLES).astype(int)):
            _check(dataset, int(index), hears)


def _is_cheap(annotation_path: str) -> bool:
    path = Path(annotation_path)
    return path.suffix.lower() in _CHEAP and path.is_file() and path.stat().st_size <= _CHEAP_BYTES


def _check(dataset: Dataset, index: int, hears: bool) -> None:
    record = dataset.record(index)
    with located(record.where):
        if not hears:
            refuse_sound(record)
        for file, what in _files(record):
            open_media(file, what).close()


def _files(record: Record) -> list[tuple[Path, str]]:
    shown = [(file, _kind(part)) for part in record.media for file in files_of(part)]
    heard = [(file, "audio") for file in record.sounds]
    return [(file, what) for file, what in shown + heard if isinstance(file, Path)]


def _kind(part: Picture) -> str:
    return "video" if isinstance(part, Video) and not isinstance(part.file, Frames) else "image"
