"""Values and interfaces of a family and of its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dhp.config.schema import PartConfig
from dhp.core.batch import ProcessorOutput
from dhp.core.heads import Projection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BlockRule = Literal["bounded", "windowed", "free"]  # how the blocks of a decoder's tokens go with a layer's window


@dataclass(frozen=True)
class Chunk:
    """Consecutive decoder layers.

    layers: their indices, at least one. first: it embeds tokens and inserts the features of pictures. last: it applies
    the final norm, so that the head can follow."""

    layers: range
    first: bool
    last: bool


def held_layers(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Indices of the layers that a group with these chunks holds, ascending."""
    return tuple(sorted(layer for chunk in chunks for layer in chunk.layers))


def chunks_of(ranges: Sequence[range], whole: Chunk) -> tuple[Chunk, ...]:
    """Chunks of these layers of a decoder whose one chunk would be `whole`."""
    return tuple(Chunk(own, own.start == whole.layers.start, own.stop == whole.layers.stop) for own in ranges)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_VISITS = ("num_experts_per_tok", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")


@dataclass(frozen=True)
class Experts:
    """count: in each layer that has any. visits: how many a token visits. width: of one expert, inside. shared: width
    of the shared experts, which every token visits. sparse: by layer, whether it has experts.

    balance: the coefficient of the load-balancing loss; 0: the configuration asks for none."""

    count: int
    visits: int
    width: int
    shared: int
    sparse: tuple[bool, ...]
    balance: float


def find_experts(text: Any) -> Experts | None:
    """The experts of a decoder's configuration; None where it has none, or under keys that are not known here."""
    count, visits = _first(text, _COUNTS), _first(text, _VISITS)
    if not count or not visits or getattr(text, "enable_moe_block", True) is False:
        return None
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    width = width[0] if isinstance(width, list | tuple) else width
    asked = getattr(text, "output_router_logits", False)
    return Experts(
        count=count,
        visits=visits,
        width=width,
        shared=getattr(text, "shared_expert_intermediate_size", None) or width * _first(text, _SHARED),
        sparse=tuple(_is_sparse(text, layer) for layer in range(text.num_hidden_layers)),
        balance=float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if asked else 0.0,
    )


def _first(text: Any, names: tuple[str, ...]) -> int:
    return next((getattr(text, name) for name in names if getattr(text, name, None)), 0)


def _is_sparse(text: Any, layer: int) -> bool:
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds:
        return kinds[layer] == "sparse"
    if layer < (getattr(text, "first_k_dense_replace", None) or 0):
        return False
    if layer in (getattr(text, "mlp_only_layers", None) or ()):
        return False
    return (layer + 1) % (getattr(text, "decoder_sparse_step", None) or 1) == 0


@dataclass(frozen=True)
class ImageLayout:
    """The order and the attention segments of one image in the tower.

    order: merged-token index in processor order, for each place in tower order; int64 [units]. unit: patches that are
    merged into one token. window_lengths: patches of each attention window, in tower order. frame_lengths: patches of
    each full-attention segment, in tower order. positions: coordinates of each patch, in tower order; int64 [patches,
    columns]. Row and column come first, a tower may need more. tokens: of each attention window, merged; None: its
    patches / unit. form: of a picture that the tower takes whole."""

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
    layer is of; layers of one kind do the same work."""

    path: str
    projections: tuple[str, ...]
    mlp: tuple[str, ...]
    kinds: tuple[str, ...]


def add_rows(states: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """[rows, tokens, hidden] with `rows` [n, hidden] added at `places` of the flattened tokens."""
    return states.flatten(0, 1).index_add(0, places, rows).view_as(states)


@dataclass(frozen=True)
class DecoderInputs:
    """The decoder's inputs, on its device.

    input_ids: [rows, tokens], which a first chunk reads; position_ids: as the family makes them.

    kinds: of each token, [rows, tokens]: 0 text, 1 of an image, 2 of a video, others of further encoders
    (`dhp.core.kinds`).

    images: the tower's features of images and videos, [n, hidden] each, by the name of the tower's tensor: those that
    enter here, none where there are no images. image_positions: of each of the n among the flattened rows × tokens;
    int64 [n]. others and other_positions: the same of further encoders' tensors, which all enter the first layer, by
    part.

    hidden: states from the chunk before, [rows, tokens, hidden]; None for a first chunk.

    add: adds rows [n, hidden] to a layer's states at places of the flattened tokens."""

    input_ids: Tensor
    position_ids: Tensor
    images: Mapping[str, Tensor] = field(default_factory=dict)
    image_positions: Tensor | None = None
    hidden: Tensor | None = None
    kinds: Tensor | None = None
    others: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    other_positions: Mapping[str, Tensor] = field(default_factory=dict)
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = add_rows


@dataclass(frozen=True)
class HeadShape:
    """Matrices of the vocabulary that a stage has.

    vocabulary, hidden: rows and width of each. matrices: how many, of the embedding and the head. loss: it has the
    head."""

    vocabulary: int
    hidden: int
    matrices: int = 2
    loss: bool = True


class Part(ABC):
    """One part of a family's model. A new part must define no more than this for a run."""

    modules: tuple[str, ...]  # all its modules, which the other parts drop
    projector: tuple[str, ...] = ()  # those of them that training.trainable=[projector] trains alone
    tensors: tuple[str, ...] = ()  # names of its outputs
    tied: bool = False  # its head's weight is its embedding's
    layers: LayerParts
    tensor_plan: Mapping[str, str] = {}  # styles by module, where transformers has none
    shared: tuple[str, ...] = ()  # modules of experts, which replicas may share out
    fused: Mapping[str, int] = {}  # modules that hold several projections in one, and how many

    @abstractmethod
    def check(self, asked: PartConfig) -> None:
        """Raises ConfigError where the part's heads cannot be split by the degrees of its resolved section."""

    def freeze_unused(self, model: PreTrainedModel) -> None:
        """Set requires_grad=False for parameters that none of its outputs depends on: nothing may change them."""

    @property
    def tied_weight(self) -> str:
        """The name of the weight that is its embedding's and its head's, where it is `tied`."""
        return ""

    def absent(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        """The modules that a group of ranks with these chunks alone does not hold."""
        return ()

    def uneven_axes(self, asked: PartConfig) -> tuple[str, ...]:
        """The degrees of its resolved section that give some ranks more of its heads than others."""
        return ()

    def shared_heads(self, tensor: int) -> Mapping[str, Projection]:
        """Projections of attention that each of `tensor` ranks keeps whole, whatever the plan says, and computes in
        part."""
        return {}

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Set the part's attention to one of so many ranks' heads. Attention that derives their number from its
        projections needs no setting."""

    def head_shape(self, chunks: Sequence[Chunk]) -> HeadShape | None:
        """The matrices of a vocabulary that a group with these chunks holds; None where it has none."""
        return None

    @property
    def leaves(self) -> Mapping[str, int]:
        """Names of its outputs, and the layer behind which each leaves."""
        return dict.fromkeys(self.tensors, self.whole.layers[-1])

    @property
    def takes(self) -> Mapping[str, int]:
        """Names of what it takes from other parts, and the layer at which each enters."""
        return {}

    @property
    def whole(self) -> Chunk:
        """One chunk of all layers."""
        return Chunk(range(len(self.layers.kinds)), first=True, last=True)
