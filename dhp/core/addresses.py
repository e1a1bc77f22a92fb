"""Paths that are addresses: `SCHEME://…`."""

from __future__ import annotations

import re
from urllib.parse import unquote

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://")


def scheme_of(path: str) -> str | None:
    """The scheme of an address, in lower case; None for a path."""
    found = _SCHEME.match(path)
    return None if found is None else found[1].lower()


def is_remote(path: str) -> bool:
    """Whether it is the address of something that is no file of this machine."""
    return scheme_of(path) not in (None, "file")


def without_file_scheme(path: str) -> str:
    """A file: address as the path that it stands for; all else as it is."""
    if scheme_of(path) != "file":
        return path
    return unquote(path.partition("://")[2].removeprefix("localhost"))
