"""A picture's features, what leaves a tower that is not trained; and where they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


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

    key: hex digest that they are kept under. about: of the picture, what a later reader needs as well.

    tensors: [tokens, width] by name, in the order of the picture's placeholders; None: nothing is kept under the key.
    """

    key: str
    about: str
    tensors: Mapping[str, Tensor] | None = None
