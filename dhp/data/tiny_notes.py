"""Long texts without pictures: notes of things and their colours, and a question about one of them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from dhp.base.files import new_folder
from dhp.data.drawing import COLOURS, SHAPES

ANNOTATIONS = "notes.jsonl"
_NUMBERS = range(10, 100)


def make_notes(folder: Path, samples: int, notes: int, seed: int = 0) -> Path:
    """Write a dataset of `samples` conversations, each with so many notes. A folder that is there is left as it is; it
    appears complete or not at all."""
    if not folder.exists():
        random = Random(seed)
        lines = [json.dumps({"messages": _talk(random, notes)}) for _ in range(samples)]
        with new_folder(folder) as partial:
            partial.mkdir()
            (partial / ANNOTATIONS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _talk(random: Random, notes: int) -> list[dict[str, str]]:
    things = random.sample([f"{shape} {number}" for shape in SHAPES for number in _NUMBERS], notes)
    colours = random.choices(COLOURS, k=notes)
    facts = " ".join(f"The {thing} is {colour}." for thing, colour in zip(things, colours, strict=True))
    asked = random.randrange(notes)
    question = f"{facts} What colour is the {things[asked]}?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": colours[asked]}]
