"""WebDataset shards: tar files in which consecutive members with the same key are one sample.

Read with the standard library: a step must be able to read any sample, and the webdataset package only streams.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Self

import numpy as np

from dhp.core.errors import DataError
from dhp.data.media.sources import MAX_BYTES, Member
from dhp.data.read.files import BYTE_ORDER_MARK, RawSample, decode_json
from dhp.data.remote.files import RemoteFile, Source, size_of

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
VIDEOS = ("mp4", "mov", "mkv", "webm", "avi")
_MAX_HEADER = 1 << 20  # bytes of a name or of attributes that do not fit into a plain header
AUDIO = ("mp3", "wav", "flac", "ogg", "opus", "m4a", "aac")


class TarRows:
    """See `dhp.data.read.files.RawSamples`. 8 bytes a sample stay in memory: where its first header begins."""

    def __init__(self, shards: Sequence[Source]) -> None:
        """Raises DataError for a shard that is compressed, no tar file, or cut off."""
        self._shards = tuple(shards)
        self._starts = [_known_starts(shard) for shard in self._shards]  # int64 [samples + 1] each
        self._ends = np.cumsum([len(starts) - 1 for starts in self._starts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> str:
        shard, number = self._find(index)
        return f"sample {number + 1} of {self._shards[shard]}"

    def read(self, index: int) -> RawSample:
        shard, number = self._find(index)
        start, stop = self._starts[shard][number : number + 2].tolist()
        path = self._shards[shard]
        with path.open("rb") as file:
            infos = list(_members(file, start, stop))
            members = {i.name: Member(i.name, path, i.offset_data, i.size) for i in infos}
            written = [i for i in infos if _ending(i.name) == "json"]
            if len(written) != 1:
                raise DataError(
                    f"the sample needs one .json member with its conversation; it has {sorted(members)}. Members of "
                    "one sample have one name before the first dot and follow each other (tar --sort=name)"
                )
            if written[0].size > MAX_BYTES:
                raise DataError(
                    f"{written[0].name} has {written[0].size} bytes, more than the {MAX_BYTES} that are read"
                )
            file.seek(written[0].offset_data)
            content = file.read(written[0].size).removeprefix(BYTE_ORDER_MARK)
        value = decode_json(content, whole_file=True)
        return RawSample(_with_media(value, members), members)

    def _find(self, index: int) -> tuple[int, int]:
        """The shard of a sample, and its 0-based number there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard]) + len(self._starts[shard]) - 1


def _known_starts(shard: Source) -> np.ndarray:
    """As `_sample_starts`; of a shard behind an address kept, so that it is not fetched for that once more."""
    if isinstance(shard, RemoteFile):
        return shard.index("samples of a tar file", lambda: _sample_starts(shard))
    return _sample_starts(shard)


def _sample_starts(shard: Source) -> np.ndarray:
    """int64 [samples + 1]: where the first header of each sample begins, and where the last sample ends."""
    starts: list[int] = []
    end, key = 0, None
    try:
        with shard.open("rb") as file:
            for info in _members(file, 0, None):
                if _key(info.name) != key:
                    key = _key(info.name)
                    starts.append(info.offset)
                end = info.offset_data + info.size
    except (tarfile.TarError, ValueError) as error:  # ValueError: numbers in a header that are none
        raise DataError(f"{shard}: no readable tar file ({error}). Copy it again; unpack a compressed one") from error
    if end > size_of(shard):
        raise DataError(f"{shard}: cut off in sample {len(starts)}. Copy it again")
    return np.array([*starts, end], dtype=np.int64)


class _Header(tarfile.TarInfo):
    """A header whose numbers are checked before they are used."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises ReadError for a size below 0, and for more than a megabyte that is no file's content."""
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or (info.size > _MAX_HEADER and not info.isreg()):
            raise tarfile.ReadError(f"a header says {info.size} bytes of what is no file's content")
        return info


def _members(file: BinaryIO, start: int, stop: int | None) -> Iterator[tarfile.TarInfo]:
    """Headers of the regular files between two offsets. Links are left out, so none is followed.

    Raises ReadError where a header leads back, which would go on for ever.
    """
    file.seek(start)
    at = start - 1
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as archive:
        while (info := archive.next()) is not None and (stop is None or info.offset < stop):
            if info.offset <= at or info.size < 0:
                raise tarfile.ReadError(f"the header behind byte {at} leads back to {info.offset}")
            at = info.offset
            # Or it keeps every header that it has shown. The types of the library lack its public list of them.
            archive.members = []  # type: ignore[attr-defined]
            if info.isreg() and not info.issparse():
                yield info


def _parts_name_files(value: dict[str, Any]) -> bool:
    """Whether a part of a turn holds more than its type and a text."""
    turns = value.get("messages")
    contents = [turn.get("content") for turn in (turns if isinstance(turns, list) else ()) if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.keys() - {"type", "text"} for part in parts)


def _key(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.parent / path.name.partition(".")[0])


def _ending(name: str) -> str:
    """What follows the key, in lower case: `left.jpg` of `a/0001.left.JPG`."""
    return PurePosixPath(name).name.partition(".")[2].lower()


def _with_media(value: Any, members: dict[str, Member]) -> Any:
    """A sample that names no image or video has all those of its archive, in order; likewise audio."""
    if not isinstance(value, dict):
        return value
    named = dict(value)
    plural = "s" if "messages" in value else ""
    if _parts_name_files(value):
        return value
    shown = () if {"image", "images", "video", "videos"} & set(value) else (("image", IMAGES), ("video", VIDEOS))
    audio = () if {"audio", "audios"} & set(value) else (("audio", AUDIO),)
    for kind, endings in (*shown, *audio):
        found = [name for name in members if _ending(name).rpartition(".")[2] in endings]
        if found:
            named[kind + plural] = found
    return named
