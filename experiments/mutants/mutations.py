"""One-line mistakes that a file could have: where, what stands there, and what would stand there instead."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("operator", "index", "constant", "sign", "call")
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_SIGNS: dict[type[ast.AST], type[ast.AST]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_OTHER_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_WORDS = (ast.Raise, ast.JoinedStr, ast.Assert)  # what an error says is no arithmetic


@dataclass(frozen=True)
class Mutation:
    """begin, end: bytes of the file that `new` replaces. line: where, from 1."""

    kind: str
    file: Path
    line: int
    begin: int
    end: int
    old: str
    new: str

    def plant(self, source: bytes) -> bytes:
        """The file with the mistake."""
        return source[: self.begin] + self.new.encode() + source[self.end :]


def find_mutations(file: Path, source: bytes) -> list[Mutation]:
    """Every mistake in the bodies of the file's functions, in the order of its lines."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    found = {}
    for node in _inside_functions(ast.parse(source)):
        for kind, new in _mistakes(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            old = source[begin:end].decode()
            if "\n" not in old:
                mutation = Mutation(kind, file, node.lineno, begin, end, old, new)
                found[mutation.begin, mutation.end, mutation.new] = mutation
    return [found[key] for key in sorted(found)]


def _inside_functions(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _WORDS):
            continue
        if inside and hasattr(node, "lineno"):
            yield node
        body = inside or isinstance(tree, (ast.FunctionDef, ast.Lambda)) and node not in _signature(tree)
        yield from _inside_functions(node, body)


def _signature(function: ast.FunctionDef | ast.Lambda) -> list[ast.AST]:
    if isinstance(function, ast.Lambda):
        return [function.args]
    return [function.args, *function.decorator_list, *([function.returns] if function.returns else [])]


def _mistakes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Kind and new text of each mistake at this node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        yield "operator", _with(node, ops=[_OPERATORS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _OPERATORS:
        yield "operator", _with(node, op=_OPERATORS[type(node.op)]())
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _SIGNS:
        yield "sign", _with(node, op=_SIGNS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Subscript):
        yield from (("index", new) for new in _indices(node))
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield "constant", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", "pass"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OTHER_CALLS:
        yield "call", _with(node, func=ast.Name(_OTHER_CALLS[node.func.id]))


def _indices(node: ast.Subscript) -> Iterator[str]:
    if isinstance(node.slice, ast.Slice):
        for bound in ("lower", "upper"):
            known = getattr(node.slice, bound)
            if known is not None:
                yield _with(node, slice=_changed(node.slice, **{bound: ast.BinOp(known, ast.Add(), ast.Constant(1))}))
    elif isinstance(node.slice, (ast.Constant, ast.UnaryOp)) and not _is_text(node.slice):
        yield _with(node, slice=ast.BinOp(node.slice, ast.Add(), ast.Constant(1)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, int)


def _with(node: ast.AST, **changes: object) -> str:
    return ast.unparse(ast.fix_missing_locations(_changed(node, **changes)))


def _changed(node: ast.AST, **changes: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in changes.items():
        setattr(other, name, value)
    return other
