"""An axis is a record: what docs/developers/adding-an-axis.md adds is found wherever axes are derived."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dhp.core import axes

ROOT = Path(__file__).parents[2]
LINE = 'Axis("context", ROW, every_layer=True),'


@pytest.fixture
def with_context(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file with the page's line, between ring and ulysses, and the field of that name."""
    source = Path(axes.__file__).read_text()
    page = (ROOT / "docs" / "developers" / "adding-an-axis.md").read_text()
    assert LINE in page
    source = source.replace('    Axis("ulysses"', f'    {LINE}\n    Axis("ulysses"', 1)
    source = source.replace("    tensor: int = 1\n", "    tensor: int = 1\n    context: int = 1\n", 1)
    module = ModuleType("axes_with_context")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their types
    exec(compile(source, axes.__file__, "exec"), module.__dict__)
    return module


def test_meshes_groups_and_words_follow_from_the_record(with_context: ModuleType) -> None:
    split = with_context.Degrees(data=2, context=3, ulysses=2, tensor=2)
    assert with_context.MESH == ("data", "ring", "context", "ulysses", "tensor")
    assert with_context.OF_ROWS == ("ring", "context", "ulysses") and "context" in with_context.EVERY_LAYER
    assert split.along(*with_context.MESH) == (2, 1, 3, 2, 2)
    assert (split.world, split.shards, split.sequence, split.holders, split.divided) == (24, 12, 6, 2, 4)
    assert split.by_axis() == {"data": 2, "ring": 1, "context": 3, "ulysses": 2, "tensor": 2}
    assert str(split) == "data 2 × context 3 × ulysses 2 × tensor 2"
    assert with_context.Degrees.read({"context": 4}.get).context == 4


def test_nobody_else_lists_the_axes() -> None:
    """Lists of axes' names stand in the record's file alone, and in rules of the configuration and of parts."""
    several = re.compile(r'"(?:data|ring|ulysses|tensor)", "(?:data|ring|ulysses|tensor)"')
    files = [file for file in (ROOT / "dhp").rglob("*.py") if several.search(file.read_text())]
    assert {file.relative_to(ROOT / "dhp").parts[0] for file in files} <= {"config", "models"}


@pytest.mark.parametrize(("word", "most"), [("expert", 12), ("ulysses", 13)])
def test_few_files_name_an_axis(word: str, most: int) -> None:
    """In code: names and strings; neither prose nor the folder of that name."""
    import ast

    named = re.compile(rf"(?<![A-Za-z_]){word}(?![A-Za-z_])")
    found = set()
    for file in (ROOT / "dhp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                text = node.value if len(node.value) < 60 else None
            if isinstance(text, str) and named.fullmatch(text):
                found.add(str(file.relative_to(ROOT / "dhp")))
    assert len(found) <= most, sorted(found)
