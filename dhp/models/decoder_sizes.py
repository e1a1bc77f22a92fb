"""The parameters of a decoder, piece by piece, without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dhp.models.registry import load_family
from dhp.models.shape import without_weights
from dhp.models.types import Chunk, held_layers


@dataclass(frozen=True)
class DecoderSizes:
    """Parameters of a decoder's pieces.

    layers: of each. head: of the head, which has them for itself unless `tied`. Then they are the embedding's, and
    `head == embedding`: they exist once where one group of ranks holds the first chunk and the last, else both groups
    have them.
    """

    embedding: int
    layers: tuple[int, ...]
    norm: int
    head: int
    tied: bool

    def held(self, chunks: Sequence[Chunk]) -> int:
        """Parameters of a group that holds these chunks."""
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        ends = self.embedding * first + (self.norm + self.head) * last
        twice = self.head if self.tied and first and last else 0
        return ends - twice + sum(self.layers[layer] for layer in held_layers(chunks))


def decoder_sizes(source: str) -> DecoderSizes:
    """Count the decoder of `source`, piece by piece, on the meta device."""
    decoder = load_family(source).decoder
    model = without_weights(source, ())
    count = lambda name: sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
    return DecoderSizes(
        embedding=count(decoder.embedding),
        layers=tuple(count(f"{decoder.layers.path}.{layer}") for layer in range(len(decoder.layers.kinds))),
        norm=count(decoder.norm),
        head=count(decoder.head),
        tied=decoder.tied,
    )
