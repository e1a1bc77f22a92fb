"""Reads annotation files as rows: JSON, JSONL, CSV, WebDataset shards."""

import csv
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Protocol, Self

import numpy as np

from dhp.core.errors import DataError
from dhp.data.media.sources import MAX_BYTES, Member, tell_strange
from dhp.data.read.records import located
from dhp.data.remote.remote_files import RemoteFile, Source, size_of


@dataclass(frozen=True)
class RawSample:
    """One raw sample. members: the other files of the sample in its archive, by name; None: it is in no archive."""

    value: Any
    members: Mapping[str, Member] | None = None


class RawSamples(Protocol):
    """Random access to the raw samples of one dataset, 0-based. Safe to call from several threads."""

    def __len__(self) -> int: ...

    def locate(self, index: int) -> str:
        """The place in words ("line 5 of FILE")."""

    def read(self, index: int) -> RawSample:
        """One raw sample. Raises DataError, with the reason alone, if it cannot be read."""


_HEAD = 64  # bytes that tell kinds of files apart
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_UTF_8 = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "compressed by gzip", b"PK": "a zip archive"}


def decode_json(content: bytes, whole_file: bool) -> Any:
    """The JSON value in `content`. Raises DataError when it is not JSON in UTF-8; of a whole file with line and
    column."""
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        number = 1 + content.count(b"\n", 0, error.start)
        line = f"line {number}" if whole_file else "the line"
        reason = f"{line} is not UTF-8 (byte 0x{content[error.start]:02x}). Save the file as UTF-8"
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if whole_file else ""
        reason = f"malformed JSON at {line}column {error.colno}: {error.msg}"
        if whole_file and error.msg == "Extra data":
            reason += ". One object a line is JSONL: call the file .jsonl"
    except (RecursionError, ValueError) as error:  # nesting too deep, or a number with too many digits
        reason = f"JSON cannot be read: {error}"
    raise DataError(f"{reason}.")


def check_head(head: bytes) -> None:
    """Raises DataError for a file that begins as no text in UTF-8 does."""
    strange = tell_strange(head, "annotations")
    if strange:
        raise DataError(f"the file {strange}.")
    kind = _NOT_UTF_8.get(head[:2])
    if kind:
        raise DataError(f"the file is {kind}, not plain text in UTF-8. Convert it")


class JsonRows:
    """See `dhp.data.read.annotation_files.RawSamples`."""

    def __init__(self, path: Source) -> None:
        """Raises DataError for a file that is not one JSON array in UTF-8, with line and column."""
        with located(str(path)):
            content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
            check_head(content[:_HEAD])
            self._path, self._values = path, _array(decode_json(content, whole_file=True))

    def __len__(self) -> int:
        return len(self._values)

    def locate(self, index: int) -> str:
        return f"element {index + 1} of {self._path}"

    def read(self, index: int) -> RawSample:
        return RawSample(self._values[index])


