"""A picture's features: what leaves a tower that is not trained, and the key that they are kept under."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dhp.base.geometry import Form, Grid

FEATURE_FORMAT = 1  # of files and keys, and of how dhp makes patches: raise it when any of them changes


@dataclass(frozen=True)
class FeatureSettings:
    """Where features are kept. tower: hex digest of the weights and all else that makes features of patches."""

    folder: str
    tower: str


@dataclass(frozen=True)
class KeepSettings:
    """Where ranks write features. room_bytes: what each of them may add; None: no bound."""

    folder: str
    room_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one picture.

    key: hex digest. about: its grid or form, in JSON, for whoever reads them later.

    tensors: [tokens, width] by name, in the order of the picture's placeholders; None: nothing is kept under the key.
    """

    key: str
    about: str
    tensors: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Layout:
    """What a sample needs of a picture beside its features. seconds, times, firsts: the video's `Pace`; None: an
    image."""

    grid: Grid | Form
    seconds: float | None = None
    times: tuple[float, ...] = ()
    firsts: tuple[float, ...] = ()

    def to_json(self) -> str:
        """As text. Numbers with fractions come back to the bit."""
        grid = _form_to_json(self.grid) if isinstance(self.grid, Form) else list(self.grid)
        return json.dumps([grid, self.seconds, self.times, self.firsts])

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout again. Raises ValueError, KeyError or TypeError for another text."""
        grid, seconds, times, firsts = json.loads(text)
        if isinstance(grid, dict):
            return cls(_form_from_json(grid), seconds, tuple(times), tuple(firsts))
        t, h, w = map(int, grid)
        return cls((t, h, w), seconds, tuple(times), tuple(firsts))


def key_of(tower: str, seen: str, kind: str, content: bytes) -> str:
    """Hex digest that a picture's features are kept under.

    tower: see `FeatureSettings`. seen: hex digest of how pictures become patches. kind: image or video. content:
    SHA-256 of the bytes of its file.
    """
    told = json.dumps([FEATURE_FORMAT, tower, seen, kind, content.hex()])
    return hashlib.sha256(told.encode()).hexdigest()


def _form_to_json(form: Form) -> dict[str, Any]:
    arrays = [(name, dtype, shape, raw.hex()) for name, dtype, shape, raw in form.arrays]
    return {
        "pixels": form.pixels,
        "arrays": arrays,
        "rows": form.rows,
        "tokens": form.tokens,
        "written": form.written,
    }


def _form_from_json(told: dict[str, Any]) -> Form:
    pixels = tuple((name, tuple(shape)) for name, shape in told["pixels"])
    arrays = tuple((name, dtype, tuple(shape), bytes.fromhex(raw)) for name, dtype, shape, raw in told["arrays"])
    return Form(pixels, arrays, int(told["rows"]), int(told["tokens"]), told["written"])
