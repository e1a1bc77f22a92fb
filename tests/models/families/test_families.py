"""Families of towers equal the library's own."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForImageTextToText, CLIPImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from dhp.config.layout import resolve_part
from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import HIDDEN_STATES
from dhp.models.contract.generic_parts import WholeTower
from dhp.models.families.glm4v import glm4v
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from dhp.models.types import Chunk, chunks_of
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import segment_attention
from tests.helpers.tiny_families import BEGIN, END, IMAGE, VIDEO, make_config, save_family


@pytest.mark.parametrize(
    ("name", "library"), [("glm4v", Glm4vProcessor), ("glm4v_moe", Glm4vProcessor), ("glm46v", Glm46VProcessor)]
)
def test_the_prompt_of_a_step_is_the_librarys(name: str, library: Any) -> None:
    processor = glm4v(make_config(name)).processor
    assert processor.step_tokens == (BEGIN, END)
    for first in (0.0, 0.96, 12.5):
        before, behind = processor.step_text(first + 0.25, first)
        theirs = library.replace_frame_token_id(SimpleNamespace(image_token="I"), first, 3)
        assert f"{before}<|begin_of_image|>III<|end_of_image|>{behind}" == theirs


def test_the_plain_model_has_one_placeholder_for_both() -> None:
    inputs = {"input_ids": torch.tensor([[5, IMAGE, VIDEO, 7]]), "second_per_grid_ts": torch.tensor([1.0])}
    plain = glm4v(make_config("glm4v")).processor.plain_inputs(inputs)
    assert plain.keys() == {"input_ids"} and plain["input_ids"].tolist() == [[5, IMAGE, IMAGE, 7]]


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


def test_patches_are_the_image_cut_up_and_put_together_again(llava_model: str) -> None:
    family = load_family(llava_model)
    images = np.random.default_rng(0).standard_normal((2, 3, 56, 56)).astype(np.float32)
    rows, grid = family.processor.patches({"pixel_values": images})
    assert rows.shape == (2 * 16, 3 * 14 * 14) and grid == (2, 4, 4)
    assert np.array_equal(rows[0], images[0, :, :14, :14].reshape(-1))
    assert np.array_equal(rows[16 + 5], images[1, :, 14:28, 14:28].reshape(-1))
    back = family.processor.plain_inputs({"pixel_values": torch.from_numpy(rows)})["pixel_values"]
    assert torch.equal(back, torch.from_numpy(images))


def test_encode_equals_the_models_own_features(llava_model: str) -> None:
    family = load_family(llava_model)
    model = AutoModelForImageTextToText.from_pretrained(llava_model, dtype=torch.float64)
    images = torch.randn(3, 3, 56, 56, dtype=torch.float64)
    rows, _ = family.processor.patches({"pixel_values": images.numpy()})
    expected = torch.cat(model.model.get_image_features(images, return_dict=True).pooler_output)
    found = family.tower.encode(model, TowerInputs(torch.from_numpy(rows).double(), torch.empty(0)))["embeddings"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # rows are float32
    assert len(found) == 3 * family.processor.image_tokens((1, 4, 4))


def test_what_no_output_depends_on_is_frozen(llava_model: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(llava_model)
    load_family(llava_model).tower.freeze_unused(model)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    model(
        input_ids=torch.tensor([[5, *[505] * 16, 7]]), pixel_values=torch.randn(1, 3, 56, 56), labels=None
    ).logits.sum().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert frozen == without and any("layers.2" in name for name in frozen)


def test_another_choice_of_features_is_left_to_the_contract(llava_model: str, tmp_path: Path) -> None:
    config = load_family(llava_model).config
    config.vision_feature_select_strategy = "full"
    config.save_pretrained(tmp_path)
    family = load_family(str(tmp_path))
    assert isinstance(family.tower, WholeTower)
    assert family.tower.dummy_form.tokens == 16 + 1  # the class token too


def test_a_processed_picture_has_the_towers_size(llava_model: str) -> None:
    from PIL import Image

    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    output = processor(images=[Image.new("RGB", (90, 70))], return_tensors="np")
    rows, grid = load_family(llava_model).processor.patches(output)
    assert grid == (1, 4, 4) and rows.shape == (16, 588)


QWEN_GRIDS = [(1, 2, 2), (1, 6, 10), (1, 4, 4), (1, 10, 14), (2, 6, 4)]  # the last one is a video's: two frames


@pytest.fixture(scope="module")
def family(made_model: str) -> Family:
    return load_family(made_model)


@pytest.mark.parametrize("grid", QWEN_GRIDS, ids=str)
def test_layout_covers_the_image_once(family: Family, grid: tuple[int, int, int]) -> None:
    layout = family.tower.image_layout(grid)
    t, h, w = grid
    assert layout.patches == t * h * w == sum(layout.window_lengths) == sum(layout.frame_lengths)
    assert sorted(layout.order.tolist()) == list(range(family.processor.image_tokens(grid)))
    assert sorted(layout.patch_order().tolist()) == list(range(t * h * w))
    assert max(layout.window_lengths) <= 16  # window_size 56 = 4 × 4 patches of 14


@pytest.mark.parametrize("grids", [QWEN_GRIDS[:1], QWEN_GRIDS[1:2], QWEN_GRIDS], ids=["one window", "one image", "all"])
def test_encode_equals_the_models_own_features_of_qwen_vl(family: Family, made_model: str, grids: list) -> None:
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
