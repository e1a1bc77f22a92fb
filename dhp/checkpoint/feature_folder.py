"""Caches features on disk, a verified file for each key."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dhp.core.batch import Features
from dhp.core.errors import ConfigError
from dhp.core.files import require_writable, write_whole

REMEDY = "Set data.cache_features to a folder that can be read and written and has room"
_KEY = re.compile(r"[0-9a-f]{64}")  # of SHA-256: no name from data ever becomes a path


class FeatureFolder:
    """Files by key, below folders by the key's first two letters. Several processes and runs may use it at once."""

    def __init__(self, folder: Path) -> None:
        """folder: created by the first `save`."""
        self._folder = folder

    def load(self, key: str) -> Features | None:
        """The features under a key; None where there are none, or a damaged file, which the next `save` replaces.
        Raises ConfigError where the folder cannot be read."""
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"features of pictures cannot be read in {self._folder}: {error.strerror or error}. {REMEDY}"
            ) from error
        try:
            return _unpack(key, content)
        except (SafetensorError, ValueError, KeyError, TypeError):
            return None

    def save(self, features: Features) -> None:
        """Write features. A crash may leave half a file, which `load` finds damaged: there is no fsync. Raises
        ConfigError where it cannot be written, as on a full disk."""
        assert features.tensors is not None
        path = self._path(features.key)
        tensors = {name: rows.contiguous() for name, rows in features.tensors.items()}
        about = {"key": features.key, "about": features.about}
        content = save(tensors, about | {"sha256": _digest(features.key, features.about, tensors)})
        try:
            write_whole(path, content)
        except OSError as error:
            raise ConfigError(
                f"features of pictures cannot be kept in {self._folder}: {error.strerror or error}. {REMEDY}, or bound "
                "it by data.cache_features_gib"
            ) from error

    def check(self) -> None:
        """Raises ConfigError where nothing can be written; called before a run starts."""
        try:
            require_writable(self._folder)
        except OSError as error:
            raise ConfigError(
                f"data.cache_features={self._folder} cannot be written: {error.strerror or error}. {REMEDY}"
            ) from error

    def nbytes(self) -> int:
        """Bytes of all files in it."""
        found = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with suppress(FileNotFoundError):  # another run has just renamed it
                    found += os.stat(os.path.join(folder, name)).st_size
        return found

    def size(self, key: str) -> int:
        """Bytes of the file under a key, damaged or not; 0 where there is none."""
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            return 0

    def _path(self, key: str) -> Path:
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"{key!r} is no key of features: 64 hex digits")
        return self._folder / key[:2] / f"{key}.safetensors"


def _unpack(key: str, content: bytes) -> Features | None:
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    if header["key"] != key or header["sha256"] != _digest(key, header["about"], tensors):
        return None
    return Features(key, header["about"], tensors)


def _digest(key: str, about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps([key, about]).encode())
    for name in sorted(tensors):
        rows = tensors[name]
        digest.update(json.dumps([name, str(rows.dtype), list(rows.shape)]).encode())
        digest.update(rows.view(torch.uint8).numpy().data)
    return digest.hexdigest()
