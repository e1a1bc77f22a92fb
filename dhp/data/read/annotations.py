"""Opens a dataset's annotations and reads rows as records."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dhp.core.errors import ConfigError, DataError, DhpError
from dhp.core.preferences import SINGLES
from dhp.data.media.sources import MediaResolver
from dhp.data.read.annotation_files import CsvRows, JsonlRows, JsonRows, RawSample, RawSamples, TarRows
from dhp.data.read.formats import (
    check_columns,
    is_pair,
    read_alpaca,
    read_llava,
    read_openai,
    read_sharegpt,
    read_swift,
    read_text,
    read_unknown,
    renamed,
)
from dhp.data.read.preferences import compared, split_answer, split_sides
from dhp.data.read.records import Fields, Record, Turn, check_left, check_paired, located
from dhp.data.remote.places import Place, Shards
from dhp.data.remote.remote_files import RemoteFile, RemoteFolder, Source, look_up


class ArrowRows:
    """See `dhp.data.read.annotation_files.RawSamples`."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError without the datasets package, DataError for a folder that it cannot read."""
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
            raise DataError(f"{folder} holds several splits; give the folder of one: {', '.join(splits)}")
        try:
            from datasets import load_from_disk
        except ImportError as error:
            raise ConfigError(
                "a saved Hugging Face dataset needs datasets, which is not installed; run `pip install datasets`"
            ) from error
        try:
            # As arrow, images come as they are stored, bytes and path, and are not decoded here.
            self._table = load_from_disk(str(folder)).with_format("arrow")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: not a readable Hugging Face dataset: {error}") from error
        self._folder, self._lock = folder, threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def locate(self, index: int) -> str:
        return f"row {index + 1} of {self._folder}"

    def read(self, index: int) -> RawSample:
        with self._lock:
            return RawSample(self._table[index : index + 1].to_pylist()[0])


_KEPT_GROUPS = 2  # row groups in memory


class ParquetRows:
    """See `dhp.data.read.annotation_files.RawSamples`. The last two row groups stay in memory."""

    def __init__(self, paths: Sequence[Source]) -> None:
        """Raises ConfigError without pyarrow, DataError for a file that is not Parquet."""
        self._paths = tuple(paths)
        groups = [(n, group, rows) for n, path in enumerate(paths) for group, rows in enumerate(_known_sizes(path))]
        self._groups = [(n, group) for n, group, _ in groups]
        self._ends = np.cumsum([rows for _, _, rows in groups], dtype=np.int64)
        sizes = [sum(rows for n, _, rows in groups if n == file) for file in range(len(paths))]
        self._file_starts = np.cumsum([0, *sizes[:-1]])
        self._lock = threading.Lock()  # or two threads read the same row group at once
        self._table = lru_cache(maxsize=_KEPT_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> str:
        file, _ = self._groups[self._group(index)]
        return f"row {index - int(self._file_starts[file]) + 1} of {self._paths[file]}"

    def read(self, index: int) -> RawSample:
        group = self._group(index)
        with self._lock:
            table = self._table(group)
        row = index - int(self._ends[group]) + table.num_rows
        return RawSample(table.slice(row, 1).to_pylist()[0])

    def _group(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))

    def _read_group(self, group: int) -> Any:
        file, number = self._groups[group]
        parquet = _pyarrow()
        try:
            with self._paths[file].open("rb") as opened:
                return parquet.ParquetFile(opened).read_row_group(number)
        except Exception as error:  # pyarrow's own errors are of several kinds
            raise DataError(f"row group {number + 1} cannot be read: {error}") from error


def _known_sizes(path: Source) -> list[int]:
    """As `_group_sizes`; of a file behind an address kept, so that it is not fetched for that once more."""
    if not isinstance(path, RemoteFile):
        return _group_sizes(path)
    sizes: list[int] = path.index("row groups", lambda: np.array(_group_sizes(path), dtype=np.int64)).tolist()
    return sizes


