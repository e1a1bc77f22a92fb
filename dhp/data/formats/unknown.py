"""Samples whose keys are of no known format."""

from __future__ import annotations

from typing import NoReturn

from dhp.base.errors import DataError
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver

KNOWN = {
    "llava": "conversations of from and value, image",
    "sharegpt": "messages of role and content, images",
    "openai": "messages whose content is a list of parts",
    "alpaca": "instruction, input and output",
    "swift": "query and response (or prompt, question, problem, instruction and answer, completion, solution), "
    "messages, conversation or texts of user and assistant, images",
    "text": "text",
}


def read_unknown(raw: Fields, media: MediaResolver) -> NoReturn:
    """Raises DataError that lists the formats."""
    known = "; ".join(f"{name} ({keys})" for name, keys in KNOWN.items())
    raise DataError(
        f"keys {sorted(map(str, raw))} are of no known format. Known are: {known}. If only names differ, say so in "
        "the dataset's columns, as columns={messages: dialogue}. Text alone is read only where the dataset's format is "
        "set to text; preferences and classes are not read"
    )
