"""Programs that differ from a right one in one place, as mutation testing makes them."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


_Change = Callable[[ast.AST], ast.AST | None]


def mutants(source: str, most: int) -> Iterator[str]:
    """The source with one place changed, from its end on: operators, numbers, truth values, `most` of those; then what
    it returns."""
    for change in (_another, _returning_more):
        places = sum(change(node) is not None for node in ast.walk(_parsed(source)))
        for place in reversed(range(max(0, places - most), places)):
            yield ast.unparse(ast.fix_missing_locations(_ChangeOne(change, place).visit(_parsed(source)))) + "\n"


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source)


class _ChangeOne(ast.NodeTransformer):
    def __init__(self, change: _Change, place: int) -> None:
        self._change, self._left = change, place

    def visit(self, node: ast.AST) -> ast.AST:
        """The node, or what it becomes when it is the one."""
        node = self.generic_visit(node)
        changed = self._change(node)
        if changed is None:
            return node
        self._left -= 1
        return changed if self._left == -1 else node


def _another(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in _SWAPPED:
            return ast.BinOp(left, _SWAPPED[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(_SWAPPED[type(operator)](), values)
        case ast.Compare(left, [first, *others], compared) if type(first) in _SWAPPED:
            return ast.Compare(left, [_SWAPPED[type(first)](), *others], compared)
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
    return None


def _returning_more(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Return(ast.expr() as value):
            return ast.Return(ast.Tuple([value, ast.Constant(None)], ast.Load()))
    return None
