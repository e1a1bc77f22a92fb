"""Finds bytes of media inside a dataset's allowed folders."""

import base64
import binascii
import io
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib import request
from urllib.parse import unquote, unquote_to_bytes

from dhp.core.errors import DataError
from dhp.data.remote.remote_files import RemoteFile, RemoteFolder, Source

MAX_BYTES = 1 << 28  # of an image or video that has to fit into memory
FETCH_TIMEOUT_S = 30.0  # without a byte
FETCH_S = 300.0  # altogether
_PIECE = 1 << 16
_BEGINNING = 64  # bytes that tell kinds of files apart
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")


@dataclass(frozen=True)
class Blob:
    """Bytes that came with the annotation. name: how errors call them."""

    name: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Member:
    """Bytes `start` to `start + size` of an archive."""

    name: str
    archive: Source
    start: int
    size: int


@dataclass(frozen=True)
class Remote:
    """An http or https address, fetched each time it is needed."""

    url: str


File = Path | RemoteFile | Blob | Member | Remote


@dataclass(frozen=True)
class Settings:
    """A row's settings of one picture or video; None: as the configuration has it.

    min_pixels, max_pixels: width × height bounds of the scaled picture or frame. fps: frames of each second.
    max_frames: the most of the video. frames: so many of it, whatever that is a second. start, end: seconds from its
    beginning, of the part that is shown."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    frames: int | None = None
    max_frames: int | None = None
    start: float = 0.0
    end: float | None = None


PLAIN = Settings()


@dataclass(frozen=True)
class SizedImage:
    """An image with settings of its own."""

    file: File
    settings: Settings


@dataclass(frozen=True)
class Frames:
    """Images that are the frames of a video, in order. rate: so many of them a second."""

    files: tuple[File, ...]
    rate: float = 2.0


@dataclass(frozen=True)
class Video:
    """A file, or a list of frames, that is shown as a video."""

    file: File | Frames
    settings: Settings = PLAIN


@dataclass(frozen=True)
class Sound:
    """An audio file."""

    file: File


Picture = File | SizedImage | Video


def settings_of(picture: Picture) -> Settings:
    """Its row's settings of it."""
    return picture.settings if isinstance(picture, SizedImage | Video) else PLAIN


def files_of(part: Picture | Sound) -> tuple[File, ...]:
    """The files that are opened for it: one, but for a list of frames."""
    file = part.file if isinstance(part, SizedImage | Video | Sound) else part
    return file.files if isinstance(file, Frames) else (file,)


def stored_bytes(part: Picture | Sound) -> int:
    """Bytes of its files as they are stored, encoded. A file behind an address counts as 0: its size is not known
    without fetching it. Raises DataError for a file that cannot be looked up."""
    return sum(_stored_bytes(file) for file in files_of(part))


def _stored_bytes(file: File) -> int:
    if isinstance(file, Path):
        try:
            return file.stat().st_size
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    if isinstance(file, Member):
        return file.size
    return len(file.content) if isinstance(file, Blob) else 0


def name_of(file: File | Frames) -> str:
    """The name of a file in errors."""
    if isinstance(file, Frames):
        return f"of {len(file.files)} frames, {name_of(file.files[0])} and on"
    if isinstance(file, Path):
        return str(file)
    if isinstance(file, Member):
        return f"{file.name} in {file.archive}"
    return file.name if isinstance(file, Blob) else file.url


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Damaged bytes lead decoders to raise anything; all of it means that the file cannot be used.

    what: kind and name of the file. Raises DataError for whatever is raised inside, with the reason."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what} cannot be decoded: {error or type(error).__name__}") from error


