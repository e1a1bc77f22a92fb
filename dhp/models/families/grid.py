"""Towers of patches in any grid, and their processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dhp.core.batch import Grid, ProcessorOutput
from dhp.core.graph import HIDDEN_STATES
from dhp.core.transformers_private import set_attention
from dhp.models.decoder import having, unchanged
from dhp.models.flops import VisionWork
from dhp.models.processor import Processor
from dhp.models.tower import EMBEDDINGS, ChunkEnd, Tower, TowerInputs, leave_forward, project_as_products, put_together
from dhp.models.types import Chunk, ImageLayout, LayerParts, held_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GridProcessor(Processor):
    """Images and videos of any size. A grid is (steps in time, rows, columns) of patches; patches that are merged into
    one token are consecutive.

    paced: the model's positions of a video depend on the seconds between its steps."""

    paced = False

    def __init__(self, config: Any, base: type[nn.Module] | None = None):
        super().__init__(config)
        vision = config.vision_config
        self._base = base
        self.video_token_id, self.frames_per_patch = config.video_token_id, frames_per_patch(vision)
        self.patch_dim, self.merge_unit = patch_values(vision), merge_side(vision) ** 2

    def load(self) -> None:
        self.model()

    def model(self) -> type[nn.Module] | None:
        return self._base

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        t, h, w = (int(n) for n in output["image_grid_thw"][0])
        rows = np.asarray(output["pixel_values"], dtype=np.float32).reshape(t * h * w, self.patch_dim)
        return np.ascontiguousarray(rows), (t, h, w)

    def video_patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        frames, channels = self.frames_per_patch, channels_of(self.config.vision_config)
        _, h, w = (int(n) for n in output["image_grid_thw"][0])
        # Each frame comes as a still image, repeated in time: of frame f, the copy at time f is taken.
        still = np.asarray(output["pixel_values"], dtype=np.float32).reshape(frames, h * w, channels, frames, -1)
        moving = np.stack([still[frame, :, :, frame] for frame in range(frames)], axis=2)
        return moving.reshape(h * w, self.patch_dim), (1, h, w)

    def frames(self, pixels: np.ndarray, grid: Grid | ProcessorOutput, moving: bool = False) -> np.ndarray | None:
        """See `Processor`. An image is one frame, which its patches repeat in time."""
        if isinstance(grid, ProcessorOutput):
            return None
        vision = self.config.vision_config
        shape = (channels_of(vision), self.frames_per_patch, int(vision.patch_size))
        return put_together(pixels, grid, merge_side(vision), *shape)[:: 1 if moving else self.frames_per_patch]

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in named.items() if self.paced or name != "second_per_grid_ts"}


def channels_of(vision: Any) -> int:
    """Channels of a picture, for a tower of that configuration."""
    return int(getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3)


def frames_per_patch(vision: Any) -> int:
    """Frames of a video that are one step in time."""
    return int(getattr(vision, "temporal_patch_size", 1))


def merge_side(vision: Any) -> int:
    """Patches along a side of the square that becomes one token."""
    side = getattr(vision, "spatial_merge_size", None) or vision.merge_kernel_size
    return int(side if isinstance(side, int) else side[0])


def patch_values(vision: Any) -> int:
    """Values in one patch."""
    return channels_of(vision) * frames_per_patch(vision) * int(vision.patch_size) ** 2


def grid_work(vision: Any, gated: bool = False, full: int | None = None, mergers: int = 1) -> VisionWork:
    """Arithmetic of a tower of that configuration. gated: its MLPs are. full: layers that attend to whole frames; None:
    all do. mergers: of the last layer and of inner ones."""
    width, full = vision.hidden_size, vision.depth if full is None else full
    merged = width * merge_side(vision) ** 2
    return VisionWork(
        patch=patch_values(vision) * width,
        token=vision.depth * width * (4 * width + (3 if gated else 2) * vision.intermediate_size),
        window_pair=(vision.depth - full) * 2 * width,
        segment_pair=full * 2 * width,
        embedding=mergers * merged * (merged + vision.out_hidden_size),
    )


