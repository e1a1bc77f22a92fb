"""Alpaca: `instruction`, `input` and `output`, `history` of pairs, `system`, and files beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.base.errors import DataError
from dhp.data.formats.beside import turns_with_files
from dhp.data.formats.dialogue import check_answer, optional_text, pairs_before, required_text, with_system
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn


def read_alpaca(raw: Mapping[str, Any], media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample: the question is the instruction, and below it the input where there is one. Raises
    DataError, with the reason alone."""
    instruction, more = optional_text(raw, "instruction"), optional_text(raw, "input")
    question = "\n".join(text for text in (instruction, more) if text)
    if not question:
        raise DataError(f"'instruction' is missing or empty; the sample has {sorted(map(str, raw))}")
    answer = required_text(raw, "output")
    said = [*pairs_before(raw), ("user", question), ("assistant", answer)]
    check_answer(len(said), "assistant", answer)
    return turns_with_files(with_system(raw, said), raw, media)