def pyav() -> Any:
    """The package that reads videos and sound, imported where one comes: runs on pictures and text do without it.
    Raises DataError where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise DataError(f"videos and sound are read by PyAV, which is not there ({error}): pip install av") from error
    return av


def open_media(file: File, what: str) -> BinaryIO:
    """Its bytes, open for reading and seekable. what: "image", "video" or "audio", for errors.

    Raises DataError, which names the file and the reason: missing, no regular file, empty, unreadable, too large, of
    another kind."""
    opened = _open(file, what)
    strange = tell_strange(opened.read(_BEGINNING), what)
    if strange:
        opened.close()
        raise DataError(f"{what} {name_of(file)} {strange}")
    opened.seek(0)
    return opened


def tell_strange(beginning: bytes, what: str) -> str:
    """What a file is by its first bytes where these are a known kind's that is no `what`; "": not known to be."""
    if beginning.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file: run `git lfs pull` where it was cloned"
    if beginning.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "is a web page (HTML), as servers answer in the place of a file that they do not give: fetch it again"
    if beginning.startswith(b"%PDF"):
        return "is a PDF: write its pages as pictures, for example with pdftoppm"
    if what == "image" and beginning[4:8] == b"ftyp" and beginning[8:12] in _HEIC:
        return "is a HEIC picture, which is not decoded: convert it to JPEG or PNG"
    return ""


def _open(file: File, what: str) -> BinaryIO:
    if isinstance(file, Path):
        return _open_path(file, what)
    if isinstance(file, RemoteFile):
        return _open_remote(file, what)
    if isinstance(file, Member):
        content = _read_member(file, what)
    else:
        content = file.content if isinstance(file, Blob) else _fetch(file.url, what)
    if not content:
        raise DataError(f"{what} {name_of(file)} is empty (0 bytes)")
    return io.BytesIO(content)


def _open_remote(file: RemoteFile, what: str) -> BinaryIO:
    try:
        opened = file.open()
    except OSError as error:
        raise DataError(f"{what} {file} cannot be read: {error.strerror or error}") from error
    if not opened.seek(0, io.SEEK_END):
        opened.close()
        raise DataError(f"{what} {file} is empty (0 bytes)")
    opened.seek(0)
    return opened


def _open_path(path: Path, what: str) -> io.BufferedReader:
    try:
        if path.is_dir():
            raise DataError(f"{what} {path} is a folder")
        if not path.exists():
            raise DataError(f"{what} {path} does not exist{_doubled(path)}")
        if not path.is_file():
            raise DataError(f"{what} {path} is not a regular file")  # reading a pipe would block for ever
        if path.stat().st_size == 0:
            raise DataError(f"{what} {path} is empty (0 bytes)")
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{what} {path} cannot be read: {error.strerror}") from error


def _doubled(path: Path) -> str:
    """What to do about a file that is not there because data_path and the sample's path both name its folder."""
    parts = path.parts
    for size in range(1, len(parts) // 2 + 1):
        for start in range(1, len(parts) - 2 * size + 1):
            once, again = parts[start : start + size], parts[start + size : start + 2 * size]
            meant = Path(*parts[: start + size], *parts[start + 2 * size :])
            if once == again and meant.is_file():
                return (
                    f", but {meant} does: both data_path and the sample's path name {'/'.join(once)}; leave it out of "
                    "data_path"
                )
    return ""


def _read_member(member: Member, what: str) -> bytes:
    _check_size(member.size, what, name_of(member))
    try:
        with member.archive.open("rb") as archive:
            archive.seek(member.start)
            content = archive.read(member.size)
    except OSError as error:
        raise DataError(f"{what} {name_of(member)} cannot be read: {error.strerror}") from error
    if len(content) < member.size:
        raise DataError(f"{what} {name_of(member)} is cut off: {len(content)} of {member.size} bytes. Copy it again")
    return content


def _fetch(url: str, what: str) -> bytes:
    # Handlers of our own choice: the usual opener would also follow file: and ftp: addresses.
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.HTTPRedirectHandler,
        request.HTTPDefaultErrorHandler, request.HTTPErrorProcessor, request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as response:
            content = _read_within(response, FETCH_S)
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(f"{what} {url:.200} cannot be fetched: {error}") from error
    _check_size(len(content), what, url)
    return content


def _read_within(response: Any, seconds: float) -> bytes:
    """A response's bytes, up to one more than MAX_BYTES. Raises OSError for one that is cut off or takes too long."""
    end, expected = time.monotonic() + seconds, response.length  # None: until the server ends it
    content = bytearray()
    while len(content) <= MAX_BYTES and len(content) != expected:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(content)} bytes came within {seconds:g} s, and not all")
        piece = response.read1(_PIECE)
        if not piece:
            break
        content += piece
    if expected is not None and len(content) < min(expected, MAX_BYTES):
        raise OSError(f"cut off after {len(content)} of {expected} bytes")
    return bytes(content)