class GridTower(Tower):
    """All layers attend to whole frames, so that patches stay in the processor's order. Values that the tower would
    derive from grids are given as arguments.

    path: of the tower; blocks: of its layers, in it. projections, gates: of a layer (`LayerParts`)."""

    path: str = "model.visual"
    blocks: str = "blocks"
    modules: tuple[str, ...] = ("model.visual",)
    projector: tuple[str, ...] = ("model.visual.merger",)
    projections: tuple[str, ...] = ("attn.qkv", "attn.proj")
    gates: tuple[str, ...] = ("mlp.fc1",)
    position_columns = 4  # row, column, and rows and columns of the frame
    divisible = True
    before: tuple[str, ...] = ("patch_embed",)  # modules with weights before its layers; the first embeds patches
    behind: tuple[str, ...] = ("merger",)  # those behind its layers

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

    def absent(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        """Modules that a group of ranks with these chunks alone does not hold: a chunk has what is before or behind its
        layers where it is the first or the last one."""
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        held = held_layers(chunks)
        others = (*(() if first else self.before), *(() if last else self.behind))
        layers = (f"{self.layers.path}.{layer}" for layer in self.whole.layers if layer not in held)
        return (*layers, *(f"{self.path}.{module}" for module in others))

    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        return self.leave(model, self._forward(model, inputs))

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: TowerInputs) -> dict[str, Tensor]:
        """See `Tower`. The library's own forward runs with others in the places of absent modules, and is left at the
        first layer behind the chunk: what follows has no weights here."""
        if chunk == self.whole:
            return self.encode(model, inputs)
        tower, left = model.get_submodule(self.path), dict[str, Tensor]()
        layers = [self._layer(tower, chunk, layer) for layer in self.whole.layers]
        others = {self.blocks: layers} | self.features(tower, chunk, left)
        if not chunk.first:
            assert inputs.hidden is not None
            others |= self.stand_ins(tower, inputs.hidden)
        with having(tower, **others):
            try:
                output = self._forward(model, inputs)
            except ChunkEnd as end:
                return {HIDDEN_STATES: end.states, **left}
        return self.leave(model, output, left)

    def stand_ins(self, tower: Any, hidden: Tensor) -> dict[str, Any]:
        """What a chunk that is not the first calls in the places of modules before the layers."""
        embeds, *rest = self.before
        return {embeds: lambda *_: hidden} | dict.fromkeys(rest, unchanged)

    def features(self, tower: Any, chunk: Chunk, left: dict[str, Tensor]) -> dict[str, Any]:
        """What a chunk calls in the places of modules that make outputs of inner layers; these go to `left`."""
        return {}

    def _layer(self, tower: Any, chunk: Chunk, layer: int) -> Any:
        if layer in chunk.layers:
            return tower.get_submodule(f"{self.blocks}.{layer}")
        return leave_forward if layer >= chunk.layers.stop else unchanged

    def _forward(self, model: PreTrainedModel, inputs: TowerInputs) -> Any:
        tower = model.get_submodule(self.path)
        derived: dict[str, Any] = {
            "grid_thw": None,
            "position_ids": inputs.positions[:, :2],
            "cu_seqlens": inputs.frames,
            "max_seqlen": len(inputs.positions),
        }
        derived |= self.derive(tower, inputs.positions, inputs.windows, inputs.frames)
        patches = self.shape(inputs.pixels).to(tower.dtype) if inputs.hidden is None else inputs.hidden
        return tower(patches, **derived)

    def shape(self, pixels: Tensor) -> Tensor:
        """Patches as the tower takes them."""
        return pixels

    def derive(self, tower: Any, positions: Tensor, windows: Any, frames: Any) -> dict[str, Any]:
        """Values that this tower would derive from grids, besides those common to all."""
        return {}

    def leave(self, model: PreTrainedModel, output: Any, left: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors that leave the part. left: of a chunk, those of its inner layers."""
        return {EMBEDDINGS: output.pooler_output}

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for block in model.get_submodule(self.layers.path):
            if not hasattr(block, "attn"):
                continue  # a stage of a pipeline holds some of them
            block.attn.num_heads = self.heads // ranks

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # Without "flash" in the name the tower would call us once per window instead of once per layer.
        tower = model.get_submodule(self.path)
        set_attention(tower.config, name)
        project_as_products(tower)


def runs_of_one_size(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Grids [runs, 3] of runs of consecutive patches in frames of one size, and where the runs begin and end, int32
    [runs + 1]. positions: of a `GridTower`, [patches, 4]; without values it is one run."""
    if positions.is_meta:
        return positions.new_empty(1, 3), positions.new_empty(2, dtype=torch.int32)
    sizes, counts = positions[:, 2:].clamp(min=1).unique_consecutive(dim=0, return_counts=True)
    grids = torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return grids, bounds.to(torch.int32)
