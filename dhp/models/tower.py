"""The vision part of a family: from patches to named tensors with a row for each placeholder token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from dhp.config.model_rules import check_tower
from dhp.config.part import PartConfig
from dhp.config.parts import resolved
from dhp.config.rules import FLASH_ATTENTION_2
from dhp.core.batch import Grid, ProcessorOutput
from dhp.core.errors import ConfigError
from dhp.models.flops import VisionWork
from dhp.models.part import Part
from dhp.models.types import Chunk, ImageLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDINGS = "embeddings"  # the tensor whose rows replace those of placeholder tokens


@dataclass(frozen=True)
class TowerInputs:
    """A tower's inputs in one micro-batch.

    pixels: [patches, values] in tower order. positions: of each patch, [patches, `Tower.position_columns`].

    hidden: of a chunk that is not the first, the states behind the layers before it, [patches, width]; pixels are not
    read then.

    windows, frames: reach the registered attention function as they are, in place of the cumulative lengths of window
    layers and full-attention layers.

    forms: of the pictures that `pixels` hold, where the tower takes pictures whole. calls: see `VisionInput`.
    """

    pixels: Tensor
    positions: Tensor
    windows: Any = None
    frames: Any = None
    forms: Sequence[ProcessorOutput] = ()
    calls: Sequence[Sequence[int]] = ()
    hidden: Tensor | None = None


class Tower(Part):
    """One family's tower and projector."""

    projector: tuple[str, ...]  # the modules that bring its states to the decoder's width
    tensors: tuple[str, ...] = (EMBEDDINGS,)  # names of what `encode` returns
    heads: int
    merge_unit: int = 1  # patches that become one token of the text part
    patch_dim: int  # values in one patch
    position_columns: int = 2  # of `ImageLayout.positions`
    tile: int = 0  # patches of a picture of one size, to which layers may add tokens; 0: layers see patches alone
    dummy_patches: int  # of the smallest image that the tower takes: the input of a rank without work
    attention_crossover_patches: float = float("inf")  # of a segment whose full attention costs as much as all the rest
    divisible: bool = False  # `run` takes a chunk of its layers, so that stages of a pipeline may share it
    takes_attention: bool = True  # it calls the attention function that `use_attention` names
    work: VisionWork

    def __init__(self, config: Any):
        self.config = config

    def check(self, asked: PartConfig) -> None:
        self.check_stages("vision", asked)
        self.check_cut(resolved(asked.tensor))
        self.check_backend("vision", asked)
        check_tower(self.heads, resolved(asked.ulysses), resolved(asked.tensor))

    def check_stages(self, part: str, asked: PartConfig) -> None:
        """Raises ConfigError where a pipeline should divide a tower that runs as a whole alone, or its states between
        layers be cut."""
        if resolved(asked.pipeline) > 1 and not self.divisible:
            ways = ["data", "sequence", *(["tensor"] if self.tensor_plan else [])]
            raise ConfigError(
                f"{part}.pipeline={asked.pipeline} with a {self.config.model_type} model: runs of layers of its {part} "
                f"tower alone are not known here. Set {part}.pipeline=1, and "
                f"{part}.parallelism={', '.join(ways[:-1])} or {ways[-1]}"
            )
        if asked.sequence_sharded_norms and not self.divisible:
            raise ConfigError(
                f"{part}.sequence_sharded_norms=true with a {self.config.model_type} model: its {part} tower runs as a "
                "whole, and that the states between its layers may be cut by tokens is not known. Leave "
                f"{part}.sequence_sharded_norms out"
            )

    def check_backend(self, part: str, asked: PartConfig) -> None:
        """Raises ConfigError for kernels that the tower would not call."""
        if asked.attention_backend == FLASH_ATTENTION_2 and not self.takes_attention:
            raise ConfigError(
                f"{part}.attention_backend=flash_attention_2 with a {self.config.model_type} model: its {part} tower "
                f"computes attention by itself, with PyTorch's own kernels. Set {part}.attention_backend=auto"
            )

    def check_cut(self, tensor: int) -> None:
        """Raises ConfigError where its matrices should be cut by so many ranks, and there is no plan for it."""
        if tensor > 1 and not self.tensor_plan:
            raise ConfigError(
                f"vision.tensor={tensor} with a {self.config.model_type} model: transformers has no tensor-parallel "
                "plan of its tower, and dhp declares none. Set vision.parallelism=sequence, whose actors share the "
                "images, or data"
            )

    @property
    def dummy_form(self) -> ProcessorOutput | None:
        """Of the picture of a rank without work, where the tower takes pictures whole."""
        return None

    def dummy_pixels(self, like: Tensor) -> Tensor:
        """Of the picture of a rank without work, [patches, values], of the type and on the device of `like`: grey, as a
        black one is padding to some towers."""
        return like.new_full((self.dummy_patches, self.patch_dim), 0.5)

    def calls(
        self, forms: Sequence[ProcessorOutput], even: bool = False, alone: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """Which pictures, by number, go through the tower together, where it takes pictures whole. Of a tower that
        takes any run of patches all do: none are named. even: each call calls every module inside equally often. alone:
        each takes one picture."""
        return ()

    @abstractmethod
    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        """The order and the attention segments of an image or video in the tower."""

    @abstractmethod
    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        """Encode patches in tower order: [patches / unit, hidden] by name, in the order of `tensors`; the rows of dummy
        pictures are the last ones."""

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: TowerInputs) -> dict[str, Tensor]:
        """What a chunk of its layers makes: `HIDDEN_STATES` for the next chunk, [patches, width], and by name the
        tensors that leave behind one of its layers. The whole tower: `encode`."""
        assert chunk == self.whole, f"{type(self).__name__} is not divisible"
        return self.encode(model, inputs)

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        """Make the tower call the registered attention function `name` once a layer, on all segments."""

    def call_modules_once(self, model: PreTrainedModel) -> None:
        """Make the number of calls of each module inside, within one call of the tower, independent of a rank's
        data."""

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Set the tower's attention to 1 / ranks of the heads. Attention that derives their number from its projections
        needs no setting."""


class ChunkEnd(Exception):
    """Leaves a tower's forward behind a chunk. states: what its last layer made."""

    def __init__(self, states: Tensor):
        super().__init__("the chunk's layers are done")
        self.states = states


def leave_forward(states: Tensor, *_: Any, **__: Any) -> NoReturn:
    """Stands in the place of the first layer behind a chunk."""
    raise ChunkEnd(states)
