"""A JSON array of samples, read whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dhp.base.errors import DataError
from dhp.data.files.decode import BYTE_ORDER_MARK, check_head, decode_json
from dhp.data.files.rows import RawSample
from dhp.data.records import located


class JsonRows:
    """See `dhp.data.files.rows.RawSamples`."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that is not one JSON array in UTF-8, with line and column."""
        with located(str(path)):
            content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
            check_head(content)
            self._path, self._values = path, _array(decode_json(content, whole_file=True))

    def __len__(self) -> int:
        return len(self._values)

    def locate(self, index: int) -> tuple[int, str]:
        return index + 1, f"element {index + 1} of {self._path}"

    def read(self, index: int) -> RawSample:
        return RawSample(self._values[index])


def _array(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    kind = {dict: "object", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
    raise DataError(
        f"the file holds one JSON {kind}, not an array of samples. "
        "Wrap the samples in [ ]; a file with one object a line must be called .jsonl."
    )
