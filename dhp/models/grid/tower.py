"""A tower that takes a sequence of patches, so that a rank may have any run of them: shards have no grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.base.geometry import Grid, ProcessorOutput
from dhp.models.family import ImageLayout, LayerParts
from dhp.models.flops import VisionWork
from dhp.models.grid.processor import merge_side, patch_values
from dhp.models.patches import project_as_products
from dhp.models.tower import EMBEDDINGS, Tower, TowerInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GridTower(Tower):
    """All layers attend to whole frames, so that patches stay in the processor's order. Values that the tower would
    derive from grids are given as arguments.

    path: of the tower; blocks: of its layers, in it. projections, gates: of a layer (`LayerParts`).
    """

    path: str = "model.visual"
    blocks: str = "blocks"
    modules: tuple[str, ...] = ("model.visual",)
    projector: tuple[str, ...] = ("model.visual.merger",)
    projections: tuple[str, ...] = ("attn.qkv", "attn.proj")
    gates: tuple[str, ...] = ("mlp.fc1",)
    position_columns = 4  # row, column, and rows and columns of the frame

    def __init__(self, config: Any, work: VisionWork):
        super().__init__(config)
        vision = config.vision_config
        self.work = work
        self.heads = int(getattr(vision, "num_heads", None) or vision.num_attention_heads)
        self.patch_dim = patch_values(vision)
        self.merge_unit = self.dummy_patches = merge_side(vision) ** 2
        if work.segment_pair:
            self.attention_crossover_patches = work.token / work.segment_pair
        self.layers = LayerParts(f"{self.path}.{self.blocks}", self.projections, self.gates, self.kinds(vision))
        self.fused = {f"{self.layers.path}.*.attn.qkv": 3} if "attn.qkv" in self.projections else {}

    def kinds(self, vision: Any) -> tuple[str, ...]:
        """Of each layer."""
        return ("full",) * int(getattr(vision, "depth", None) or vision.num_hidden_layers)

    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        from transformers.vision_utils import get_vision_position_ids

        assert not isinstance(grid, ProcessorOutput)
        t, h, w = grid
        merge = merge_side(self.config.vision_config)
        coordinates = get_vision_position_ids(torch.tensor([grid]), merge)  # [patches, 2]
        size = torch.tensor([[h, w]]).expand(len(coordinates), 2)
        return ImageLayout(
            order=torch.arange(t * h * w // self.merge_unit),
            unit=self.merge_unit,
            window_lengths=(merge * w,) * (t * h // merge),  # where a frame may be divided: between rows of tokens
            frame_lengths=(h * w,) * t,
            positions=torch.cat([coordinates, size], dim=1),
        )

    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        tower = model.get_submodule(self.path)
        derived: dict[str, Any] = {
            "grid_thw": None,
            "position_ids": inputs.positions[:, :2],
            "cu_seqlens": inputs.frames,
            "max_seqlen": len(inputs.pixels),
        }
        derived |= self.derive(tower, inputs.positions, inputs.windows, inputs.frames)
        output = tower(self.shape(inputs.pixels).to(tower.dtype), **derived)
        return self.leave(model, output)

    def shape(self, pixels: Tensor) -> Tensor:
        """Patches as the tower takes them."""
        return pixels

    def derive(self, tower: Any, positions: Tensor, windows: Any, frames: Any) -> dict[str, Any]:
        """Values that this tower would derive from grids, besides those common to all."""
        return {}

    def leave(self, model: PreTrainedModel, output: Any) -> dict[str, Tensor]:
        """The tensors that leave the part."""
        return {EMBEDDINGS: output.pooler_output}

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for block in model.get_submodule(self.layers.path):
            block.attn.num_heads = self.heads // ranks

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # The attribute behind the property: its setter looks names with "flash" up on the hub, and without
        # "flash" in the name the tower would call us once per window instead of once per layer.
        tower = model.get_submodule(self.path)
        tower.config._attn_implementation_internal = name
        project_as_products(tower)


def runs_of_one_size(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Grids [runs, 3] of runs of consecutive patches in frames of one size, and where the runs begin and end, int32
    [runs + 1]. positions: of a `GridTower`, [patches, 4]."""
    sizes, counts = positions[:, 2:].clamp(min=1).unique_consecutive(dim=0, return_counts=True)
    grids = torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return grids, bounds.to(torch.int32)
