"""Directories with a tokenizer, an image processor and a processor of a family, as checkpoints have them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
)

from dhp.tiny.tiny_model import make_tokenizer
from tests.helpers.tiny_families import PINPOINTS, SIDE, make_config

CORPUS = ["What is in the picture? A red square, and 12 blue circles.\n\n"] * 4
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- for part in message['content'] -%}
{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
ONE_SIZE = {"height": SIDE, "width": SIDE}


def _llava_next(tokenizer: Any) -> LlavaNextProcessor:
    pictures = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size=ONE_SIZE, image_grid_pinpoints=PINPOINTS
    )
    return LlavaNextProcessor(
        pictures, tokenizer, patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _idefics3(tokenizer: Any) -> Idefics3Processor:
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return Idefics3Processor(pictures, tokenizer, image_seq_len=4)


def _gemma3(tokenizer: Any) -> Gemma3Processor:
    return Gemma3Processor(Gemma3ImageProcessorPil(size=ONE_SIZE), tokenizer, image_seq_length=4)


# Family → its own tokens, those that the tokenizer has a name for, what the template writes for an image, the maker.
MAKERS: dict[str, tuple[list[str], dict[str, str], str, Callable[[Any], Any]]] = {
    "llava_next": (["<image>"], {}, "<image>", _llava_next),
    "idefics3": (
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS],
        {},
        "<image>",
        _idefics3,
    ),
    "gemma3": (
        ["<image>", "<start_of_image>", "<end_of_image>"],
        {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
        _gemma3,
    ),
}


def save_processor(name: str, folder: Path) -> Any:
    """Write all but weights to `folder`; the library's processor."""
    tokens, named, placeholder, make = MAKERS[name]
    tokenizer = make_tokenizer(CORPUS, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    if named:
        tokenizer._set_model_specific_special_tokens(named)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    config = make_config(name)
    config.image_token_id = config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.vocab_size = len(tokenizer) + 8
    config.save_pretrained(folder)
    processor = make(tokenizer)
    processor.save_pretrained(folder)
    return processor
