"""Questions about Python's syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


def bound(statement: ast.stmt) -> set[str]:
    """Variables of the forward that the statement may give a value; those of comprehensions are not the forward's."""
    inner = {
        id(name)
        for node in ast.walk(statement)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
    }
    found = set[str]()
    for node in ast.walk(statement):
        match node:
            case ast.Name(ctx=ast.Store()) if id(node) not in inner:
                found.add(node.id)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)):
                found.add(name)
    return found


def in_order(node: ast.AST) -> Iterator[ast.Name]:
    """The variables in a statement, about in the order in which they are read and written."""
    if isinstance(node, ast.Name):
        yield node
        return
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.For):  # the value, or what a loop goes over, comes first
        first = node.iter if isinstance(node, ast.For) else node.value
        parts = [first, *(part for part in parts if part is not first)] if first else parts
    for part in parts:
        yield from in_order(part)


def operands(expression: ast.expr) -> list[tuple[tuple[str, int], ast.expr]] | None:
    """The parts of an expression in the order in which they are evaluated, each once and surely; None if that is not so."""
    match expression:
        case ast.Call():
            found = [(("func", 0), expression.func)]
            found += [(("args", i), argument) for i, argument in enumerate(expression.args)]
            return found + [(("keywords", i), keyword.value) for i, keyword in enumerate(expression.keywords)]
        case ast.BinOp():
            return [(("left", 0), expression.left), (("right", 0), expression.right)]
        case ast.UnaryOp():
            return [(("operand", 0), expression.operand)]
        case ast.Tuple() | ast.List():
            return [(("elts", i), element) for i, element in enumerate(expression.elts)]
        case ast.Dict() if None not in expression.keys:
            return [(("values", i), value) for i, value in enumerate(expression.values)]
        case ast.Attribute() | ast.Starred():
            return [(("value", 0), expression.value)]
        case ast.Subscript():
            return [(("value", 0), expression.value), (("slice", 0), expression.slice)]
        case ast.Compare() if len(expression.ops) == 1:
            return [(("left", 0), expression.left), (("comparators", 0), expression.comparators[0])]
    return None


def put(expression: ast.expr, place: tuple[str, int], child: ast.expr, copied: dict[str, Any]) -> None:
    """Put a part into a copied expression, in lists that are copied on first use."""
    field, index = place
    known = getattr(expression, field)
    if not isinstance(known, list):
        setattr(expression, field, child)
        return
    values = copied.setdefault(field, list(known))
    values[index] = ast.keyword(known[index].arg, child) if field == "keywords" else child
    setattr(expression, field, values)
