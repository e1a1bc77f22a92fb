"""Configurations made small."""

from __future__ import annotations

from transformers import Glm4vMoeConfig, LlavaConfig, Qwen3VLConfig

from dhp.models.contract.twin import MOST_EXPERTS, MOST_LAYERS, VOCABULARY, shrink
from tests.helpers.tiny_families import FAMILIES, make_config


def test_what_is_small_stays_as_it_is() -> None:
    for name in FAMILIES:
        given = make_config(name)
        found = shrink(given).to_dict()
        for section in ("text_config", "vision_config"):
            before = given.to_dict()[section]
            assert {key: found[section][key] for key in before} == before, name


def test_a_large_decoder_keeps_a_layer_of_each_kind() -> None:
    config = Glm4vMoeConfig()
    text, small = config.text_config, shrink(config).text_config
    assert text.num_hidden_layers > 40 and small.num_hidden_layers == MOST_LAYERS
    assert small.first_k_dense_replace == 1 < small.num_hidden_layers
    assert small.n_routed_experts == MOST_EXPERTS and small.vocab_size == VOCABULARY
    assert small.hidden_size == small.num_attention_heads * (text.hidden_size // text.num_attention_heads)


def test_special_tokens_move_into_the_small_vocabulary_each_to_its_own() -> None:
    config = Qwen3VLConfig()
    small = shrink(config)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    moved = [getattr(small, name) for name in names]
    assert len(set(moved)) == 4 and max(moved) < VOCABULARY
    assert small.vision_config.out_hidden_size == small.text_config.hidden_size
    assert small.vision_config.depth == config.vision_config.depth


def test_a_tower_is_cut_where_that_is_asked_for() -> None:
    config = Qwen3VLConfig()
    small = shrink(config, towers=True)
    assert small.vision_config.depth == MOST_LAYERS < config.vision_config.depth
    chosen = small.vision_config.deepstack_visual_indexes
    assert len(chosen) == len(config.vision_config.deepstack_visual_indexes) and max(chosen) < MOST_LAYERS
    assert shrink(LlavaConfig(vision_feature_layer=[-2, 20]), towers=True).vision_feature_layer == [-2, 3]
