"""Kimi-K2.5: a tower that merges late; DeepSeek-V3's decoder.

Patches come by rows of the picture. Images only: the tower means a video's steps over time, and here every square
of patches becomes a row of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dhp.core.batch import Grid
from dhp.models.contract.find import find_contract
from dhp.models.contract.generic_parts import ContractDecoder
from dhp.models.families.grid import GridProcessor, GridTower, channels_of, merge_side
from dhp.models.family import Family
from dhp.models.tower import EMBEDDINGS, cubic, interpolate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def kimi_k25(config: Any) -> Family:
    """Kimi-K2.5 of that configuration."""
    contract = find_contract(config)
    tower = KimiTower(config, contract.vision_work)
    return Family(config, KimiProcessor(config, contract.base), tower, ContractDecoder(config, contract))


class KimiProcessor(GridProcessor):
    """Sorts patches into the order in which they merge."""

    def __init__(self, config: Any, base: Any):
        super().__init__(config, base)
        self.video_token_id = None

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        rows, grid = super().patches(output)
        return rows[merge_order(grid, merge_side(self.config.vision_config)).numpy()], grid

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in named.items() if name != "mm_token_type_ids"}
        if "pixel_values" not in named:
            return kept
        vision, grids = self.config.vision_config, [tuple(grid) for grid in named["image_grid_thw"].tolist()]
        pictures = named["pixel_values"].split([t * h * w for t, h, w in grids])
        orders = [merge_order(grid, merge_side(vision)).argsort() for grid in grids]
        rows = torch.cat([picture[order] for picture, order in zip(pictures, orders, strict=True)])
        return kept | {"pixel_values": rows.view(len(rows), channels_of(vision), vision.patch_size, vision.patch_size)}


class KimiTower(GridTower):
    """The projector is outside of the tower. Attention is not cut by tensor ranks: checkpoints have query, key and
    value in one matrix, which the library divides and turns only after it has cut it."""

    path, blocks = "model.vision_tower", "layers"
    modules = ("model.vision_tower", "model.mm_projector")
    projector = ("model.mm_projector",)
    projections = tuple(f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "proj"))
    gates = ("mlp.fc1",)
    divisible = False  # its patch embedding adds positions, and looks their table up, inside one module
    tensor_plan = {
        "model.vision_tower.layers.*.mlp.fc1": "colwise",
        "model.vision_tower.layers.*.mlp.fc2": "rowwise",
        "model.mm_projector.pre_norm": "dhp_whole",
        "model.mm_projector.in_proj": "colwise",
        "model.mm_projector.out_proj": "rowwise",
    }

    def shape(self, pixels: Tensor) -> Tensor:
        vision = self.config.vision_config
        return pixels.view(len(pixels), channels_of(vision), vision.patch_size, vision.patch_size)

    def derive(self, tower: Any, positions: Tensor, windows: Any, frames: Any) -> dict[str, Any]:
        """See `GridTower`. No patch is of a second step in time."""
        indices, weights = interpolate(positions, tower.patch_embed.pos_emb.num_grid_per_side, cubic)
        places = torch.arange(len(positions), device=positions.device)
        return {
            "interp_indices": indices,
            "interp_weights": weights,
            "frame_index": torch.zeros_like(places),
            # Of each patch its place among those that merge, and its share in the mean over time; rows that come of it.
            "temporal_merge_index": (
                places,
                torch.ones_like(places, dtype=torch.float32),
                len(places) // self.merge_unit,
            ),
        }

    def leave(self, model: PreTrainedModel, output: Any, left: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        return {EMBEDDINGS: model.get_submodule(self.projector[0])(output.pooler_output).squeeze(1)}


def merge_order(grid: Grid, merge: int) -> Tensor:
    """Indices that sort patches from rows of the picture into consecutive squares of merge × merge."""
    t, h, w = grid
    places = torch.arange(t * h * w).view(t, h // merge, merge, w // merge, merge)
    return places.transpose(2, 3).flatten()