def _group_sizes(path: Source) -> list[int]:
    parquet = _pyarrow()
    try:
        with path.open("rb") as opened:
            about = parquet.ParquetFile(opened).metadata
    except DhpError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}. Copy it again") from error
    return [about.row_group(group).num_rows for group in range(about.num_row_groups)]


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow, which is not installed; run `pip install pyarrow`") from error
    return pyarrow.parquet


READ = ".json, .jsonl, .ndjson, .csv, .tsv, .parquet, .tar and folders that datasets' save_to_disk writes"
_UNREAD = (".txt", ".md", ".xlsx", ".xls", ".ods", ".arrow", ".feather", ".pkl", ".pt", ".npy", ".npz", ".yaml", ".yml")
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


def open_rows(path: Place) -> RawSamples:
    """Open a file, a folder of shards, or shards. Raises DataError for what is missing, unreadable or of no known
    kind."""
    try:
        if isinstance(path, Shards):
            return _open_shards(path)
        return _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise DataError(f"cannot read annotation file {path}: {error.strerror or error}") from error


def _open_shards(shards: Shards) -> RawSamples:
    kinds = {file.suffix.lower() for file in shards.files}
    look_up(shards.files)
    if len(shards.files) == 1 and kinds.isdisjoint((".parquet", ".tar")):
        return _open_file(shards.files[0])
    if kinds not in ({".parquet"}, {".tar"}):
        raise DataError(
            f"{shards} gives {len(shards.files)} files that end in {', '.join(sorted(kinds)) or 'nothing'}; several "
            "are read where all are .parquet or all .tar. Correct it, or give a dataset for each"
        )
    gone = next((file for file in shards.files if isinstance(file, Path) and not file.is_file()), None)
    if gone is not None:
        raise DataError(f"{shards} names {gone}, which does not exist. Correct the pattern, or copy the file there")
    return ParquetRows(shards.files) if kinds == {".parquet"} else TarRows(shards.files)


def _open_file(path: Source) -> RawSamples:
    ending = path.suffix.lower()
    if ending in _COMPRESSED:
        raise DataError(f"{path} is compressed, and its samples cannot be found one by one. Unpack it")
    if ending == ".parquet":
        return ParquetRows([path])
    if ending == ".tar":
        return TarRows([path])
    if ending in (".csv", ".tsv"):
        return CsvRows(path)
    if ending in _UNREAD:
        raise DataError(f"{path} is a {ending} file, and read are {READ}. Convert it")
    return JsonlRows(path) if ending in (".jsonl", ".ndjson") else JsonRows(path)


def _open_folder(folder: Path) -> RawSamples:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return ArrowRows(folder)
    tables, shards = sorted(folder.rglob("*.parquet")), sorted(folder.rglob("*.tar"))
    if bool(tables) == bool(shards):
        raise DataError(
            f"{folder} is a folder with {len(tables)} .parquet and {len(shards)} .tar files. Give a folder that holds "
            "one kind, a saved Hugging Face dataset, or a single file"
        )
    return ParquetRows(tables) if tables else TarRows(shards)


FORMATS: dict[str, Callable[[Fields, MediaResolver], tuple[Turn, ...]]] = {
    "llava": read_llava,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
    "alpaca": read_alpaca,
    "swift": read_swift,
    "text": read_text,
    "unknown": read_unknown,  # what `detect` could not tell
}
_FILES = ("image", "video", "audio")


def parse_record(raw: Any, dataset: str, position: int, where: str, form: str, media: MediaResolver) -> Record:
    """Check one raw annotation and resolve its images, videos and sounds. form: one of FORMATS.

    DataError, with the reason alone, when keys or types are wrong, roles do not alternate, the last turn is not an
    answer, tags and images differ in number, a file may not be read, or a key that changes what is learned is not read.
    """
    if not isinstance(raw, Mapping):
        raise DataError(f"expected an object with 'conversations' or 'messages', got {type(raw).__name__}")
    check_paired(raw)
    row = Fields(raw)
    turns = FORMATS[form](row, media)
    for number, turn in enumerate(turns, start=1):
        _check_text(number, turn)
    shows = any(not isinstance(part, str) for turn in turns for part in turn.parts)
    return Record(dataset, position, where, turns, check_left(row, shows))


