"""Useful arithmetic of a step, from shapes and lengths.

Counted are products of matrices, attention among them, as 2 operations a multiply-add. Backward is twice the forward
where all is trained: the gradient of either factor is a product as large; where not, `TrainedShare` has the rest.
Nothing is counted twice that is only recomputed, and nothing at all for padding, dummy windows, or layers that no
output depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dhp.models.types import find_experts

if TYPE_CHECKING:
    from dhp.models.types import ImageLayout


@dataclass(frozen=True)
class MatmulShare:
    """Products of states with some of a part's matrices, as shares of what one forward takes without adapters.

    forward: what forward takes: above 1 with adapters. inputs: what gradients of the states take; weights: of the
    matrices."""

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True)
class TrainedShare:
    """Shares of a part: of the matrices before its layers, of those in them, and of those after, projector or head.

    attention: the share of the layers' attention that gradients go through."""

    entering: MatmulShare = MatmulShare()
    layers: MatmulShare = MatmulShare()
    ending: MatmulShare = MatmulShare()
    attention: float = 1.0


EVERYTHING = TrainedShare()  # all is trained
_AHEAD = MatmulShare(inputs=0.0, weights=0.0)
NO_BACKWARD = TrainedShare(_AHEAD, _AHEAD, _AHEAD, 0.0)

OPERATIONS = 2  # for each multiply-add


@dataclass(frozen=True)
class VisionWork:
    """Multiply-adds of a tower and its projector.

    patch: for each patch in the patch embedding; pixels have no gradient.

    token: for each token in the matrices of all layers.

    window_pair, segment_pair: for two tokens that see each other, in all layers that attend to windows, and in all that
    attend to whole segments.

    embedding: for each embedding that is sent to the decoder.

    extra_tokens: of each segment, in addition to its patches."""

    patch: int
    token: int
    window_pair: int
    segment_pair: int
    embedding: int
    extra_tokens: int = 0

    def flops(self, layouts: Iterable[ImageLayout], passes: TrainedShare = EVERYTHING) -> int:
        """Operations for these images and videos."""
        entering = inside = seen = handed = 0
        for layout in layouts:
            segments = [length + self.extra_tokens for length in layout.frame_lengths]
            entering += self.patch * layout.patches
            inside += self.token * sum(segments)
            seen += self.window_pair * _squares(layout.window_lengths) + self.segment_pair * _squares(segments)
            handed += self.embedding * len(layout.order)
        done = _of_data(entering, passes.entering) + _of_matrices(inside, passes.layers)
        return round(done + _of_attention(seen, passes) + _of_matrices(handed, passes.ending))


@dataclass(frozen=True)
class AudioWork:
    """Multiply-adds of an audio tower and its projector.

    frame: for each frame in the first convolution; sound has no gradient. convolved: for each frame in the others.

    joined: for each row behind the convolutions in the matrix that leads to the layers; token: in the matrices of all
    layers; embedding: in the projector. pair: for two rows of one window, of which a full one has `window` rows."""

    frame: int
    convolved: int
    joined: int
    token: int
    embedding: int
    pair: int
    window: int

    def flops(self, layouts: Iterable[ImageLayout], passes: TrainedShare = EVERYTHING) -> int:
        """Operations for these clips."""
        done = 0.0
        for layout in layouts:
            frames, rows = layout.patches, len(layout.order)
            full, left = divmod(rows, self.window)
            done += _of_data(self.frame * frames, passes.entering)
            done += _of_matrices(self.convolved * frames + self.joined * rows, passes.entering)
            done += _of_matrices(self.token * rows, passes.layers)
            done += _of_attention(self.pair * (full * self.window**2 + left**2), passes)
            done += _of_matrices(self.embedding * rows, passes.ending)
        return round(done)


@dataclass(frozen=True)
class TextWork:
    """Multiply-adds of a decoder and its head.

    token: for each token in the matrices of all layers. pair: for two tokens that see each other, in all layers.
    target: for each token that the head runs on."""

    token: int
    pair: int
    target: int

    def flops(self, lengths: Sequence[int], targets: int, passes: TrainedShare = EVERYTHING) -> int:
        """Operations for samples of these tokens, of which `targets` in all have a loss. Under causal attention half of
        the pairs see each other."""
        done = _of_matrices(self.token * sum(lengths), passes.layers)
        done += _of_attention(self.pair * _squares(lengths) // 2, passes)
        return round(done + _of_matrices(self.target * targets, passes.ending))


def head_width(text: Any) -> int:
    """Values of an attention head of a decoder of that configuration."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def text_work(text: Any) -> TextWork:
    """Arithmetic of the decoder of that configuration, with gated MLPs; of experts, those that a token visits, and
    their router."""
    hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    head_dim = head_width(text)
    attention = 2 * hidden * (heads + text.num_key_value_heads) * head_dim  # query and output, key and value
    dense = 3 * hidden * text.intermediate_size
    token, experts = layers * (attention + dense), find_experts(text)
    if experts is not None:
        visited = hidden * (experts.count + 3 * (experts.visits * experts.width + experts.shared))
        token += sum(experts.sparse) * (visited - dense)
    return TextWork(token, layers * 2 * heads * head_dim, hidden * text.vocab_size)


def _of_matrices(done: int, products: MatmulShare) -> float:
    """Operations of so many multiply-adds between states and matrices."""
    return OPERATIONS * done * (products.forward + products.inputs + products.weights)


def _of_data(done: int, products: MatmulShare) -> float:
    """Operations between data, which have no gradient, and matrices."""
    return OPERATIONS * done * (products.forward + products.weights)


def _of_attention(done: int, passes: TrainedShare) -> float:
    """Operations between states: both have a gradient, or neither."""
    return OPERATIONS * done * (1 + 2 * passes.attention)


def _squares(lengths: Iterable[int]) -> int:
    return sum(length * length for length in lengths)
