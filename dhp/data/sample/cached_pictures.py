"""Looks features of pictures up by the bytes of their files."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from dhp.core.batch import Features, Grid, ProcessorOutput
from dhp.data.media.frames import FrameTimes
from dhp.data.media.sources import PLAIN, Blob, File, Frames, Picture, Video, files_of, name_of, open_media, settings_of

Load = Callable[[str], Features | None]
Tokens = Callable[[Grid | ProcessorOutput], int]  # of a picture
# Of a picture, what a sample needs besides its features; no pace: an image.
Seen = tuple[Grid | ProcessorOutput, FrameTimes | None]
FEATURE_FORMAT = 1  # of keys and files, and of how dhp makes patches: raise it when any of them changes
_DECODERS = ("pillow", "av", "transformers")  # the pixels of one file may differ from version to version


class CachedPictures:
    """Looks pictures up. Safe to call from several threads."""

    def __init__(self, tower: str, load: Load, names: Sequence[str], about: Sequence[Any]) -> None:
        """tower: see `dhp.core.batch.FeatureSettings`. load: the features under a key. names: of the tensors that
        leave the tower. about: properties of the model's family that decide the patches of a picture, except its
        image processor."""
        self._tower, self._load, self._names = tower, load, frozenset(names)
        self._about = [*about, *(version(name) for name in _DECODERS)]

    def digest(self, seen: Sequence[Any]) -> str:
        """Hex digest of a preprocessing. seen: all that decides the patches of a picture, except its file."""
        about = json.dumps([list(seen), self._about], sort_keys=True, default=str)
        return hashlib.sha256(about.encode()).hexdigest()

    def look_up(self, medium: Picture, digest: str, tokens: Tokens) -> tuple[Picture, Features, Seen | None]:
        """The picture to decode, with its features' key and None; or its features, and what they are of.

        digest: of the preprocessing. tokens: of a picture. Raises DataError for a file that cannot be read, ConfigError
        where the folder cannot."""
        content, medium = _digest(medium)
        kind = "video" if isinstance(medium, Video) else "image"
        if settings_of(medium) != PLAIN:
            kind = f"{kind} {settings_of(medium)}"
        key = key_of(self._tower, digest, kind, content)
        kept = self._load(key)
        seen = None if kept is None else self._check(kept, tokens)
        return medium, kept if kept is not None and seen is not None else Features(key, ""), seen

    def _check(self, kept: Features, tokens: Tokens) -> Seen | None:
        """None where the features are not those of such a picture: they are computed again."""
        assert kept.tensors is not None
        try:
            seen = seen_from_json(kept.about)
        except (ValueError, KeyError, TypeError):
            return None
        rows = {tensor.shape[:1] for tensor in kept.tensors.values()}
        return seen if kept.tensors.keys() == self._names and rows == {(tokens(seen[0]),)} else None


def seen_to_json(grid: Grid | ProcessorOutput, pace: FrameTimes | None) -> str:
    """As text. Floats are restored exactly."""
    form = grid if isinstance(grid, ProcessorOutput) else None
    arrays = None if form is None else [(*about, raw.hex()) for *about, raw in form.arrays]
    shape = grid if form is None else {**vars(form), "arrays": arrays}
    return json.dumps([shape, None if pace is None else [pace.seconds, pace.times, pace.firsts]])


def seen_from_json(text: str) -> Seen:
    """The inverse of `seen_to_json`. Raises ValueError, KeyError or TypeError for another text."""
    grid, times = json.loads(text)
    pace = None if times is None else FrameTimes(times[0], tuple(times[1]), tuple(times[2]))
    if not isinstance(grid, dict):
        t, h, w = map(int, grid)
        return (t, h, w), pace
    pixels = tuple((name, tuple(shape)) for name, shape in grid["pixels"])
    arrays = tuple((name, dtype, tuple(shape), bytes.fromhex(raw)) for name, dtype, shape, raw in grid["arrays"])
    return ProcessorOutput(pixels, arrays, int(grid["rows"]), int(grid["tokens"]), grid["written"]), pace


def key_of(tower: str, seen: str, kind: str, content: bytes) -> str:
    """Hex digest that a picture's features are cached under.

    tower: see `dhp.core.batch.FeatureSettings`. seen: hex digest of how pictures become patches. kind: image or
    video, and its own settings. content: SHA-256 of the bytes of its file."""
    hashed = json.dumps([FEATURE_FORMAT, tower, seen, kind, content.hex()])
    return hashlib.sha256(hashed.encode()).hexdigest()


def _digest(medium: Picture) -> tuple[bytes, Picture]:
    """SHA-256 of a file's bytes, and the file; an image, or a file that would be fetched again, with these bytes, so
    that the decoded bytes are the digested ones. Videos on disk are too large for that."""
    if isinstance(medium, Video) and isinstance(medium.file, Frames):
        digests = [_digest(file) for file in medium.file.files]
        frames = replace(medium.file, files=tuple(cast(File, file) for _, file in digests))
        whole = b"".join(content for content, _ in digests) + str(frames.rate).encode()
        return hashlib.sha256(whole).digest(), replace(medium, file=frames)
    (file,), video = files_of(medium), isinstance(medium, Video)
    with open_media(file, "video" if video else "image") as opened:
        if video and isinstance(file, Path):
            return hashlib.file_digest(cast(io.BufferedReader, opened), "sha256").digest(), medium
        content = opened.read()
    blob = Blob(name_of(file), content)
    found = blob if isinstance(medium, File) else replace(medium, file=blob)
    return hashlib.sha256(content).digest(), found