def detect(samples: Iterable[Any]) -> str:
    """The format of a dataset, by the first sample whose keys fit one format alone, else by the key of its turns.

    unknown where no sample fits: each sample then lists what is known."""
    fallback = None
    for raw in samples:
        certain, likely = _recognise(raw)
        if certain:
            return certain
        fallback = fallback or likely
    return fallback or "unknown"


def _check_text(number: int, turn: Turn) -> None:
    """JSON can hold one half of a character that UTF-16 writes as two; no tokenizer takes it."""
    try:
        "".join((turn.thoughts, *(part for part in turn.parts if isinstance(part, str)))).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"turn {number}: the text holds half a character ({error.reason}). Write it anew") from error


def _recognise(raw: Any) -> tuple[str | None, str | None]:
    """(what a sample must be, what it may be): text alone looks alike in two formats."""
    if not isinstance(raw, Mapping):
        return None, None
    row = Fields(raw)
    singular, plural = row.has(*_FILES), row.has(*(f"{kind}s" for kind in _FILES))
    if row.has("messages"):
        return _of_messages(raw, singular, plural)
    if "conversations" in raw:
        if plural:
            return "sharegpt", None
        return ("llava", None) if singular else (None, "llava")
    if row.has("instruction") and row.has("output"):
        return "alpaca", None
    if row.has("response", "conversation", "texts") or is_pair(row):
        return "swift", None
    return (None, "sharegpt") if "messages" in raw else (None, None)


