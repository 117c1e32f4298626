"""Owns calls that are written in Python, as in some formats: f(a=1, b="text"), or a list of such calls."""

from __future__ import annotations

import ast

from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall


def python_calls(text: str) -> list[ParsedCall]:
    """The calls in Python source, which is parsed and never run. Raises ValueError for anything but calls."""
    try:
        return _calls(ast.parse(text.strip()))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not Python") from error


def _calls(tree: ast.Module) -> list[ParsedCall]:
    nodes: list[ast.expr] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not a call")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List) else [value]
    if not nodes:
        raise ValueError("no call")
    return [_call(node) for node in nodes]


def _call(node: ast.expr) -> ParsedCall:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]  # models often wrap a fenced call in print()
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a plain argument")
        arguments[keyword.arg] = _literal(keyword.value)
    return call_with(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> object:
    try:
        value = ast.literal_eval(node)
    except (TypeError, ArithmeticError) as error:
        raise ValueError("not a literal") from error
    if not isinstance(value, (str, int, float, bool, list, dict, type(None))):
        raise ValueError("not a JSON value")
    return value
