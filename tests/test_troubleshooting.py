"""The page about messages names messages that dhp has."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = [
    piece
    for line in PAGE.read_text(encoding="utf-8").split("## Without a message")[0].splitlines()
    if line.startswith("| `")
    for piece in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]


@cache
def literals() -> str:
    """All texts of dhp, those of f-strings with their gaps closed."""
    found = []
    for file in (ROOT / "dhp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_one_of_ours(message: str) -> None:
    assert message in literals()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 15 and "a message that nobody has" not in literals()
