"""Tools of POST /v1/responses: their JSON fields, and the names under which the model knows them.

A namespace is a group of functions that the client runs: Codex sends those of its sub-agents and MCP servers
so. The model reads one flat list of tools, in which a function of a namespace has a joined name. The client
gets the two names of a call apart, as it sent them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from outrider.api.errors import invalid, refused
from outrider.api.limits import TOOLS, AtMost, JsonObject, Name, Word
from outrider.api.request_fields import RequestModel, documented, one_of_types
from outrider.api.tool_fields import (
    allowed_functions,
    callable_tools,
    keep_allowed,
    named_tool,
    tool_choice_of,
    tool_of,
)
from outrider.chat.conversation import Tool, ToolChoice


class FunctionTool(RequestModel):
    model_config = ConfigDict(json_schema_extra=tool_of("function", require="name"))

    type: Word = Field(description="function; tools of other types are left out")
    name: Name | None = documented(minLength=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseTool(FunctionTool):
    model_config = ConfigDict(json_schema_extra=tool_of("function", "namespace", require="name"))

    type: Word = Field(description="function, or namespace; tools of other types are left out")
    tools: Annotated[list[FunctionTool], AtMost(TOOLS)] | None = Field(
        None, description="The functions of a namespace"
    )


class ResponseToolChoice(RequestModel):
    model_config = ConfigDict(json_schema_extra=one_of_types(function=["name"], allowed_tools=["tools"]))

    type: Word
    name: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[JsonObject], AtMost(TOOLS)] | None = None


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model: namespace mcp__files, function read -> mcp__files__read."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def tools_of(tools: Sequence[ResponseTool] | None) -> list[Tool]:
    """The functions as the model knows them. Raises ApiError."""
    found: list[Tool] = []
    for i, tool in callable_tools(tools, "function", "namespace"):
        where = f"tools[{i}]"
        name = _name(where, tool)
        found += [_tool(tool, name)] if tool.type == "function" else _namespace_tools(where, tool, name)
    if len(found) > TOOLS.most:
        raise invalid("tools", f"has {len(found):,} functions, of at most {TOOLS.most:,}")
    return found


def _namespace_tools(where: str, namespace: ResponseTool, name: str) -> Iterator[Tool]:
    about = f"{namespace.description}\n\n" if namespace.description else ""
    for i, function in callable_tools(namespace.tools, "function"):
        yield _tool(function, joined_name(name, _name(f"{where}.tools[{i}]", function)), about)
        about = ""  # the first function's description begins with the namespace's


def namespaces_of(tools: Sequence[ResponseTool] | None) -> dict[str, tuple[str, str]]:
    """(namespace, name) of each function that has a namespace, by its joined name."""
    spaces = [(tool.name or "", tool.tools or ()) for tool in tools or () if tool.type == "namespace"]
    names = [(space, function.name or "") for space, functions in spaces for function in functions]
    return {joined_name(*name): name for name in names}


def _name(where: str, tool: FunctionTool) -> str:
    if not tool.name:
        raise invalid(f"{where}.name", "is missing")
    return tool.name


def _tool(tool: FunctionTool, name: str, about: str = "") -> Tool:
    return Tool(name, about + (tool.description or ""), tool.parameters or {}, strict=tool.strict)


def choose(tools: list[Tool], choice: str | ResponseToolChoice | None) -> tuple[list[Tool], ToolChoice]:
    """The tools that the prompt shows, and the choice among them."""
    if isinstance(choice, ResponseToolChoice):
        if choice.type == "function" and choice.name is not None:
            return tools, named_tool(tools, choice.name)
        if choice.type == "allowed_tools" and choice.tools is not None:
            names = [tool.get("name") for tool in allowed_functions(choice.tools)]
            return keep_allowed(tools, names, choice.mode or "auto")
        raise refused("tool_choice", f"choices of type {choice.type!r} are not supported")
    return tools, tool_choice_of(tools, choice)
