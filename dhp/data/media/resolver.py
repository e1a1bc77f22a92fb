"""Resolves an annotation's names of images, videos and audio: only inside data_path, fetched only if allowed."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from dhp.core.errors import DataError
from dhp.data.media.sources import MAX_BYTES, Blob, File, Remote
from dhp.data.remote.files import RemoteFolder

_LONGEST_NAME = 4096  # characters of a path, as Linux has it
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://")


@dataclass(frozen=True)
class MediaResolver:
    """Where one sample's images, videos and sounds may come from.

    data_path: the folder that paths start from, which may be behind an address; None: no files. members: files of the
    sample's archive, by name; None: it has no archive. allow_http: fetch http and https addresses. keep_newlines: the
    newline between the tag of a file and the text beside it stays.
    """

    data_path: Path | RemoteFolder | None
    allow_http: bool = False
    members: Mapping[str, File] | None = None
    keep_newlines: bool = False

    def find(self, value: Any, what: str) -> File:
        """The bytes that `value` stands for: a path, a data: or http(s) or file: address, bytes, or {bytes, path}.

        what: "image", "video" or "audio". Raises DataError, with the reason alone.
        """
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
