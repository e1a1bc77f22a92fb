"""Runs a family's vision part: patches in, rows out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.config.model_rules import check_tower
from dhp.config.parts import resolved
from dhp.config.rules import FLASH_ATTENTION_2
from dhp.config.schema import PartConfig
from dhp.core.batch import Grid, ProcessorOutput
from dhp.core.errors import ConfigError
from dhp.core.heads import fills_evenly
from dhp.core.wrapping import wrap_forward
from dhp.models.flops import VisionWork
from dhp.models.types import Chunk, ImageLayout, Part

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

    forms: of the pictures that `pixels` hold, where the tower takes pictures whole. calls: see `VisionInput`."""

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
    shares_whole: bool = False  # its ranks share pictures, and divide none
    takes_attention: bool = True  # it calls the attention function that `use_attention` names
    work: VisionWork

    def __init__(self, config: Any):
        self.config = config

    def check(self, asked: PartConfig) -> None:
        self.check_stages("vision", asked)
        self.check_cut(resolved(asked.tensor))
        self.check_backend("vision", asked)
        check_tower(self.heads, resolved(asked.ulysses), resolved(asked.tensor))

    def uneven_axes(self, asked: PartConfig) -> tuple[str, ...]:
        left = self.heads // resolved(asked.tensor)
        return () if fills_evenly(left, left, resolved(asked.ulysses)) else ("ulysses",)

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

    @property
    def patches_of_token(self) -> float:
        """Patches that become one token; where pictures are taken whole, as many as in the smallest one."""
        form = self.dummy_form
        return self.merge_unit if form is None else form.rows / form.tokens

    @property
    def patches_of_picture(self) -> int:
        """Of the smallest picture, where the tower takes no other number than multiples of these: a tile's, or those
        of a picture that it takes whole. 1: it takes any."""
        form = self.dummy_form
        return self.tile or 1 if form is None else form.rows

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


class ChunkEnd(Exception):
    """Leaves a tower's forward behind a chunk. states: what its last layer made."""

    def __init__(self, states: Tensor):
        super().__init__("the chunk's layers are done")
        self.states = states


def leave_forward(states: Tensor, *_: Any, **__: Any) -> NoReturn:
    """Stands in the place of the first layer behind a chunk."""
    raise ChunkEnd(states)


def project_as_product(convolution: nn.Conv2d | nn.Conv3d) -> None:
    """Let `convolution` compute [images, channels, *sizes] → [images, outputs, *patches along each] as a product.

    Raises ValueError for one whose patches overlap, leave gaps or are padded."""
    kernel = tuple(convolution.kernel_size)
    plain = tuple(convolution.stride) == kernel and convolution.groups == 1
    if not plain or any(d != 1 for d in convolution.dilation) or any(p != 0 for p in convolution.padding):
        raise ValueError(f"{convolution} takes no patches one beside another: its stride must be its kernel")

    def forward(pixels: Tensor) -> Tensor:
        rows, counts = _patches(pixels, kernel)
        projected = F.linear(rows, convolution.weight.flatten(1), convolution.bias)
        return projected.movedim(-1, 1).reshape(len(pixels), -1, *counts)

    wrap_forward(convolution, forward, __name__)


def project_as_products(model: nn.Module) -> None:
    """Apply `project_as_product` to all convolutions of `model` whose stride is their kernel."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            try:
                project_as_product(module)
            except ValueError:
                pass  # a convolution of another kind stays one


def _patches(pixels: Tensor, kernel: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """[images, channels, *sizes] as [images, patches, channels × kernel], and the number of patches along each."""
    counts = tuple(size // length for size, length in zip(pixels.shape[2:], kernel, strict=True))
    if all(count == 1 for count in counts):
        return pixels.reshape(len(pixels), 1, -1), counts
    split = [n for pair in zip(counts, kernel, strict=True) for n in pair]
    tiles = pixels.reshape(*pixels.shape[:2], *split)  # [images, channels, count, length, count, length, …]
    dims = range(len(kernel))
    order = (0, *(2 + 2 * d for d in dims), 1, *(3 + 2 * d for d in dims))
    return tiles.permute(order).reshape(len(pixels), prod(counts), -1), counts


Kernel = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def interpolate(positions: Tensor, side: int, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The entries of a table of side × side that surround each patch, and their weights; [patches, n] each.

    positions: row, column, rows, columns. kernel: places [patches, 2] and sizes [patches, 2] → entries along each axis
    and their weights, [patches, 2, √n] each."""
    entries, weights = kernel(positions[:, :2].float(), positions[:, 2:].clamp(min=1), side)
    flat = entries[:, 0, :, None] * side + entries[:, 1, None, :]
    return flat.flatten(1), (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)


def linear(places: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Two entries along each axis. The corners of the table are those of the frame."""
    exact = places * (side - 1) / (sizes - 1).clamp(min=1)
    before = exact.floor()
    beyond = (exact - before)[..., None]  # [patches, 2, 1]
    near = before.long()[..., None]
    entries = torch.cat([near, near + 1], dim=-1).clamp(max=side - 1)
    return entries, torch.cat([1 - beyond, 1 - (beyond - 1).abs()], dim=-1)  # as transformers rounds them


def cubic(places: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Four entries along each axis, weighed as by Keys 1981 ("Cubic convolution interpolation", a = -0.75). Patches and
    entries are squares, so that the edges of the table are those of the frame; beyond them its last entries go on."""
    exact = (places + 0.5) * side / sizes - 0.5
    before = exact.floor()
    offsets = torch.arange(-1, 3, device=places.device)
    distances = (exact[..., None] - before[..., None] - offsets).abs()
    a = -0.75
    near = ((a + 2) * distances - (a + 3)) * distances * distances + 1
    far = ((a * distances - 5 * a) * distances + 8 * a) * distances - 4 * a
    entries = (before.long()[..., None] + offsets).clamp(0, side - 1)
    return entries, torch.where(distances <= 1, near, far)


def put_together(pixels: np.ndarray, grid: Grid, merge: int, channels: int, frames: int, side: int) -> np.ndarray:
    """Pictures from patches in consecutive squares of merge × merge: float32 [t × frames, height, width, channels]."""
    t, h, w = grid
    rows = pixels.reshape(t, h // merge, w // merge, merge, merge, channels, frames, side, side)
    return rows.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * frames, h * side, w * side, channels)
