"""Owns calls that are written in Python, as in some formats: f(a=1, b="text"), or a list of such calls.

Models write values as Python or as JSON: both are read, and grammars write JSON.
"""

from __future__ import annotations

import ast

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import NEWLINE, CallGrammar, FreeText, Separated
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.tool_format import ParsedCall
from outrider.chat.formats.typed_values import has_fixed_arguments, properties_of, with_definitions
from outrider.chat.json_text import loads


def python_calls(text: str) -> list[ParsedCall]:
    """The calls in Python source, which is parsed and never run. Raises ValueError for anything but calls."""
    text = text.strip()
    try:
        return [_call(node, text) for node in _nodes(ast.parse(text))]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not Python") from error


def call_elements(tool: Tool) -> CallGrammar:
    """For grammars: a call with its arguments in the schema's order. Values are JSON."""
    arguments = arguments_of(tool)
    members = properties_of(arguments)
    if not has_fixed_arguments(arguments) or not all(name.isidentifier() for name, _, _ in members):
        return (f"{tool.name}(", FreeText(")"))
    items = (((f"{name}=", with_definitions(member, arguments)), needed) for name, member, needed in members)
    return (f"{tool.name}(", Separated(tuple(items), ", "), ")")


def call_line(tool: Tool) -> CallGrammar:
    """For grammars: a call, and the end of its line, which the last call may leave out."""
    return (*call_elements(tool), NEWLINE)


def _nodes(tree: ast.Module) -> list[ast.expr]:
    nodes: list[ast.expr] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not a call")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List) else [value]
    if not nodes:
        raise ValueError("no call")
    return nodes


def _call(node: ast.expr, source: str) -> ParsedCall:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]  # models often wrap a fenced call in print()
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a plain argument")
        arguments[keyword.arg] = _value(keyword.value, source)
    return call_with(ast.unparse(node.func), arguments)


def _value(node: ast.expr, source: str) -> object:
    """The value of an argument: JSON if it can be read as JSON, else a Python literal."""
    try:
        return loads(ast.get_source_segment(source, node) or "")
    except ValueError:
        return _literal(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names for constants, which models mix into Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names: dict[str, bool | None] = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _literal(node: ast.expr) -> object:
    try:
        value = ast.literal_eval(node)
    except (TypeError, ArithmeticError) as error:
        raise ValueError("not a literal") from error
    if not isinstance(value, (str, int, float, bool, list, dict, type(None))):
        raise ValueError("not a JSON value")
    return value