def _array(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        for key in ("data", "samples", "train", "annotations", "instances", "examples", "rows"):
            if isinstance(value.get(key), list):
                raise DataError(
                    f"the file holds one JSON object, whose samples stand under {key!r}. Save that list alone"
                )
    kind = {dict: "object", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
    raise DataError(
        f"the file holds one JSON {kind}, not an array of samples. "
        "Wrap the samples in [ ]; a file with one object a line must be called .jsonl."
    )


_CHUNK_BYTES = 1 << 24  # bytes that are searched for line ends at once
_LINE_END = 10
_IS_TEXT = np.array([not bytes([byte]).isspace() for byte in range(256)])


class JsonlRows:
    """See `dhp.data.read.annotation_files.RawSamples`. Blank lines are no samples, but count as lines."""

    def __init__(self, path: Source) -> None:
        """Raises DataError for a file that is not text in UTF-8 at all."""
        self._path = path
        with path.open("rb") as file:
            head = file.read(_HEAD)
        with located(str(path)):
            check_head(head)
        skip = len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0
        bounds, self._blank = find_lines(path, skip)
        bounds[0] = skip
        self._bounds = bounds
        # Samples before each blank line, which is all it takes to know the line of a sample.
        self._before = self._blank - np.arange(len(self._blank))

    def __len__(self) -> int:
        return len(self._bounds) - 1 - len(self._blank)

    def locate(self, index: int) -> str:
        return f"line {self._line(index) + 1} of {self._path}"

    def read(self, index: int) -> RawSample:
        line = self._line(index)
        start, stop = self._bounds[line : line + 2].tolist()
        return RawSample(decode_json(_between(self._path, start, stop).rstrip(), whole_file=False))

    def _line(self, index: int) -> int:
        return index + int(np.searchsorted(self._before, index, side="right"))


def find_lines(path: Source, skip: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64 [lines + 1]: where each line begins, and the end of the file; int64 [blank lines]: their numbers, 0-based.

    Read once, in chunks. skip: bytes at the file's beginning that are none of its first line."""
    found, full, size = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=bool)], 0
    begun = False  # whether the line that the last chunk broke off in has text
    with path.open("rb") as file:
        while content := file.read(_CHUNK_BYTES):
            chunk = np.frombuffer(content, dtype=np.uint8)
            text = _IS_TEXT[chunk]
            text[: max(0, skip - size)] = False
            # "\n" alone: str.splitlines would also cut inside strings that hold U+2028.
            ends = np.flatnonzero(chunk == _LINE_END)
            starts = np.concatenate([[0], ends + 1])
            has_text = np.logical_or.reduceat(text, starts[starts < len(chunk)])
            has_text[0] |= begun
            begun = bool(has_text[len(ends) :].any())
            full.append(has_text[: len(ends)])
            found.append(ends + (size + 1))
            size += len(chunk)
    bounds = np.concatenate(found)
    if bounds[-1] != size:
        bounds, full = np.append(bounds, size), [*full, np.array([begun])]
    return bounds, np.flatnonzero(~np.concatenate(full))


def _between(path: Source, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


# Cells that may hold a list, as JSON. Any other text that begins with a bracket is a text.
_LISTS = ("messages", "conversations", "conversation", "texts", "history")
_FILES = ("image", "images", "video", "videos", "audio", "audios")


class CsvRows:
    """See `dhp.data.read.annotation_files.RawSamples`. An empty cell is null; a list in a cell is JSON."""

    def __init__(self, path: Source) -> None:
        """Raises DataError for a file that is not text in UTF-8 or has rows of other lengths than its line of names."""
        self._path = path
        with located(str(path)):
            with path.open("rb") as file:
                check_head(file.read(_HEAD))
            try:
                self._rows = _read(path)
            except UnicodeDecodeError as error:
                raise DataError(f"the file is not UTF-8 (byte {error.start}). Save it as UTF-8") from error
            except csv.Error as error:
                raise DataError(f"the file is no CSV: {error}. Write it as JSONL") from error

    def __len__(self) -> int:
        return len(self._rows)

    def locate(self, index: int) -> str:
        return f"the row that ends at line {self._rows[index][0]} of {self._path}"

    def read(self, index: int) -> RawSample:
        _, cells = self._rows[index]
        return RawSample({name: _value(name, cell) for name, cell in cells.items() if cell})


def _read(path: Source) -> list[tuple[int, dict[str, str]]]:
    """Each row with the line that it ends at."""
    with path.open_text() if isinstance(path, RemoteFile) else path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        names = next(reader, [])
        if not names or len(set(names)) < len(names) or not all(names):
            raise DataError(f"the first line must name the columns, each once; it has {names!r:.200}")
        rows = []
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise DataError(f"line {reader.line_num} has {len(cells)} cells, and the first line names {len(names)}")
            rows.append((reader.line_num, dict(zip(names, cells, strict=True))))
    return rows


def _value(name: str, cell: str) -> Any:
    lists = name in _LISTS or (name in _FILES and cell.startswith("["))
    if not lists:
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the cell of {name!r} must be a list in JSON: {error}") from error


IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
VIDEOS = ("mp4", "mov", "mkv", "webm", "avi")
_MAX_HEADER = 1 << 20  # bytes of a name or of attributes that do not fit into a plain header
AUDIO = ("mp3", "wav", "flac", "ogg", "opus", "m4a", "aac")


class TarRows:
    """See `RawSamples`. 8 bytes a sample stay in memory: where its first header begins."""

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

    Raises ReadError where a header leads back, which would go on for ever."""
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
