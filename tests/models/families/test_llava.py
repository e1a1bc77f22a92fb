"""The adapter of a tower of independent images against the model's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, CLIPImageProcessorPil

from dhp.models.contract.generic_parts import WholeTower
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs


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
