"""One row as other projects document it, and what must become of it."""

import base64
import io
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

COLOURS = {"red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230)}


@dataclass(frozen=True)
class Row:
    """case: the numbers of the cases that it rebuilds, and a name. source, what: of the table. raw: one sample, or all
    text of a file named `file`.

    says: what the template must write, "role: text" a turn, with <red>, <green>, <blue> where an image of that colour
    is, <red video> where a video is, <red-blue video> one whose first step is red and whose last is blue, and <a sound>
    where a clip is. An answer of role "unlearned" is written as the assistant's and not learned.

    refused: a pattern that the refusal must have; "": it is read. grids: of its pictures, where they matter.
    unread: keys that must be named as not read."""

    case: str
    source: str
    what: str
    raw: Any
    says: tuple[str, ...] = ()
    refused: str = ""
    form: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    grids: tuple[tuple[int, int, int], ...] = ()
    unread: tuple[str, ...] = ()
    file: str = "rows.jsonl"
    thinks: bool = False  # the template writes reasoning_content
    hears: bool = False  # the row is for a model that hears


def picture(colour: str, size: int = 56) -> bytes:
    """A PNG of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), COLOURS[colour]).save(buffer, "PNG")
    return buffer.getvalue()


def in_base64(colour: str) -> str:
    return base64.b64encode(picture(colour)).decode()


def chat(
    *texts: Any, role: str = "role", content: str = "content", names: tuple[str, str] = ("user", "assistant")
) -> list:
    """Turns of the two sides, one after the other; a mapping is laid over its turn."""
    turns = []
    for number, text in enumerate(texts):
        more = text if isinstance(text, dict) else {content: text}
        turns.append({role: names[number % 2], **more})
    return turns


def gpt(*texts: Any, names: tuple[str, str] = ("human", "gpt")) -> list:
    return chat(*texts, role="from", content="value", names=names)


def text(words: str, key: str = "text") -> dict:
    return {"type": "text", key: words}
