"""The interface of a model family, beyond transformers' own contract (`mm_encoder_outputs`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.base.geometry import ProcessorOutput

if TYPE_CHECKING:
    from dhp.models.decoder import Decoder
    from dhp.models.part import Part
    from dhp.models.processor import Processor
    from dhp.models.tower import Tower

VISION = "vision"  # the part that every family has besides its decoder


@dataclass(frozen=True)
class Family:
    """One model family, for the checkpoint with this configuration. Nothing in it needs weights or a device.

    processor: a sample's pictures and tokens as the model reads them.

    tower: the part "vision". decoder: the part "text". others: further encoders, by part.

    idle: modules that no part of a run trains: vision's ranks hold them unchanged, so that a checkpoint has all.

    note: for users who train it; "": none.
    """

    config: Any
    processor: Processor
    tower: Tower
    decoder: Decoder
    others: Mapping[str, Part] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    note: str = ""

    @property
    def parts(self) -> dict[str, Part]:
        """All parts by name, in the order of the data flow."""
        return {VISION: self.tower, **self.others, "text": self.decoder}

    def check_answers(self) -> None:
        """Raises ModelError, by name, for a model that cannot answer prompts here."""
        self.decoder.check_answers()

    def having(self, parts: Iterable[str]) -> Family:
        """The family in a run with these parts alone: the modules of further encoders that it leaves out are idle."""
        kept = {name: part for name, part in self.others.items() if name in set(parts)}
        left_out = tuple(module for name, part in self.others.items() if name not in kept for module in part.modules)
        return replace(self, others=kept, idle=(*self.idle, *left_out))

    def outside(self, part: str) -> tuple[str, ...]:
        """Modules of all other parts, which this one's ranks drop."""
        others = tuple(module for name, other in self.parts.items() if name != part for module in other.modules)
        return others if part == VISION else (*others, *self.idle)


@dataclass(frozen=True)
class ImageLayout:
    """The order and the attention segments of one image in the tower.

    order: merged-token index in processor order, for each place in tower order; int64 [units]. unit: patches that are
    merged into one token. window_lengths: patches of each attention window, in tower order. frame_lengths: patches of
    each full-attention segment, in tower order. positions: coordinates of each patch, in tower order; int64 [patches,
    columns]. Row and column come first, a tower may need more. tokens: of each attention window, merged; None: its
    patches / unit. form: of a picture that the tower takes whole.
    """

    order: Tensor
    unit: int
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]
    positions: Tensor
    tokens: tuple[int, ...] | None = None
    form: ProcessorOutput | None = None

    @property
    def patches(self) -> int:
        return len(self.positions)

    @property
    def window_tokens(self) -> tuple[int, ...]:
        """Merged tokens of each attention window."""
        return self.tokens or tuple(length // self.unit for length in self.window_lengths)

    def patch_order(self) -> Tensor:
        """Patch index in processor order for each place in tower order; int64 [patches]."""
        if self.form is not None:
            return torch.arange(self.patches)
        return (self.order[:, None] * self.unit + torch.arange(self.unit)).flatten()


@dataclass(frozen=True)
class LayerParts:
    """The layers of a part, and the modules whose outputs are worth saving when the rest is recomputed.

    path: the module that lists the layers. In each layer, projections: the matrix products around attention; mlp: those
    before the activation function, or all experts of the layer: of each list a layer has some. kinds: what kind each
    layer is of; layers of one kind do the same work.
    """

    path: str
    projections: tuple[str, ...]
    mlp: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class DecoderInputs:
    """The decoder's inputs, on its device.

    input_ids: [rows, tokens], which a first chunk reads; position_ids: as the family makes them.

    kinds: of each token, [rows, tokens]: 0 text, 1 of an image, 2 of a video, 3 of sound.

    images: the tower's features of images and videos, [n, hidden] each, by the name of the tower's tensor: those that
    enter here, none where there are no images. image_positions: of each of the n among the flattened rows × tokens;
    int64 [n]. sounds and sound_positions: the same of the audio tower's tensors.

    hidden: states from the chunk before, [rows, tokens, hidden]; None for a first chunk.
    """

    input_ids: Tensor | None
    position_ids: Tensor
    images: Mapping[str, Tensor] = field(default_factory=dict)
    image_positions: Tensor | None = None
    hidden: Tensor | None = None
    kinds: Tensor | None = None
    sounds: Mapping[str, Tensor] = field(default_factory=dict)
    sound_positions: Tensor | None = None
