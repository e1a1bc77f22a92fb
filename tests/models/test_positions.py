"""Which positions a model knows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlavaConfig, Qwen2_5_VLConfig, Qwen2Config

from dhp.core.batch import PositionRange
from dhp.models.config_file import find_positions


def llava(**rotary: Any) -> LlavaConfig:
    return LlavaConfig(
        text_config=Qwen2Config(max_position_embeddings=1000, rope_parameters={"rope_theta": 1e4, **rotary})
    )


@pytest.mark.parametrize(
    ("rotary", "count"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}, 1000),
    ],
)
def test_a_factor_stretches_them(rotary: dict[str, Any], count: int) -> None:
    assert find_positions(llava(**rotary)) == PositionRange(count, of_pictures=True)


def test_those_that_turn_by_the_length_have_no_end() -> None:
    assert find_positions(llava(rope_type="dynamic", factor=2.0)) is None


def test_rows_and_columns_share_positions() -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(text_config={"max_position_embeddings": 300, "rope_parameters": rotary})
    assert find_positions(config) == PositionRange(300, of_pictures=False)


def test_layers_of_several_kinds_know_what_the_furthest_knows() -> None:
    config = llava()
    config.text_config.rope_parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    assert find_positions(config) == PositionRange(8000, of_pictures=True)
