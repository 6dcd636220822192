"""Small changes to Python code, each of which a good test notices."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
# Types, and flags such as frozen=True, are not behaviour that a test should check.
_SKIPPED = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """A module with one change, of `old` to `new`."""

    line: int
    old: str
    new: str
    source: str


def of_source(source: bytes) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its code."""
    tree = ast.parse(source)
    for owner, key, is_condition in list(_places(tree)):
        node = owner[key]
        for other in _others(node, is_condition=is_condition):
            owner[key] = ast.fix_missing_locations(ast.copy_location(other, node))
            yield Mutant(node.lineno, ast.unparse(node), ast.unparse(other), ast.unparse(tree))
        owner[key] = node


def _places(parent: ast.AST) -> Iterator[tuple[Any, Any, bool]]:
    """A list or dictionary that has a node, the node's key in it, and whether the node is a condition."""
    for name, value in ast.iter_fields(parent):
        if name in _SKIPPED:
            continue
        owner: Any = value if isinstance(value, list) else vars(parent)
        for key in range(len(value)) if isinstance(value, list) else [name]:
            if isinstance(owner[key], ast.AST):
                if isinstance(owner[key], (ast.expr, ast.stmt)):
                    yield owner, key, name in ("test", "ifs")
                yield from _places(owner[key])


def _others(node: ast.AST, *, is_condition: bool) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=right):
            yield ast.Compare(left, [_OTHER[type(operator)]()], right)
        case ast.BoolOp(op=operator, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
    if is_condition and not isinstance(node, ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]
