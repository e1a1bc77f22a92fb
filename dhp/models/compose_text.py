"""A text decoder's tokenizer and chat template, made fit for pictures."""

from __future__ import annotations

from typing import Any

IMAGE_TOKENS = ("<image>", "<|image_pad|>", "<|image|>", "[IMG]")  # the first that a tokenizer has, else the first

# Contents that are lists of parts become text, before the decoder's own template sees them.
_FLATTEN = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string or message['content'] is none or message['content'] is undefined -%}
{%- set flat.messages = flat.messages + [message] -%}
{%- else -%}
{%- set text = namespace(value='') -%}
{%- for part in message['content'] -%}
{%- set text.value = text.value + ('IMAGE\\n' if part['type'] == 'image' else part['text']) -%}
{%- endfor -%}
{%- set flat.messages = flat.messages + [dict(message, content=text.value)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""
# Of a decoder without a template: LLaVA's (Vicuna's).
_PLAIN = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ message['content'] + ' ' }}
{%- elif message['role'] == 'user' -%}
{{ 'USER: ' + message['content'] + ' ' }}
{%- else -%}
{{ 'ASSISTANT: ' + message['content'] + eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT: ' }}{%- endif -%}
"""


def add_image_token(tokenizer: Any) -> str:
    """The token that stands for an image: one that the tokenizer has, or a new one."""
    known = tokenizer.get_vocab()
    found = next((token for token in IMAGE_TOKENS if token in known), None)
    if found is None:
        found = IMAGE_TOKENS[0]
        tokenizer.add_special_tokens({"additional_special_tokens": [found]}, replace_extra_special_tokens=False)
    return found


def written_with_images(tokenizer: Any, token: str) -> str:
    """The tokenizer's chat template, or a plain one where it has none, with an image written as the token and a line
    break."""
    own = tokenizer.chat_template
    if isinstance(own, dict):  # several by name
        own = tokenizer.get_chat_template()
    return _FLATTEN.replace("IMAGE", token) + (own or _PLAIN)
