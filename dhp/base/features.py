"""Cached features of a picture: the output of a frozen tower, and where it is cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FeatureSettings:
    """Where features are cached. tower: hex digest of the weights and all else that turns patches into features."""

    folder: str
    tower: str


@dataclass(frozen=True)
class KeepSettings:
    """Where ranks write features. room_bytes: the most that each rank may add; None: no bound."""

    folder: str
    room_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one picture.

    key: hex digest that they are cached under. about: of the picture, what a later reader needs as well.

    tensors: [tokens, width] by name, in the order of the picture's placeholders; None: nothing is cached yet.
    """

    key: str
    about: str
    tensors: Mapping[str, Tensor] | None = None
