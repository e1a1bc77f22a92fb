"""The properties of a family without code of its own, as values, and the tensors that its encoder sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.batch import ProcessorOutput
from dhp.core.generation import LogitRule
from dhp.models.contract.structure import Structure
from dhp.models.flops import TextWork, VisionWork
from dhp.models.tower import EMBEDDINGS
from dhp.models.types import LayerParts


@dataclass(frozen=True)
class Contract:
    """The properties of one configuration's family.

    structure: the modules of each part. base: the class of the module that encodes pictures and runs the decoder.
    handover: the tensors between them.

    dummy: the form of the picture of a rank without work; values: numbers in a row of pixels.

    arguments: of the encoder, that an image processor may give.

    batches: several pictures of one shape may go through the encoder together. loops: some module in it is called once
    for each of them then.

    embeds: the decoder needs nothing but embeddings, in which the encoder's rows replace those of placeholders.

    cuts: the decoder may be cut by layers: a layer needs nothing but the states of the one before.

    logits: how logits are computed from the head's output.

    tensor_plan: styles of the decoder's modules that transformers' plan leaves out; None: it has no plan that could be
    completed here.

    vision_layers, text_layers: modules of their layers. experts: modules of experts among the latter.

    unused: the tower's parameters that no output depends on; those of the decoder, with `*` for a layer's number.
    """

    structure: Structure
    base: type[nn.Module]
    handover: Handover
    dummy: ProcessorOutput
    values: int
    arguments: tuple[str, ...]
    batches: bool
    embeds: bool
    cuts: bool
    logits: LogitRule
    tensor_plan: Mapping[str, str] | None
    unused: tuple[str, ...]
    vision_work: VisionWork
    text_work: TextWork
    vision_layers: LayerParts
    text_layers: LayerParts
    experts: tuple[str, ...]
    loops: bool = False


POOLED, LAST = "pooler_output", "last_hidden_state"


@dataclass(frozen=True)
class Handover:
    """The fields that the decoder reads, each with a row for every placeholder.

    main: the field whose rows replace the placeholders'. more: other fields, and how many levels each has. listed:
    the decoder takes a list of tensors, one an image, not one tensor.

    shared: fields with a few rows that all pictures have in common (Ovis2's indicators): how many rows, and in how many
    tensors they travel. Each picture's first rows carry them, and the decoder takes those of its first picture, so that
    their gradient is the sum over all decoders.
    """

    main: str = POOLED
    more: tuple[tuple[str, int], ...] = ()
    listed: bool = True
    shared: tuple[tuple[str, int, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that `take` gives."""
        more = (*self.more, *((field, tensors) for field, _, tensors in self.shared))
        return (EMBEDDINGS, *(f"{field}.{level}" for field, levels in more for level in range(levels)))

    def take(self, output: Mapping[str, Any], tokens: Sequence[int] = ()) -> dict[str, Tensor]:
        """Rows [tokens, width] by name, from the encoder's output for some images, in their order. tokens: of each,
        where they share rows."""
        fields = [_rows(output[self.main])]
        for field, levels in self.more:
            fields += [_rows(output[field][level]) for level in range(levels)]
        for field, count, tensors in self.shared:
            each = -(-count // tensors)
            fields += [_spread(part, tokens or [len(fields[0])]) for part in output[field].split(each)]
        return dict(zip(self.names, fields, strict=True))

    def give(self, rows: Mapping[str, Tensor]) -> Encoded:
        """The inverse of `take`: the encoder's output as the decoder takes it."""
        wrap = (lambda tensor: (tensor,)) if self.listed else (lambda tensor: tensor)
        fields = {self.main: wrap(rows[EMBEDDINGS])}
        for field, levels in self.more:
            fields[field] = [(rows[f"{field}.{level}"],) for level in range(levels)]
        for field, count, tensors in self.shared:
            each = -(-count // tensors)
            parts = [rows[f"{field}.{part}"][: min(each, count - part * each)] for part in range(tensors)]
            fields[field] = torch.cat(parts)
        return Encoded(fields)


class Encoded:
    """A stand-in for an encoder's output: its fields, and which of them were read."""

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


def _spread(part: Tensor, tokens: Sequence[int]) -> Tensor:
    """`part` in the first rows of each picture, zeros in the others."""
    return torch.cat([torch.cat([part, part.new_zeros(count - len(part), part.shape[1])]) for count in tokens])
