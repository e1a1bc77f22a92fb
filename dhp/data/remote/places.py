"""Resolves annotation paths: files, folders, shards, addresses."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dhp.config.data import DataConfig
from dhp.config.parts import read_datasets
from dhp.config.schema import Config
from dhp.core.errors import DataError
from dhp.core.files import is_remote, without_file_scheme
from dhp.data.remote.remote_files import RemoteFile, RemoteFolder, Source, is_folder, list_folder
from dhp.data.remote.transfer import RemoteSettings, check_address

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST = 1_000_000  # files that a pattern may stand for
_SHARDS = (".tar", ".parquet")


@dataclass(frozen=True)
class Shards:
    """Several files that are read as one, in this order, or one behind an address. text: as the configuration has
    them."""

    text: str
    files: tuple[Source, ...]

    def __str__(self) -> str:
        return self.text


Place = Path | Shards


def remote_of(data: DataConfig) -> RemoteSettings:
    """How a run reads files behind addresses."""
    limit = None if data.cache_gib is None else int(data.cache_gib * (1 << 30))
    return RemoteSettings(data.cache_dir, limit, data.fetch_tries, data.fetch_s)


def find_place(path: str, settings: RemoteSettings) -> Place:
    """The files of an annotation path. A pattern as `shards-{000..127}.tar` or `{a,b}.parquet` stands for all that it
    gives, in its order; a folder behind an address for its .parquet or .tar files, by name. Raises DataError for a
    malformed pattern and for an address where nothing is."""
    path = without_file_scheme(path)
    if not is_remote(path) and (os.path.exists(path) or not _BRACES.search(path)):
        return Path(path)
    names = expand(path)
    if not is_remote(path):
        return Shards(path, tuple(map(Path, names)))
    if len(names) == 1 and Path(path).suffix.lower() not in _ONE_FILE and is_folder(path, settings):
        found = [file for file in list_folder(path, settings) if file.suffix.lower() in _SHARDS]
        return Shards(path, tuple(found))
    return Shards(path, tuple(RemoteFile(name, settings) for name in names))


_ONE_FILE = (*_SHARDS, ".json", ".jsonl", ".ndjson", ".csv", ".tsv")


def find_root(path: str, settings: RemoteSettings) -> Path | RemoteFolder | None:
    """Where paths of media start from; None: there are none."""
    path = without_file_scheme(path)
    if is_remote(path):
        return RemoteFolder(path, settings)
    return Path(path) if path else None


def missing_place(path: str, settings: RemoteSettings) -> str | None:
    """What of an annotation path is not there, as a message; None where all of it is. Of many shards behind addresses
    the first and the last are asked for."""
    place = find_place(path, settings)
    if isinstance(place, Path):
        return None if place.exists() else f"{place} does not exist"
    near = [file for file in place.files if isinstance(file, Path) and not file.is_file()]
    if near:
        return f"{near[0]} does not exist, which is {'one of several' if len(near) > 1 else 'the only one'} missing"
    for file in {place.files[0], place.files[-1]} if place.files else ():
        if isinstance(file, RemoteFile):
            file.about()  # raises
    return None if place.files else f"{place} holds no .parquet and no .tar file"


def expand(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for: `{000..127}` counts up with as many digits, `{a,b}` lists.
    Raises DataError for one that gives none or too many."""
    counts = 1
    for piece in _BRACES.findall(pattern):
        counts *= sum(1 for _ in _choices(piece, pattern))
        if counts > _MOST:
            raise DataError(f"{pattern} stands for more than {_MOST} files. Write a narrower one")
    names = [""]
    rest = pattern
    while found := _BRACES.search(rest):
        choices = list(_choices(found[1], pattern))
        names = [name + rest[: found.start()] + choice for name in names for choice in choices]
        rest = rest[found.end() :]
    return [name + rest for name in names]


def _choices(inside: str, pattern: str) -> Iterator[str]:
    counted = _RANGE.fullmatch(inside)
    if counted is None:
        if "," not in inside:
            raise DataError(f"{pattern}: {{{inside}}} is neither a range, as {{000..127}}, nor a list, as {{a,b}}")
        yield from inside.split(",")
        return
    first, last = int(counted[1]), int(counted[2])
    if last < first or last - first >= _MOST:
        raise DataError(f"{pattern}: {{{inside}}} must count up, to {_MOST} files at most")
    width = len(counted[1]) if counted[1].startswith("0") else 0
    yield from (f"{number:0{width}d}" for number in range(first, last + 1))


def missing_data(config: Config) -> list[str]:
    """Messages about wrong paths of the datasets. Raises ConfigError for an address that cannot be read here."""
    missing = []
    for name in read_datasets(config.data):
        entry, key = config.data.data_registry[name], f"data.data_registry.{name}"
        for field, path in (("annotation_path", entry.annotation_path), ("data_path", entry.data_path)):
            if is_remote(path):
                check_address(f"{key}.{field}", path)
        found = _missing_annotations(config, entry.annotation_path)
        if found is not None:
            missing.append(f"{key}.annotation_path={entry.annotation_path} {found}")
        if entry.data_path and not is_remote(entry.data_path) and not os.path.isdir(entry.data_path):
            missing.append(f"{key}.data_path={entry.data_path} does not exist. {_from_here()}")
    return missing


def _missing_annotations(config: Config, path: str) -> str | None:
    if not is_remote(path) and not any(brace in path for brace in "{}"):
        return None if os.path.exists(path) else f"does not exist. {_from_here()}"
    try:
        found = missing_place(path, remote_of(config.data))
    except DataError as error:
        return f"cannot be read: {error}"
    return None if found is None else f"is not whole: {found}. {_from_here()}"


def _from_here() -> str:
    return f"Correct the path; relative paths start from {Path.cwd()}"
