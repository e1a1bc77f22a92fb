"""GLM-4.xV: what the prompt of a video says, and what the plain model is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from dhp.models.families.glm4v import glm4v
from tests.helpers.tiny_families import BEGIN, END, IMAGE, VIDEO, make_config


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
