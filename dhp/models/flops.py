"""The useful arithmetic of a step, counted from shapes and lengths: what the model needs, whatever is run for it.

Counted are products of matrices, attention among them, as 2 operations a multiply-add. Backward is twice the forward:
the gradient of either factor is a product as large. Nothing is counted twice that is only recomputed, and nothing at
all for padding, dummy windows, or layers that no output depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dhp.models.experts import find_experts

if TYPE_CHECKING:
    from dhp.models.family import ImageLayout

FORWARD, BACKWARD = 2, 4  # operations for each multiply-add
WEIGHTS = 2  # of them in backward for the gradient of weights alone


@dataclass(frozen=True)
class VisionWork:
    """Multiply-adds of a tower and its projector.

    patch: for each patch in the patch embedding; pixels have no gradient.

    token: for each token in the matrices of all layers.

    window_pair, segment_pair: for two tokens that see each other, in all layers that attend to windows, and in all that
    attend to whole segments.

    embedding: for each embedding that is handed over.

    beside: tokens that each segment has beside its patches.
    """

    patch: int
    token: int
    window_pair: int
    segment_pair: int
    embedding: int
    beside: int = 0

    def flops(self, layouts: Iterable[ImageLayout], backward: bool = True) -> int:
        """Operations for these images and videos."""
        entering = rest = 0
        for layout in layouts:
            segments = [length + self.beside for length in layout.frame_lengths]
            entering += self.patch * layout.patches
            rest += self.token * sum(segments) + self.embedding * len(layout.order)
            rest += self.window_pair * _squares(layout.window_lengths) + self.segment_pair * _squares(segments)
        if not backward:
            return FORWARD * (entering + rest)
        return (FORWARD + WEIGHTS) * entering + (FORWARD + BACKWARD) * rest


@dataclass(frozen=True)
class AudioWork:
    """Multiply-adds of an audio tower and its projector.

    frame: for each frame in the first convolution; sound has no gradient. convolved: for each frame in the others.

    token: for each row behind the convolutions in the matrices of all layers. pair: for two rows of one window, of
    which a full one has `window` rows.
    """

    frame: int
    convolved: int
    token: int
    pair: int
    window: int

    def flops(self, layouts: Iterable[ImageLayout], backward: bool = True) -> int:
        """Operations for these clips."""
        entering = rest = 0
        for layout in layouts:
            full, left = divmod(len(layout.order), self.window)
            entering += self.frame * layout.patches
            rest += self.convolved * layout.patches + self.token * len(layout.order)
            rest += self.pair * (full * self.window**2 + left**2)
        if not backward:
            return FORWARD * (entering + rest)
        return (FORWARD + WEIGHTS) * entering + (FORWARD + BACKWARD) * rest


@dataclass(frozen=True)
class TextWork:
    """Multiply-adds of a decoder and its head.

    token: for each token in the matrices of all layers. pair: for two tokens that see each other, in all layers.
    target: for each token that the head runs on.
    """

    token: int
    pair: int
    target: int

    def flops(self, lengths: Sequence[int], targets: int, backward: bool = True) -> int:
        """Operations for samples of these tokens, of which `targets` in all have a loss. Under causal attention half of
        the pairs see each other."""
        done = self.token * sum(lengths) + self.pair * _squares(lengths) // 2 + self.target * targets
        return (FORWARD + (BACKWARD if backward else 0)) * done


def decoder_work(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, rows: int) -> TextWork:
    """A decoder with gated MLPs. heads, kv_heads: of `head_dim` each; mlp: its inner width; rows: of the head."""
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim  # query and output, key and value
    return TextWork(layers * (attention + 3 * hidden * mlp), layers * 2 * heads * head_dim, hidden * rows)


def text_work(text: Any) -> TextWork:
    """What the decoder of that configuration computes; of experts, those that a token visits, and their router."""
    dense = decoder_work(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp=text.intermediate_size,
        rows=text.vocab_size,
    )
    experts, hidden = find_experts(text), text.hidden_size
    if experts is None:
        return dense
    visited = hidden * (experts.count + 3 * (experts.visits * experts.width + experts.shared))
    return replace(dense, token=dense.token + sum(experts.sparse) * (visited - 3 * hidden * text.intermediate_size))


def _squares(lengths: Iterable[int]) -> int:
    return sum(length * length for length in lengths)
