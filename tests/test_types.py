"""What `models` and `parallel` offer is typed: mypy holds every other room, and follows these two for their types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [file for room in ("models", "parallel") for file in sorted((ROOT / "dhp" / room).rglob("*.py"))]


def public(body: list[ast.stmt], within: str = "", method: bool = False) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """(name, function, whether its first argument is the object or the class) of what has no leading underscore."""
    for node in body:
        if isinstance(node, ast.If):
            yield from public([*node.body, *node.orelse], within, method)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body, f"{within}{node.name}.", method=True)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            yield within + node.name, node, method and not static


def untyped(source: str) -> list[str]:
    """`line name: what lacks an annotation` of every public function and method that lacks one."""
    found = []
    for name, function, bound in public(ast.parse(source).body):
        args = function.args
        named = [*args.posonlyargs, *args.args][bound:] + args.kwonlyargs
        packed = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
        lacking = [arg.arg for arg in named + packed if arg.annotation is None]
        lacking += [] if function.returns else ["return"]
        if lacking:
            found.append(f"{function.lineno} {name}: {', '.join(lacking)}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_public_is_typed(file: Path) -> None:
    assert not untyped(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("def f(a, *b, c=0, **d): ...", ["1 f: a, c, b, d, return"]),
        ("class A:\n    def f(self, a: int): ...", ["2 A.f: return"]),
        ("class A:\n    @staticmethod\n    def f(a) -> None: ...", ["3 A.f: a"]),
        ("class A:\n    def f(self) -> None: ...\n    def _g(self, a): ...", []),
        ("class _A:\n    def f(self, a): ...\ndef _g(a): ...", []),
        ("def f(a: int, *b: int, **c: int) -> None: ...", []),
    ],
)
def test_what_lacks_an_annotation_is_found(source: str, lacking: list[str]) -> None:
    assert untyped(source) == lacking
