"""Patches of each frame of a picture are those of the tower's own layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.models.registry import load_family
from tests.helpers.tiny_families import SIDE, make_config

IMAGES, VIDEOS = [(1, 6, 10), (1, 4, 4)], [(3, 4, 8), (1, 2, 2)]
GRIDS = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "kimi_k25"), IMAGES + VIDEOS)
GRIDS["llava_clip"] = [(1, SIDE // 7, SIDE // 7)]


@pytest.mark.parametrize("name", GRIDS)
def test_they_are_those_of_the_layout(name: str, tmp_path: Path) -> None:
    make_config(name).save_pretrained(tmp_path)
    family = load_family(str(tmp_path))
    for grid in GRIDS[name]:
        layout, found = family.tower.image_layout(grid), family.processor.frame_patches(grid)
        assert found == layout.frame_lengths and sum(found) == layout.patches
