"""A tower that takes a sequence of patches, run chunk by chunk: plain numbers, one process."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForImageTextToText

from dhp.config.layout import resolve_part
from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import HIDDEN_STATES
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from dhp.models.types import Chunk, chunks_of
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import segment_attention
from tests.helpers.tiny_families import save_family

GRIDS = [(1, 6, 10), (1, 4, 4)]
DIVISIBLE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni",
    "glm4v", "glm46v", "glm4v_moe",
)  # fmt: skip


def _cut(chunks: tuple[Chunk, ...], family, model, inputs: TowerInputs) -> dict[str, Tensor]:  # noqa: ANN001
    """What all chunks make one behind another, each with the states of the one before alone."""
    found: dict[str, Tensor] = {}
    hidden = None
    for chunk in chunks:
        own = family.tower.run(model, chunk, TowerInputs(inputs.pixels, inputs.positions, inputs.windows, inputs.frames,
                                                         hidden=hidden))  # fmt: skip
        hidden = own.pop(HIDDEN_STATES, None)
        assert not found.keys() & own.keys()
        found |= own
    return found


@pytest.mark.parametrize("name", DIVISIBLE)
def test_chunks_one_behind_another_make_what_the_whole_makes(name: str, tmp_path: Path) -> None:
    """Canary as well: a forward that is left at the end of a chunk leaves nothing behind in the library, so that the
    whole tower runs afterwards as before."""
    source = str(save_family(name, tmp_path / "model"))
    family = load_family(source)
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    AttentionInterface.register("flash_dhp_test", segment_attention)
    family.tower.use_attention(model, "flash_dhp_test")
    layouts = [family.tower.image_layout(grid) for grid in GRIDS]
    windows, frames = (
        plan_segments([n for layout in layouts for n in getattr(layout, kind)], torch.device("cpu"))
        for kind in ("window_lengths", "frame_lengths")
    )
    positions = torch.cat([layout.positions for layout in layouts])
    inputs = TowerInputs(torch.randn(len(positions), family.tower.patch_dim), positions, windows, frames)
    config = deepcopy(model.config.to_dict())
    whole = family.tower.encode(model, inputs)
    layers = len(family.tower.layers.kinds)
    for cuts in [(at,) for at in range(1, layers)] + [tuple(range(1, layers))]:
        ranges = [range(first, end) for first, end in pairwise((0, *cuts, layers))]
        found = _cut(chunks_of(ranges, family.tower.whole), family, model, inputs)
        assert found.keys() == whole.keys()
        for key, rows in whole.items():
            assert torch.equal(found[key], rows), (cuts, key)
    after = family.tower.encode(model, inputs)
    assert all(torch.equal(after[key], rows) for key, rows in whole.items())
    assert model.config.to_dict() == config


@pytest.mark.parametrize("name", ["llava_clip", "internvl", "kimi_k25"])
def test_a_tower_that_runs_as_a_whole_alone_is_not_cut(name: str, tmp_path: Path) -> None:
    """Of its own family, by contract, and of this kind but for its embedding."""
    tower = load_family(str(save_family(name, tmp_path / "model"))).tower
    whole, cut = (
        resolve_part("vision", PartConfig("a/model", kind, actors)) for kind, actors in (("none", 1), ("pipeline", 2))
    )
    tower.check(whole)
    ways = "data, sequence or tensor" if tower.tensor_plan else "data or sequence"
    told = rf"vision\.pipeline=2 with a .* are not known here.* and vision\.parallelism={ways}$"
    with pytest.raises(ConfigError, match=told):
        tower.check(cut)


@pytest.mark.parametrize("name", DIVISIBLE)
def test_each_weight_of_the_tower_is_in_one_stage(name: str, tmp_path: Path) -> None:
    source = str(save_family(name, tmp_path / "model"))
    tower = load_family(source).tower
    model = AutoModelForImageTextToText.from_pretrained(source)
    layers = len(tower.layers.kinds)
    chunks = chunks_of([range(0, 1), range(1, layers)], tower.whole)
    own = [name for name, _ in model.named_parameters() if any(name.startswith(f"{m}.") for m in tower.modules)]
    for weight in own:
        holders = [c for c in chunks if not any(weight.startswith(f"{m}.") for m in tower.absent((c,)))]
        assert len(holders) == 1, (weight, len(holders))
