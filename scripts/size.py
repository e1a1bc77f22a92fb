"""Prints the size of the tree by room: lines, files, share of heads, and names that mean two things.

`python -m scripts.size`. A file's head is its docstring, its imports and the blank lines between them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAIN, BESIDE = "dhp", ("tests", "experiments", "scripts")
COMMANDS = "dhp/cli/"  # a file there has the name of its command, which another file may have too


@dataclass(frozen=True)
class Size:
    """Of some files. heads: lines of their heads. values: dataclasses."""

    files: int
    lines: int
    heads: int
    functions: int
    classes: int
    values: int


def size_of(files: list[Path]) -> Size:
    """The size of these files together."""
    counts = [_counts(file.read_text(encoding="utf-8")) for file in files]
    return Size(len(files), *(sum(column) for column in zip(*counts, strict=True)) if counts else (0,) * 5)


def _counts(source: str) -> tuple[int, int, int, int, int]:
    tree = ast.parse(source)
    head = 0
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) and not (node is tree.body[0] and _is_text(node)):
            break
        head = node.end_lineno or 0
    functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(tree))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    values = sum("dataclass" in ast.dump(one) for node in classes for one in node.decorator_list)
    return len(source.splitlines()), head, functions, len(classes), values


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def files_below(folder: str) -> list[Path]:
    """Python files below a folder of the project."""
    return sorted((ROOT / folder).rglob("*.py"))


def rooms() -> dict[str, list[Path]]:
    """Files by room of the package; those that lie beside the rooms under its own name."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in files_below(MAIN):
        first = file.relative_to(ROOT / MAIN).parts[0]
        found[MAIN if first.endswith(".py") else first].append(file)
    return dict(sorted(found.items()))


def names_twice(files: list[Path]) -> dict[str, list[str]]:
    """Names of classes, and of files but `__init__` and commands, that stand in several places, with the places."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, name in _named(files):
        found[name].append(str(file.relative_to(ROOT)))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def _named(files: list[Path]) -> Iterator[tuple[Path, str]]:
    for file in files:
        if file.stem != "__init__" and not str(file.relative_to(ROOT)).startswith(COMMANDS):
            yield file, f"{file.stem}.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield file, node.name


def table(sizes: Mapping[str, Size]) -> list[str]:
    """A line a room."""
    lines = [f"{'':14}{'files':>7}{'lines':>8}{'heads':>8}{'functions':>11}{'classes':>9}{'values':>8}"]
    for name, own in sizes.items():
        share = own.heads / own.lines if own.lines else 0.0
        lines.append(
            f"{name:14}{own.files:7}{own.lines:8,}{share:8.1%}{own.functions:11,}{own.classes:9,}{own.values:8,}"
        )
    return lines


def main() -> None:
    """Print the table and the names."""
    sizes = {name: size_of(files) for name, files in rooms().items() if name != MAIN}
    sizes |= {f"{name} in all": size_of(files_below(name)) for name in (MAIN, *BESIDE)}
    print("\n".join(table(sizes)))
    twice = names_twice(files_below(MAIN))
    print(f"names that mean two things: {len(twice)}")
    for name, places in twice.items():
        print(f"  {name}: {', '.join(places)}")


if __name__ == "__main__":
    main()
