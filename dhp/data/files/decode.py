"""Decodes a JSON value from bytes, or raises a DataError with the place of the error."""

from __future__ import annotations

import json
from typing import Any

from dhp.base.errors import DataError

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
    kind = _NOT_UTF_8.get(head[:2])
    if kind:
        raise DataError(f"the file is {kind}, not plain text in UTF-8. Convert it")
