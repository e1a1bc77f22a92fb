"""What dhp asks of a model family beyond transformers' own contract (`mm_encoder_outputs`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dhp.models.flops import TextWork, VisionWork, decoder_work

Grid = tuple[int, int, int]  # temporal, height and width of an image in patches


@dataclass(frozen=True)
class ImageLayout:
    """How the tower walks through one image.

    order: merged-token index in processor order, for each place in tower order; int64 [units].
    unit: patches that are merged into one token.
    window_lengths: patches of each attention window, in tower order.
    frame_lengths: patches of each full-attention segment, in tower order.
    positions: rotary position (row, column) of each patch, in tower order; int64 [patches, 2].
    """

    order: Tensor
    unit: int
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]
    positions: Tensor

    @property
    def patches(self) -> int:
        return len(self.positions)

    def patch_order(self) -> Tensor:
        """Patch index in processor order for each place in tower order; int64 [patches]."""
        return (self.order[:, None] * self.unit + torch.arange(self.unit)).flatten()


@dataclass(frozen=True)
class LayerParts:
    """Where a part's layers are, and which of their modules are worth keeping when the rest is recomputed.

    path: the module that lists the layers. In each layer, projections: the matrix products around attention; mlp: those
    before the activation function. kinds: what kind each layer is of; layers of one kind do the same work.
    """

    path: str
    projections: tuple[str, ...]
    mlp: tuple[str, ...]
    kinds: tuple[str, ...]


def text_work(text: Any) -> TextWork:
    """What the decoder of that configuration computes."""
    return decoder_work(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp=text.intermediate_size,
        rows=text.vocab_size,
    )


@dataclass(frozen=True)
class DecoderInputs:
    """What the decoder computes with, on its device.

    input_ids: [rows, tokens]; position_ids: as the family makes them. images: embeddings of images and videos
    [n, hidden], None where there are none. image_positions: of each among the flattened rows × tokens; int64 [n].
    """

    input_ids: Tensor
    position_ids: Tensor
    images: Tensor | None
    image_positions: Tensor


class Family(Protocol):
    """One model family. `config` is the checkpoint's configuration; nothing here needs weights or a device."""

    config: Any
    vision_modules: tuple[str, ...]  # what the text part drops
    text_modules: tuple[str, ...]  # what the vision part drops
    vision_heads: int
    text_heads: int
    text_kv_heads: int
    patch_dim: int  # values in one patch
    merge_unit: int  # patches that become one token of the text part
    dummy_patches: int  # patches of the least that the tower takes, for ranks without work
    image_token_id: int
    video_token_id: int | None  # None: the model sees no videos
    frames_per_patch: int  # frames of a video that are one step in time
    vision_work: VisionWork  # arithmetic of the vision part
    text_work: TextWork  # and of the text part
    vision_knee: float  # patches of a segment at which full attention costs as much as all the rest of the tower

    vision_layers: LayerParts
    text_layers: LayerParts
    text_kv_projections: tuple[str, ...]  # key and value projections of the decoder, `*` for layer numbers
    vision_tensor_plan: dict[str, str]  # how transformers' styles split the tower and projector, by module
    vision_fused: dict[str, int]  # modules of the tower that hold several projections in one, and how many

    def split_vision_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Tell the tower's attention that it has 1 / ranks of the heads."""

    def share_kv_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Tell the text part's attention that a rank has one key/value head, where several ranks share one."""

    def freeze_unused(self, model: PreTrainedModel) -> None:
        """Take the gradient off parameters of the vision part that no output depends on: nothing may change them."""

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        """What the image processor gave for one image, as rows [patches, values], float32, and its grid."""

    def video_patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        """What the image processor gave for `frames_per_patch` frames of a video, as rows [patches, values], float32,
        and their grid, one step in time. A video is such steps one behind another.
        """

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Padded rows and patches [patches, values] as the arguments of the plain model."""

    def image_tokens(self, grid: Grid) -> int:
        """Placeholder tokens of an image."""

    def image_layout(self, grid: Grid) -> ImageLayout:
        """How the tower walks through an image."""

    def position_ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        grids: Tensor | None,
        lengths: Tensor,
        video_grids: Tensor | None = None,
        video_seconds: Tensor | None = None,
    ) -> Tensor:
        """Rotary positions of right-padded rows; int64 [3, rows, tokens], zero on padding.

        grids: of the images; video_grids: of the videos, and video_seconds: of a step in time of each.
        """

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        """Make the vision part call the registered attention function `name` once a layer, on all segments."""

    def encode(self, model: PreTrainedModel, pixels: Tensor, positions: Tensor, windows: Any, frames: Any) -> Tensor:
        """Merged embeddings of patches in tower order, [patches / unit, hidden].

        `windows` and `frames` reach the registered attention function as they are, in place of the cumulative
        lengths of window layers and full-attention layers.
        """

    def use_text_attention(self, model: PreTrainedModel, name: str) -> None:
        """Make the text part call the registered attention function `name`, and build no mask."""

    def hidden_states(self, model: PreTrainedModel, inputs: DecoderInputs, **extra: Any) -> Tensor:
        """Last hidden states of the text part, [rows, tokens, hidden]. `extra` reaches the attention function."""
