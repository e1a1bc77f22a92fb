"""What crosses from a family's encoder to its decoder: fields of the encoder's output, as rows by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dhp.models.tower import EMBEDDINGS

POOLED, LAST = "pooler_output", "last_hidden_state"


@dataclass(frozen=True)
class Handover:
    """The fields that the decoder reads, each with a row for every placeholder.

    main: the field whose rows take the placeholders' places. more: other fields, and how many levels each has. listed:
    the decoder takes a list of tensors, one an image, not one tensor.
    """

    main: str = POOLED
    more: tuple[tuple[str, int], ...] = ()
    listed: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that `take` gives."""
        return (EMBEDDINGS, *(f"{field}.{level}" for field, levels in self.more for level in range(levels)))

    def take(self, output: Mapping[str, Any]) -> dict[str, Tensor]:
        """Rows [tokens, width] by name, of what the encoder gave for some images, in their order."""
        fields = [output[self.main]]
        for field, levels in self.more:
            fields += [output[field][level] for level in range(levels)]
        return dict(zip(self.names, map(_rows, fields), strict=True))

    def give(self, rows: Mapping[str, Tensor]) -> Encoded:
        """The same as the decoder takes it."""
        wrap = (lambda tensor: (tensor,)) if self.listed else (lambda tensor: tensor)
        fields = {self.main: wrap(rows[EMBEDDINGS])}
        for field, levels in self.more:
            fields[field] = [(rows[f"{field}.{level}"],) for level in range(levels)]
        return Encoded(fields)


class Encoded:
    """In the place of an encoder's output: its fields, and which of them were asked for."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            raise AttributeError(name)
        self.read.append(name)
        return self._fields[name]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self._fields


def _rows(field: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(field, Tensor):
        return field.reshape(-1, field.shape[-1])
    return torch.cat([_rows(one) for one in field])
