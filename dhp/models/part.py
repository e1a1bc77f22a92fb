"""The interface of a model's part, encoder or decoder, for the graph of stages, the plans and the dry run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dhp.config.part import PartConfig
from dhp.models.types import Chunk, HeadShape, LayerParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def kept_whole(self, tensor: int) -> tuple[str, ...]:
        """Modules that each of `tensor` ranks keeps whole, whatever the plan says."""
        return ()

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
