"""Prompts are what the model's own chat template writes, cut before their last token, and dealt out as in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from dhp.batch.prompts import check_room, find_stops, make_held_out_feed, make_prompt_feed
from dhp.config.command_line import compose_config
from dhp.config.data import DatasetEntry
from dhp.config.resolve import resolve
from dhp.core.batch import PositionRange, Sampling
from dhp.core.errors import DataError
from dhp.data.read.records import Record, Turn
from dhp.models.pretrained import load_image_processor
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings
from tests.helpers.answers import make_text


def settings_of(assets: Path, *overrides: str):
    config = resolve(compose_config("tiny", overrides=["text.parallelism=sequence", *overrides]))
    for part in (config.vision, config.text):
        part.model_name = str(assets / "model")
    entry = config.data.data_registry["shapes"]
    entry.annotation_path, entry.data_path = str(assets / "data" / "annotations.json"), str(assets / "data")
    return feed_settings(config)


def ask(image: Path) -> Record:
    return Record("prompt", 1, "the prompt", (Turn("user", (image, "Which shape is this?")),))


def test_the_prompt_is_the_templates_own(tiny_assets: Path) -> None:
    image = next((tiny_assets / "data" / "images").glob("*.png"))
    feed = make_prompt_feed(settings_of(tiny_assets), [ask(image)], Sampling(7))
    (shards,) = feed.read(feed.batch(0)).work["text"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_assets / "model")
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which shape is this?"}]}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    grid = load_image_processor(str(tiny_assets / "model"))(Image.open(image).convert("RGB"))["image_grid_thw"][0]
    placeholder = load_family(str(tiny_assets / "model")).processor.image_token_id
    runs = [[one] * (int(np.prod(grid)) // 4 if one == placeholder else 1) for one in wanted]
    whole = [one for run in runs for one in run]
    row = torch.empty(len(whole) - 1, dtype=torch.long)
    for rank, shard in enumerate(shards):
        spans = shard.row.shards[rank]
        places = [place for _, first, count in spans for place in range(first, first + count)]
        row[places] = shard.row.tensors["input_ids"][0]
    assert [*row.tolist(), shards[0].last] == whole
    assert all(shard.tokens == len(whole) - 1 and shard.sampling.stop for shard in shards)
    # An image of t × h × w patches takes max(h, w) / 2 positions, whatever its tokens.
    saved = len(runs[wanted.index(placeholder)]) - int(max(grid[1:])) // 2
    assert shards[0].next_position == len(whole) - saved and saved > 0


def test_answers_stop_where_those_that_were_learned_end(tiny_assets: Path) -> None:
    """A base model ends texts with one token, and its template ends turns with another."""
    model = str(tiny_assets / "model")
    tokenizer, config = AutoTokenizer.from_pretrained(model), load_family(model).config
    end = tokenizer.convert_tokens_to_ids("<|vision_pad|>")
    named = find_stops(model, config, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|vision_pad|>")
    assert end not in named and find_stops(model, config, tokenizer) == (*named, end)


def test_each_prompt_draws_from_a_seed_of_its_own(tiny_assets: Path) -> None:
    image = next((tiny_assets / "data" / "images").glob("*.png"))
    records = [replace(ask(image), position=position) for position in (1, 2, 3)]
    feed = make_prompt_feed(settings_of(tiny_assets), records, Sampling(7, seed=40))
    dealt = [feed.read(feed.batch(step)).work["text"][0] for step in range(feed.steps)]
    assert [{shard.sampling.seed for shard in shards} for shards in dealt] == [{40}, {41}, {42}]


def test_held_out_prompts_are_those_of_the_first_answers(tiny_assets: Path) -> None:
    feed = make_held_out_feed(settings_of(tiny_assets), 3, Sampling(7))
    prompts = feed.prompts
    assert len(prompts) == feed.steps == 3 and all(one.question and one.reference for one in prompts)
    assert all(one.name == "shapes" and "<image>" not in one.question for one in prompts)


def test_all_prompts_of_a_dataset_whose_pictures_are_read_when_they_are_answered(
    tiny_assets: Path, tmp_path: Path
) -> None:
    said = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A square."}]
    good = next((tiny_assets / "data" / "images").glob("*.png")).read_bytes()
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "broken.png").write_bytes(good[:60])
    rows = [{"image": f"{name}.png", "conversations": said} for name in ("good", "broken", "good")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    settings = settings_of(tiny_assets)
    registry = {"shapes": DatasetEntry(str(tmp_path / "rows.json"), str(tmp_path))}
    settings = replace(settings, data=replace(settings.data, data_registry=registry, shuffle=False))
    feed = make_held_out_feed(settings, None, Sampling(7))
    assert len(feed) == feed.steps == 3 and [one.reference for one in feed.prompts] == ["A square."] * 3
    feed.read(feed.batch(2))
    with pytest.raises(DataError, match="broken.png"):
        feed.read(feed.batch(1))
    skipping = replace(settings, data=replace(settings.data, on_bad_sample="skip"))
    assert len(make_held_out_feed(skipping, None, Sampling(7))) == 2
    (tmp_path / "rows.json").write_text(json.dumps(rows[1:2]))
    with pytest.raises(DataError, match="shapes has no sample that can be asked"):
        make_held_out_feed(skipping, None, Sampling(7))


def test_a_prompt_without_room_for_its_answer_is_refused() -> None:
    text = make_text(20, 1)
    check_room(text, 12, PositionRange(32, True))
    with pytest.raises(DataError, match=r"20 tokens and 13 new ones are more than the 32 .* Set max_new_tokens=12"):
        check_room(text, 13, PositionRange(32, True))
    check_room(text, 1 << 20, None)
