"""The project's words are the field's: some private ones stand nowhere in code, messages and documents."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for folder in ("dhp", "docs", "configs") for file in (ROOT / folder).rglob("*") if file.is_file())
TEXTS = [*(f for f in FILES if f.suffix in (".py", ".md", ".yaml", ".toml")), ROOT / "README.md"]
# A word by itself, or a part of a name (`_told`, `told_plan`); what the field calls it instead.
PRIVATE = {
    "told": "declared, reported, given, a message",
    "heard": "audio, recorded",
    "dealt": "sharded, assigned",
    "whoever": "the caller, the rank that",
    "course": "curriculum",
    "courses": "curriculums",
}


@pytest.mark.parametrize("word", PRIVATE)
def test_a_private_word_stands_nowhere(word: str) -> None:
    stands = re.compile(rf"(?<![a-z]){word}(?![a-z])", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in TEXTS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if stands.search(line)
    ]
    assert not found, f"the field says: {PRIVATE[word]}"


@pytest.mark.parametrize("text", ["told", "_told", "told_plan", "is told.", "Told", "(told)"])
def test_a_word_is_found_in_whatever_name_it_is(text: str) -> None:
    assert re.search(r"(?<![a-z])told(?![a-z])", text, re.IGNORECASE)
