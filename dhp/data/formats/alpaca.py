"""Alpaca: `instruction`, `input` and `output`, `history` of pairs, `system`, and files under keys of their own."""

from __future__ import annotations

from dhp.base.errors import DataError
from dhp.data.formats.beside import turns_of
from dhp.data.formats.dialogue import Said, optional_text, pairs_before, required_text, with_system
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import ANSWERS, Turn


def read_alpaca(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample: the question is the instruction, and below it the input where there is one. Raises
    DataError, with the reason alone."""
    instruction, more = optional_text(raw, "instruction"), optional_text(raw, "input")
    question = "\n".join(text for text in (instruction, more) if text)
    if not question:
        raise DataError(f"'instruction' is missing or empty; the sample has {sorted(map(str, raw))}")
    said = [*pairs_before(raw), Said("user", (question,)), Said(ANSWERS, (required_text(raw, "output"),))]
    return turns_of(raw, with_system(raw, said), media, in_front=True)