def _of_messages(raw: Mapping[str, Any], singular: bool, plural: bool) -> tuple[str | None, str | None]:
    messages = raw["messages"] if isinstance(raw["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    if any(isinstance(content, list) for content in contents):
        return "openai", None
    tagged = any(f"<{kind}>" in content for content in contents if isinstance(content, str) for kind in _FILES)
    if singular or (plural and not tagged):
        return "swift", None
    return ("sharegpt", None) if plural else (None, "sharegpt")


AUTO = "auto"
_NEAR = 256  # rows among which an answer to another prompt is looked for one by one
_PROBED_SAMPLES = 100  # samples whose keys may tell the format


@dataclass(frozen=True)
class Annotations:
    """One dataset.

    form: a name of `FORMATS`. data_path: where image paths start; None: no files. path: the file, or the folder of
    shards. columns: our names of keys → the samples'. keep_newlines: as `dhp.data.media.sources.MediaResolver`."""

    dataset: str
    rows: RawSamples
    form: str
    data_path: Path | RemoteFolder | None
    allow_http: bool
    path: Place
    columns: Mapping[str, str] = field(default_factory=dict)
    keep_newlines: bool = False
    compares: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """The place of one sample in words, as errors name it. index: 0-based."""
        return f"dataset {self.dataset!r}, {self.rows.locate(index)}"

    def record(self, index: int) -> Record:
        """Parse one sample. index: 0-based. DataError (with its place) if this sample is defective."""
        record = self._record(index)
        if self.compares != SINGLES:
            return record
        question, _ = split_answer(record)
        return replace(
            record, other=replace(record, turns=(*question, *self._strange_answer(index, question, record.where)))
        )

    def _strange_answer(self, index: int, question: tuple[Turn, ...], where: str) -> tuple[Turn, ...]:
        """That of a row behind this one that asks something else: of the next one, else at doubled distances, as
        answers to a prompt often stand together, else of the next ones one by one."""
        doubled = [2**power for power in range(len(self).bit_length())]
        for distance in dict.fromkeys((*doubled, *range(1, _NEAR))):
            if distance >= len(self):
                continue
            try:
                asked, answer = split_answer(self._record((index + distance) % len(self)))
            except DataError:  # which tells of itself
                continue
            if asked != question:
                return answer
        raise DataError(
            f"{where}: no row was found that asks something else, and kto compares with answers to other "
            "prompts. Mix the rows of the file"
        )

    def _record(self, index: int) -> Record:
        where = self.where(index)
        with located(where):
            entry = _read(self.rows, index)
            media = MediaResolver(self.data_path, self.allow_http, entry.members, self.keep_newlines)
            raw = renamed(entry.value, self.columns)
            about = (self.dataset, index + 1, where, self.form, media)
            try:
                if not self.compares or not isinstance(raw, Mapping):
                    return parse_record(raw, *about)
                sides = split_sides(raw, self.compares)
                first, second = parse_record(sides.first, *about), sides.second
                other = None if second is None else parse_record(second, *about)
                first, other = compared(first, other, sides.turns)
                return replace(first, other=other, liked=sides.liked)
            except RecursionError as error:
                raise DataError("it is nested too deep") from error

    def value(self, index: int, key: str) -> str:
        """What a raw sample has under any key of its own, as text; "" where it has none, or cannot be read. index:
        0-based."""
        try:
            raw = _read(self.rows, index).value
        except DataError:  # which `record` raises of this sample
            return ""
        found = raw.get(key) if isinstance(raw, Mapping) else None
        return "" if found is None else str(found)


def require_key(annotations: Mapping[str, Annotations], key: str, option: str) -> None:
    """Raises ConfigError where none of the first samples has the key. option: what named it, in words."""
    first = ((one, index) for one in annotations.values() for index in range(min(len(one), _PROBED_SAMPLES)))
    if not any(one.value(index, key) for one, index in first):
        raise ConfigError(
            f"{option}: none of the first {_PROBED_SAMPLES} samples of {', '.join(annotations)} has the key {key!r}. "
            "Name one that the annotations have beside the conversation"
        )


def read_annotations(
    dataset: str,
    path: Place,
    data_path: Path | RemoteFolder | None,
    form: str = AUTO,
    allow_http: bool = False,
    columns: Mapping[str, str] = MappingProxyType({}),
    keep_newlines: bool = False,
    compares: str = "",
) -> Annotations:
    """Open the annotations of a dataset: a file, or a folder of shards.

    form: a name of `dhp.data.read.annotations.FORMATS`, or auto. columns: our names of keys → the samples'.
    keep_newlines, compares: as `Annotations`.

    Raises DataError where the whole dataset is useless: the file is missing, unreadable or no JSON array (with line and
    column), it has no sample, none of the first samples can be read, none has a key of `columns`, or data_path is not a
    folder. Annotations.record raises for the defects of single samples, so that they can be skipped."""
    with located(f"dataset {dataset!r}"):
        if isinstance(data_path, Path) and not os.path.isdir(
            data_path
        ):  # Path's own raises for names that are too long
            raise DataError(
                f"data_path {data_path} is not a folder. Set it to the folder that the image paths are relative to."
            )
        if isinstance(path, Path) and not os.path.exists(path):
            raise DataError(
                f"annotation file {path} does not exist. Correct data.data_registry.{dataset}.annotation_path."
            )
        rows = open_rows(path)
        if not len(rows):
            raise DataError(f"{path} holds no sample. Remove the dataset or fill the file.")
        raw = list(_first_samples(rows))
        check_columns(raw, columns)
        form = detect(_plain(renamed(one, columns), compares) for one in raw) if form == AUTO else form
        return Annotations(dataset, rows, form, data_path, allow_http, path, dict(columns), keep_newlines, compares)


def _plain(raw: Any, compares: str) -> Any:
    """A row as fine-tuning has it: of a preference its first side; a defective one as it is."""
    try:
        return split_sides(raw, compares).first if compares and isinstance(raw, Mapping) else raw
    except DataError:
        return raw


def _read(rows: RawSamples, index: int) -> RawSample:
    """One raw sample. Damaged files lead the libraries that read them to raise anything; all of it means that this
    sample cannot be used."""
    try:
        return rows.read(index)
    except (DhpError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"cannot be read: {error or type(error).__name__}") from error


def _first_samples(rows: RawSamples) -> Iterator[Any]:
    """The first samples, without unreadable ones. Raises DataError if none can be read."""
    failed = None
    found = False
    for index in range(min(len(rows), _PROBED_SAMPLES)):
        try:
            value = _read(rows, index).value
        except DataError as error:
            failed = failed or DataError(f"{rows.locate(index)}: {error}")
            continue
        found = True
        yield value
    if failed is not None and not found:
        raise failed
