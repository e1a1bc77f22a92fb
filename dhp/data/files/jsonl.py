"""JSONL: the offset of each line is in memory, eight bytes a line; lines are read when they are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dhp.data.files.decode import BYTE_ORDER_MARK, check_head, decode_json
from dhp.data.files.rows import RawSample
from dhp.data.records import located

_CHUNK_BYTES = 1 << 24  # bytes that are searched for line ends at once
_LINE_END = 10
_IS_TEXT = np.array([not bytes([byte]).isspace() for byte in range(256)])


class JsonlRows:
    """See `dhp.data.files.rows.RawSamples`. Blank lines are no samples, but count as lines."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that is not text in UTF-8 at all."""
        self._path = path
        with path.open("rb") as file:
            head = file.read(len(BYTE_ORDER_MARK))
        with located(str(path)):
            check_head(head)
        skip = len(head) if head == BYTE_ORDER_MARK else 0
        bounds, self._blank = find_lines(path, skip)
        bounds[0] = skip
        self._bounds = bounds
        # Samples before each blank line, which is all it takes to know the line of a sample.
        self._before = self._blank - np.arange(len(self._blank))

    def __len__(self) -> int:
        return len(self._bounds) - 1 - len(self._blank)

    def locate(self, index: int) -> tuple[int, str]:
        line = self._line(index) + 1
        return line, f"line {line} of {self._path}"

    def read(self, index: int) -> RawSample:
        line = self._line(index)
        start, stop = self._bounds[line : line + 2].tolist()
        return RawSample(decode_json(_between(self._path, start, stop).rstrip(), whole_file=False))

    def _line(self, index: int) -> int:
        """The 0-based line of a sample."""
        return index + int(np.searchsorted(self._before, index, side="right"))


def find_lines(path: Path, skip: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64 [lines + 1]: where each line begins, and the end of the file; int64 [blank lines]: their numbers, 0-based.

    Read once, in chunks. skip: bytes at the file's beginning that are none of its first line.
    """
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


def _between(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
