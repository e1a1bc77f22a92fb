"""JSONL: where each line begins is kept, eight bytes a line; lines are read when they are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dhp.data.files.decode import BYTE_ORDER_MARK, check_head, decode_json
from dhp.data.files.rows import RawSample
from dhp.data.records import located

_CHUNK_BYTES = 1 << 24  # bytes that are searched for line ends at once
_SHORT_BYTES = 16  # a line of so few bytes may be blank; no sample is that short


class JsonlRows:
    """See `dhp.data.files.rows.RawSamples`. Blank lines are no samples, but count as lines."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that is not text in UTF-8 at all."""
        self._path = path
        with path.open("rb") as file:
            head = file.read(len(BYTE_ORDER_MARK))
        with located(str(path)):
            check_head(head)
        bounds = line_bounds(path)
        if head == BYTE_ORDER_MARK:
            bounds[0] = len(head)
        blank = _blank_lines(path, bounds)
        self._bounds, self._blank = bounds, blank
        # Samples before each blank line, which is all it takes to know the line of a sample.
        self._before = blank - np.arange(len(blank))

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


def line_bounds(path: Path) -> np.ndarray:
    """int64 [lines + 1]: where each line begins, and the end of the file. Read once, in chunks."""
    found, size = [np.zeros(1, dtype=np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            # "\n" alone: str.splitlines would also cut inside strings that hold U+2028.
            found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10) + (size + 1))
            size += len(chunk)
    bounds = np.concatenate(found)
    return bounds if bounds[-1] == size else np.append(bounds, size)


def _blank_lines(path: Path, bounds: np.ndarray) -> np.ndarray:
    """int64 [blank lines]: their numbers, 0-based."""
    short = np.flatnonzero(np.diff(bounds) <= _SHORT_BYTES)
    return np.array([n for n in short if not _between(path, *bounds[n : n + 2].tolist()).strip()], dtype=np.int64)


def _between(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
