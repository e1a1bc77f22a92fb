"""What reading conversations costs beside their tokenizer alone, with published vocabularies."""

import argparse
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

from dhp.config.data import DataConfig
from dhp.data.read.records import Record, Turn
from dhp.data.sample.chat import render, to_messages
from dhp.data.sample.picture_inputs import ModelMedia
from dhp.data.sample.tokens import ConversationTokenizer
from tests.golden.vocabularies import QWEN_TEMPLATE, load_mistral, load_qwen, load_smollm2

SAMPLES = 2000
MISTRAL_TEMPLATE = (
    "{{- '<s>' }}{%- for message in messages %}{%- for part in message.content %}{%- if message.role == 'user' %}"
    "{{- '[INST]' + part.text + '[/INST]' }}{%- else %}{{- part.text + '</s>' }}{%- endif %}{%- endfor %}{%- endfor %}"
)
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
VOCABULARIES = {
    "qwen": load_qwen,
    "mistral": lambda: load_mistral(MISTRAL_TEMPLATE),
    "smollm2": lambda: load_smollm2(QWEN_TEMPLATE, CHATML),
}


def conversations(count: int, turns: int) -> list[Record]:
    """Questions and answers of the words of Python's own manual: answers of some 60 words, questions of some 12."""
    words = [word for text in topics.values() for word in re.findall(r"\S+\s*", text)]
    found, at = [], 0
    for number in range(count):
        parts = []
        for turn in range(turns):
            for role, length in (("user", 8 + (number + turn) % 9), ("assistant", 30 + (number * 7 + turn) % 61)):
                taken = [words[(at + step) % len(words)] for step in range(length)]
                parts.append(Turn(role, ("".join(taken).strip(),)))
                at += length
        found.append(Record("manual", number + 1, f"sample {number + 1}", tuple(parts)))
    return found


def reading(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each vocabulary and number of answers: seconds of templates, tokens and labels over seconds of the
    tokenizer's own call on the same texts, and of the template alone; medians of interleaved rounds."""
    for name, load in VOCABULARIES.items():
        tokenizer = load()
        read = ConversationTokenizer(tokenizer, ModelMedia(), DataConfig())
        for turns in (1, 4):
            records = conversations(SAMPLES // turns, turns)
            yield {"vocabulary": name, "answers": turns} | _compare(tokenizer, read, records, given.rounds or 5)


def _compare(tokenizer: Any, read: ConversationTokenizer, records: Sequence[Record], rounds: int) -> dict[str, Any]:
    chats = [to_messages(record.turns) for record in records]
    texts = [render(tokenizer, messages).text for messages in chats]
    tokens = sum(read.tokenize(record, (), (), ()).ids.size for record in records)
    alone, templates, ratios = [], [], []
    for _ in range(rounds):
        started = time.perf_counter()
        for text in texts:
            tokenizer(text, add_special_tokens=False)
        tokenized = time.perf_counter()
        for messages in chats:
            tokenizer.apply_chat_template(messages, tokenize=False)
        between = time.perf_counter()
        for record in records:
            read.tokenize(record, (), (), ())
        alone.append(tokenized - started)
        templates.append((between - tokenized) / alone[-1])
        ratios.append((time.perf_counter() - between) / alone[-1])
    found = {"tokens": tokens // len(records), "tokenizer_us": round(statistics.median(alone) / len(records) * 1e6)}
    return found | {"template": round(statistics.median(templates), 2), "ratio": round(statistics.median(ratios), 2)}