def _check_size(size: int, what: str, name: str) -> None:
    if size > MAX_BYTES:
        raise DataError(f"{what} {name:.200} has more than {MAX_BYTES} bytes; put it into a file below data_path")


_LONGEST_NAME = 4096  # characters of a path, as Linux has it
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://")


@dataclass(frozen=True)
class MediaResolver:
    """Where one sample's images, videos and sounds may come from.

    data_path: the folder that paths start from, which may be behind an address; None: no files. members: files of the
    sample's archive, by name; None: it has no archive. allow_http: fetch http and https addresses. keep_newlines: the
    newline between the tag of a file and the text beside it stays."""

    data_path: Path | RemoteFolder | None
    allow_http: bool = False
    members: Mapping[str, File] | None = None
    keep_newlines: bool = False

    def find(self, value: Any, what: str) -> File:
        """The bytes that `value` stands for: a path, a data: or http(s) or file: address, bytes, or {bytes, path}.

        what: "image", "video" or "audio". Raises DataError, with the reason alone."""
        if isinstance(value, Mapping):
            content = value.get("bytes")
            value = value.get("path") if content is None else content
        if isinstance(value, bytes):
            return Blob("in the annotation", value)
        if not isinstance(value, str) or not value:
            raise DataError(f"{what!r} must be a path, got {value!r:.80}")
        if value.startswith("data:"):
            return _decode(value, what)
        scheme = _SCHEME.match(value)
        return self._path(value, what) if scheme is None else self._address(value, scheme[1].lower(), what)

    def _address(self, value: str, scheme: str, what: str) -> File:
        if isinstance(self.data_path, RemoteFolder) and value.startswith(f"{self.data_path.url.rstrip('/')}/"):
            return self.data_path.find(value, what)
        if scheme == "file":
            return self._path(unquote(value[len("file://") :].removeprefix("localhost")), what)
        if scheme not in ("http", "https"):
            raise DataError(f"{what} {value:.200}: {scheme} addresses are not read. Copy it below data_path")
        if not self.allow_http:
            raise DataError(
                f"{what} {value:.200} is an address on the network; refused. Copy it below data_path, or set "
                "data.allow_http=true to fetch it each time"
            )
        return Remote(value)

    def _path(self, name: str, what: str) -> File:
        if len(name) > _LONGEST_NAME:
            raise DataError(
                f"{what} {name[:40]!r}… is {len(name)} characters long, which no path is. If it is base64, write "
                f"data:{what};base64, before it"
            )
        if self.members is not None:
            return self._member(name, what)
        if self.data_path is None:
            raise DataError(f"{what} {name!r}, but the dataset has no data_path. Set data_path to its {what} folder")
        if isinstance(self.data_path, RemoteFolder):
            return self.data_path.find(name, what)
        root = self.data_path.resolve()
        try:
            path = (root / name).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL byte
            raise DataError(f"{what} path {name!r} cannot be resolved: {error}") from error
        if not path.is_relative_to(root):
            raise DataError(f"{what} path {name!r} leaves data_path {root} (it leads to {path}); refused")
        return path

    def _member(self, name: str, what: str) -> File:
        """A member by its whole name or by what follows the sample's key (`jpg` of `0001.jpg`)."""
        members = self.members or {}
        found = [member for full, member in members.items() if full == name or full.endswith(f".{name}")]
        if len(found) != 1:
            raise DataError(f"{what} {name!r} is {len(found)} members of the sample's archive: {sorted(members)}")
        return found[0]


def _decode(address: str, what: str) -> Blob:
    """The bytes in a data: address, `data:image/png;base64,…`, which need not say of which kind they are."""
    head, comma, body = address.partition(",")
    kind = head.removeprefix("data:")
    if not comma or kind.partition("/")[0].partition(";")[0] not in (what, ""):
        raise DataError(f"{what} address {address!r:.60} must begin as data:{what}/FORMAT;base64,")
    if len(body) > 2 * MAX_BYTES:
        raise DataError(f"{what} in a data: address of {len(body)} characters; put it into a file below data_path")
    try:
        content = base64.b64decode(body, validate=True) if kind.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{what} address {address!r:.60} is not base64: {error}") from error
    return Blob(f"in a data: address of {len(content)} bytes", content)
