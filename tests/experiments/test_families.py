"""The plain loop and dhp take the same steps, of the lengths that are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.families import __main__ as families
from experiments.families import work
from tests.helpers.tiny_families import save_family


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "save_model", lambda name, folder: str(save_family(name, folder)))


def test_a_line_tells_both_speeds_and_what_the_samples_were() -> None:
    row = families.measure("mistral3", 1)
    assert row["family"] == "mistral3" and row["steps"] == 1
    assert row["ratio"] == pytest.approx(row["plain_step_s"] / row["dhp_step_s"], rel=0.1)
    assert row["dhp_samples_s"] == pytest.approx(8 / row["dhp_step_s"], rel=0.1)
    assert row["lengths"] == "mixed" and row["shortest"] < row["longest"]
    assert 0 < row["padding"] < 1 and 0 < row["image_tokens"] < row["tokens"]


def test_even_samples_have_no_padding() -> None:
    row = families.measure("mistral3", 1, even=True)
    assert row["lengths"] == "even" and row["padding"] == 0 and row["shortest"] == row["longest"]


def test_a_step_that_is_not_the_same_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "CLOSE", 0.0)
    with pytest.raises(AssertionError, match=r"mistral3: dhp's first loss is [\d.]+, the plain loop's"):
        families.measure("mistral3", 1)


def test_widened_models_keep_their_structure(tmp_path: Path) -> None:
    config = work.make_config("qwen3_5")
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.head_dim, text.vocab_size) == (256, 128, work.WORDS)
    assert text.layer_types.count("linear_attention") == 3 and text.num_attention_heads == 4
    assert (vision.hidden_size, vision.patch_size, vision.out_hidden_size) == (256, work.PATCH, 256)
