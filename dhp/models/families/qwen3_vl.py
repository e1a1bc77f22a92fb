"""Qwen3-VL: a tower with DeepStack features and its decoder.

The decoder adds features of several layers of the tower after its first layers ("DeepStack", Meng et al. 2024). The
frames of a video are separate in the prompt, each after its time in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dhp.models.decoder import PATH, Decoder
from dhp.models.families.grid import GridProcessor, GridTower, grid_work
from dhp.models.family import Family
from dhp.models.tower import EMBEDDINGS, interpolate, linear
from dhp.models.types import Chunk, held_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEEPSTACK = "deepstack_visual_indexes"  # layers of the tower whose states are outputs


def qwen3_vl(config: Any) -> Family:
    """Qwen3-VL of that configuration, without experts."""
    return Family(config, Qwen3VlProcessor(config), Qwen3VlTower(config), Qwen3VlDecoder(config))


def qwen3_vl_moe(config: Any) -> Family:
    """Qwen3-VL of that configuration, with experts. transformers' plan of its decoder lacks the embedding and the norms
    of heads, which that of Qwen3 has."""
    return Family(config, Qwen3VlMoeProcessor(config), Qwen3VlTower(config), Qwen3VlDecoder(config))


class Qwen3VlProcessor(GridProcessor):
    """A step in time of a video has placeholders of its own, with text before them."""

    takes_both_ends = True

    def __init__(self, config: Any, base: type[nn.Module] | None = None):
        super().__init__(config, base)
        self.step_tokens = (config.vision_start_token_id, config.vision_end_token_id)

    def model(self) -> type[nn.Module]:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

        return self._base or Qwen3VLModel

    def step_text(self, middle: float, first: float) -> tuple[str, str]:
        return f"<{middle:.1f} seconds>", ""


class Qwen3VlMoeProcessor(Qwen3VlProcessor):
    """As `Qwen3VlProcessor`, of the model with experts."""

    def model(self) -> type[nn.Module]:
        from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

        return Qwen3VLMoeModel


class Qwen3VlTower(GridTower):
    """A patch's learned position is interpolated from a square table, by its own place and the size of its frame."""

    gates = ("mlp.linear_fc1",)
    before = ("patch_embed", "pos_embed")
    mergers: tuple[str, ...] = ("merger", "deepstack_merger_list")  # of the last layer, and of inner ones
    # A merger's norm stands before its matrices and sees whole rows.
    merger_plan: Mapping[str, str] = {"norm": "dhp_whole", "linear_fc1": "colwise", "linear_fc2": "rowwise"}

    def __init__(self, config: Any):
        features = deepstack_names(config)
        self._taps = tuple(getattr(config.vision_config, _DEEPSTACK, ()))
        super().__init__(config, grid_work(config.vision_config, mergers=1 + len(features)))
        self.tensors = (EMBEDDINGS, *features)
        self.projector = tuple(f"{self.path}.{merger}" for merger in self.mergers[: 2 if features else 1])
        self.tensor_plan = self._plan()

    def derive(self, tower: Any, positions: Tensor, windows: Any, frames: Any) -> dict[str, Any]:
        indices, weights = interpolate(positions, tower.num_grid_per_side, linear)
        return {"interp_indices": indices, "interp_weights": weights}

    @property
    def leaves(self) -> Mapping[str, int]:
        """The features leave behind inner layers."""
        return super().leaves | dict(zip(self.tensors[1:], self._taps, strict=True))

    def absent(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        held, mergers = held_layers(chunks), f"{self.path}.{self.mergers[1]}"
        inner = (f"{mergers}.{level}" for level, layer in enumerate(self._taps) if layer not in held)
        return (*super().absent(chunks), *inner)

    def stand_ins(self, tower: Any, hidden: Tensor) -> dict[str, Any]:
        """The states of a later chunk have their positions: nothing is added, [patches, 1]."""
        nothing = hidden.new_zeros(1)
        return super().stand_ins(tower, hidden) | {"pos_embed": lambda indices: nothing.expand(*indices.shape, 1)}

    def features(self, tower: Any, chunk: Chunk, left: dict[str, Tensor]) -> dict[str, Any]:
        if not self._taps:
            return {}
        mergers = tower.get_submodule(self.mergers[1])

        def keep(level: int) -> Callable[[Tensor], Tensor | None]:
            def merge(states: Tensor) -> Tensor | None:
                if self._taps[level] not in chunk.layers:
                    return None  # another stage has made it
                left[self.tensors[1 + level]] = mergers.get_submodule(str(level))(states)
                return left[self.tensors[1 + level]]

            return merge

        return {self.mergers[1]: [keep(level) for level in range(len(self._taps))]}

    def leave(self, model: PreTrainedModel, output: Any, left: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        features = output.deepstack_features if self._taps else ()
        inner = dict(zip(self.tensors[1:], features, strict=True)) if left is None else left
        return {EMBEDDINGS: output.pooler_output, **inner}

    def _plan(self) -> dict[str, str]:
        layers = self.layers.path
        plan = {
            f"{layers}.*.attn.proj": "rowwise",
            f"{layers}.*.mlp.linear_fc1": "colwise",
            f"{layers}.*.mlp.linear_fc2": "rowwise",
        }
        last, *more = self.projector
        # By number, as rules with a star have one for every number, and a merger's matrices may have some.
        for merger in (last, *(f"{several}.{level}" for several in more for level in range(len(self.tensors) - 1))):
            plan |= {f"{merger}.{module}": style for module, style in self.merger_plan.items()}
        return plan


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
    """Names of the features of the tower's inner layers; each enters after the decoder layer of its number."""
    return tuple(f"deepstack.{number}" for number in range(len(getattr(config.vision_config, _DEEPSTACK, ()))))
