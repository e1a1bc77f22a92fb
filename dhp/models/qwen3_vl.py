"""Qwen3-VL: a tower that attends to whole frames and hands over what several of its layers found, and a decoder that
adds these features behind its first layers ("DeepStack", Meng et al. 2024). The frames of a video stand apart in the
prompt, a time in words before each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.base.geometry import Form, Grid
from dhp.models.decoder import PATH, Decoder
from dhp.models.family import Family, ImageLayout, LayerParts
from dhp.models.flops import VisionWork
from dhp.models.qwen import QwenProcessor, QwenTower, patch_values
from dhp.models.tower import EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def qwen3_vl(config: Any) -> Family:
    """Qwen3-VL of that configuration, without experts."""
    return Family(config, Qwen3VlProcessor(config), Qwen3VlTower(config), Qwen3VlDecoder(config))


def qwen3_vl_moe(config: Any) -> Family:
    """Qwen3-VL of that configuration, with experts. transformers' plan of its decoder lacks the embedding and the norms
    of heads, which that of Qwen3 has."""
    return Family(config, Qwen3VlMoeProcessor(config), Qwen3VlTower(config), Qwen3VlDecoder(config))


class Qwen3VlProcessor(QwenProcessor):
    """A step in time of a video has placeholders of its own, with text before them."""

    takes_both_ends = True

    def __init__(self, config: Any):
        super().__init__(config)
        self.step_tokens = (config.vision_start_token_id, config.vision_end_token_id)

    def model(self) -> type[PreTrainedModel]:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

        return Qwen3VLModel

    def step_time(self, seconds: float) -> str:
        return f"<{seconds:.1f} seconds>"

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in named.items() if name != "second_per_grid_ts"}


class Qwen3VlMoeProcessor(Qwen3VlProcessor):
    """The same of the model with experts."""

    def model(self) -> type[PreTrainedModel]:
        from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

        return Qwen3VLMoeModel


class Qwen3VlTower(QwenTower):
    """All layers attend to whole frames, so that patches stay in the processor's order. A patch's learned position is
    interpolated from a square table, by its own place and the size of its frame."""

    projector = ("model.visual.merger", "model.visual.deepstack_merger_list")
    position_columns = 4  # row, column, and rows and columns of the frame
    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.linear_fc1": "colwise",
        "model.visual.blocks.*.mlp.linear_fc2": "rowwise",
        **{
            f"model.visual.{merger}.{module}": style
            for merger in ("merger", "deepstack_merger_list.*")
            # A merger's norm stands before its matrices and sees whole rows.
            for module, style in (("norm", "dhp_whole"), ("linear_fc1", "colwise"), ("linear_fc2", "rowwise"))
        },
    }

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        self.tensors = (EMBEDDINGS, *deepstack_names(config))
        work = self.work = _count_work(vision)
        self.attention_crossover_patches = work.token / work.segment_pair
        self.layers = LayerParts(
            "model.visual.blocks", ("attn.qkv", "attn.proj"), ("mlp.linear_fc1",), ("full",) * vision.depth
        )

    def image_layout(self, grid: Grid | Form) -> ImageLayout:
        from transformers.vision_utils import get_vision_position_ids

        t, h, w = grid
        merge = self.config.vision_config.spatial_merge_size
        coordinates = get_vision_position_ids(torch.tensor([grid]), merge)  # [patches, 2]
        size = torch.tensor([[h, w]]).expand(len(coordinates), 2)
        return ImageLayout(
            order=torch.arange(t * h * w // self.merge_unit),
            unit=self.merge_unit,
            window_lengths=(merge * w,) * (t * h // merge),  # where a frame may be divided: between rows of tokens
            frame_lengths=(h * w,) * t,
            positions=torch.cat([coordinates, size], dim=1),
        )

    def encode(
        self,
        model: PreTrainedModel,
        pixels: Tensor,
        positions: Tensor,
        windows: Any,
        frames: Any,
        forms: Sequence[Form] = (),
    ) -> dict[str, Tensor]:
        tower = model.model.visual
        indices, weights = interpolate(positions, tower.num_grid_per_side)
        # Everything the tower would derive from the grid is given, so that a shard, which has no grid, runs too.
        output = tower(
            pixels.to(tower.dtype),
            grid_thw=None,
            interp_indices=indices,
            interp_weights=weights,
            position_ids=positions[:, :2],
            cu_seqlens=frames,
            max_seqlen=len(pixels),
        )
        return dict(zip(self.tensors, (output.pooler_output, *output.deepstack_features), strict=True))


class Qwen3VlDecoder(Decoder):
    """transformers has no tensor-parallel plan for it; this is that of Qwen3."""

    tensor_plan = {
        f"{PATH}.embed_tokens": "embedding_rowwise",
        **{f"{PATH}.layers.*.self_attn.{p}_proj": "colwise" for p in "qkv"},
        **{f"{PATH}.layers.*.self_attn.{p}_norm": "replicated_with_grad_allreduce" for p in "qk"},
        f"{PATH}.layers.*.self_attn.o_proj": "rowwise",
        f"{PATH}.layers.*.mlp.gate_proj": "colwise",
        f"{PATH}.layers.*.mlp.up_proj": "colwise",
        f"{PATH}.layers.*.mlp.down_proj": "rowwise",
    }

    def __init__(self, config: Any):
        super().__init__(config)
        self.enters = {name: layer for layer, name in enumerate(deepstack_names(config))}


def deepstack_names(config: Any) -> tuple[str, ...]:
    """Of the features that leave the tower before its end; each enters behind the decoder layer of its number."""
    return tuple(f"deepstack.{number}" for number in range(len(config.vision_config.deepstack_visual_indexes)))


def interpolate(positions: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four entries of a table of side × side that surround each patch, and their weights; [patches, 4] each.

    The corners of the table are those of the frame. positions: row, column, rows, columns.
    """
    coordinates, sizes = positions[:, :2], positions[:, 2:]
    exact = coordinates.float() * (side - 1) / (sizes - 1).clamp(min=1)
    before = exact.floor()
    beyond = (exact - before)[..., None]  # [patches, 2, 1]
    near = before.long()[..., None]
    entries = torch.cat([near, near + 1], dim=-1).clamp(max=side - 1)
    weights = torch.cat([1 - beyond, 1 - (beyond - 1).abs()], dim=-1)  # as transformers rounds them
    flat = entries[:, 0, :, None] * side + entries[:, 1, None, :]
    return flat.flatten(1), (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)


def _count_work(vision: Any) -> VisionWork:
    width, mergers = vision.hidden_size, 1 + len(vision.deepstack_visual_indexes)
    merged = width * vision.spatial_merge_size**2
    return VisionWork(
        patch=patch_values(vision) * width,
        token=vision.depth * width * (4 * width + 2 * vision.intermediate_size),
        window_pair=0,
        segment_pair=vision.depth * 2 * width,
        embedding=mergers * merged * (merged + vision.out_hidden_size),
    )
