"""The adapter's arithmetic against the model's own, one process, plain numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AutoModelForImageTextToText

from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import segment_attention

GRIDS = [(1, 2, 2), (1, 6, 10), (1, 4, 4), (1, 10, 14), (2, 6, 4)]  # the last one is a video's: two frames


@pytest.fixture(scope="module")
def family(made_model: str) -> Family:
    return load_family(made_model)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_layout_covers_the_image_once(family: Family, grid: tuple[int, int, int]) -> None:
    layout = family.tower.image_layout(grid)
    t, h, w = grid
    assert layout.patches == t * h * w == sum(layout.window_lengths) == sum(layout.frame_lengths)
    assert sorted(layout.order.tolist()) == list(range(family.processor.image_tokens(grid)))
    assert sorted(layout.patch_order().tolist()) == list(range(t * h * w))
    assert max(layout.window_lengths) <= 16  # window_size 56 = 4 × 4 patches of 14


@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS[1:2], GRIDS], ids=["one window", "one image", "all"])
def test_encode_equals_the_models_own_features(family: Family, made_model: str, grids: list) -> None:
    model = AutoModelForImageTextToText.from_pretrained(made_model, dtype=torch.float64)
    pixels = [torch.randn(t * h * w, family.tower.patch_dim, dtype=torch.float64) for t, h, w in grids]
    expected = model.model.get_image_features(torch.cat(pixels), torch.tensor(grids)).pooler_output

    AttentionInterface.register("flash_dhp_test", segment_attention)
    family.tower.use_attention(model, "flash_dhp_test")
    layouts = [family.tower.image_layout(grid) for grid in grids]
    ordered = torch.cat([p[layout.patch_order()] for p, layout in zip(pixels, layouts, strict=True)])
    plans = [
        plan_segments([n for layout in layouts for n in getattr(layout, kind)], torch.device("cpu"))
        for kind in ("window_lengths", "frame_lengths")
    ]
    positions = torch.cat([layout.positions for layout in layouts])
    found = family.tower.encode(model, TowerInputs(ordered, positions, *plans))
    rows = found["embeddings"].split([len(layout.order) for layout in layouts])
    for mine, layout, theirs in zip(rows, layouts, expected, strict=True):
        torch.testing.assert_close(mine[torch.argsort(layout.order)], theirs, rtol=1e-10, atol=1e-12)


def test_the_tower_calls_attention_once_a_layer_with_our_objects(family: Family, made_model: str) -> None:
    """Two canaries: a name with "flash" gives one call a layer, and the plan object arrives as it was given."""
    model = AutoModelForImageTextToText.from_pretrained(made_model)
    seen = []

    def spy(*arguments, **named):
        seen.append(named["cu_seq_lens_q"])
        return segment_attention(*arguments, **named)

    AttentionInterface.register("flash_dhp_spy", spy)
    family.tower.use_attention(model, "flash_dhp_spy")
    layout = family.tower.image_layout((1, 6, 10))
    windows, frames = (plan_segments(n, torch.device("cpu")) for n in (layout.window_lengths, layout.frame_lengths))
    family.tower.encode(model, TowerInputs(torch.randn(60, family.tower.patch_dim), layout.positions, windows, frames))
    assert [plan is frames for plan in seen] == [False, True, False, True]  # fullatt_block_indexes [1, 3]
    assert [plan is windows for plan in seen] == [True, False, True, False]


def test_positions_equal_the_models_own(family: Family, made_model: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(made_model)
    image = family.processor.image_token_id
    ids = torch.tensor([[5, 6, *[image] * 6, 7, 8, 9], [5, *[image] * 4, 6, 7, 0, 0, 0, 0]])
    kinds = (ids == image).long()
    grids = torch.tensor([[1, 4, 6], [1, 4, 4]])
    found = family.processor.position_ids(ids, kinds, grids, torch.tensor([11, 7]))
    for row, (length, grid) in enumerate(((11, grids[:1]), (7, grids[1:]))):
        alone, _ = model.model.get_rope_index(ids[row : row + 1, :length], kinds[row : row + 1, :length], grid)
        assert torch.equal(found[:, row, :length], alone[:, 0])
        assert not found[:, row, length:].any()


def test_head_counts_come_from_the_configuration(family: Family) -> None:
    assert (family.tower.heads, family.decoder.heads, family.decoder.kv_heads) == (4, 8, 4)
    assert family.tower.merge_unit == 4
    assert family.tower.patch_dim == 3 * 2 * 14 * 14
