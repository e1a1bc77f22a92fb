"""What several experiments train on: a generated dataset, and families made wide."""

import json
from pathlib import Path

import pytest

from experiments import loops
from experiments.small import ANNOTATIONS, SOURCES, make_dataset


def test_the_same_seed_gives_the_same_data(tmp_path: Path) -> None:
    first, second = (make_dataset(tmp_path / name, 40, seed=3) for name in ("first", "second"))
    files = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    annotations = json.loads((first / ANNOTATIONS).read_text())
    assert len(annotations) == 40
    for sample in annotations:
        tags = sample["conversations"][0]["value"].count("<image>")
        assert tags == len(sample.get("image", [])) == sum(f"{sample['id']}_" in str(file) for file in files)


def test_shares_are_of_a_whole() -> None:
    assert sum(source.share for source in SOURCES.values()) == pytest.approx(1)
    assert all(sum(source.images.values()) == pytest.approx(1) for source in SOURCES.values())


def test_widened_models_keep_their_structure() -> None:
    config = loops.make_config("qwen3_5")
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.head_dim, text.vocab_size) == (256, 128, loops.WORDS)
    assert text.layer_types.count("linear_attention") == 3 and text.num_attention_heads == 4
    assert (vision.hidden_size, vision.patch_size, vision.out_hidden_size) == (256, loops.PATCH, 256)
