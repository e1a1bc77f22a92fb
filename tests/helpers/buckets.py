"""A file system that stands in for those of clouds: files of a local folder, with delays, errors and short reads."""

import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem


@dataclass
class Faults:
    """What goes wrong, request by request; and what was asked for. fail: so many requests more raise OSError. short: so
    many opened files more end early. delay_s: of each request."""

    fail: int = 0
    short: int = 0
    delay_s: float = 0.0
    infos: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)


class Bucket(AbstractFileSystem):
    """The files below `root`, as `bucket/name`."""

    protocol = ("s3", "gs")
    cachable = False
    root: Path
    faults: Faults

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._ask()
        self.faults.infos.append(path)
        found = self._found(path)
        if found.is_dir():
            return {"name": path, "size": 0, "type": "directory"}
        about = found.stat()
        return {"name": path, "size": about.st_size, "type": "file", "ETag": f"{about.st_mtime_ns}-{about.st_size}"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        names = [f"{self._strip_protocol(path)}/{name}" for name in sorted(os.listdir(self._found(path)))]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        self._ask()
        self.faults.opened.append(path)
        content = self._found(path).read_bytes()
        if self.faults.short:
            self.faults.short -= 1
            content = content[: len(content) // 2]
        return io.BytesIO(content)

    def _ask(self) -> None:
        time.sleep(self.faults.delay_s)
        if self.faults.fail:
            self.faults.fail -= 1
            raise OSError("503 slow down")

    def _found(self, path: str) -> Path:
        found = self.root / self._strip_protocol(path)
        if not found.exists():
            raise FileNotFoundError(path)
        return found


@contextmanager
def buckets(root: Path, *schemes: str) -> Iterator[Faults]:
    """Let addresses of these schemes lead to files below `root`, for the time of the block."""
    faults = Faults()
    made = type("MadeBucket", (Bucket,), {"root": root, "faults": faults, "protocol": schemes or ("s3", "gs")})
    before = {scheme: _registry.get(scheme) for scheme in made.protocol}
    for scheme in before:
        fsspec.register_implementation(scheme, made, clobber=True)
    try:
        yield faults
    finally:
        for scheme, own in before.items():
            _registry.pop(scheme, None)
            if own is not None:
                _registry[scheme] = own
