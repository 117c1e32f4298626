"""The tools of a request, and which of them the model may or must call: what several endpoints share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field

from outrider.api.errors import invalid
from outrider.api.limits import Name
from outrider.api.request_fields import NOT_NULL
from outrider.chat.conversation import NamedTool, Tool, ToolChoice

log = logging.getLogger(__name__)

ToolName = Annotated[Name, Field(json_schema_extra={"minLength": 1})]


class TypedTool(Protocol):
    @property
    def type(self) -> str | None: ...


AnyTool = TypeVar("AnyTool", bound=TypedTool)


def callable_tools(tools: Sequence[AnyTool] | None, *types: str | None) -> list[tuple[int, AnyTool]]:
    """(index, tool) of the tools of these types, which the client runs. Tools of other types are left out.

    Agents send tools of their provider, such as web_search, whether or not the model may use them.
    """
    numbered = list(enumerate(tools or ()))
    others = sorted({str(tool.type)[:40] for _, tool in numbered if tool.type not in types})
    if others:
        log.info("tools left out, which cannot be called here: %s", ", ".join(others[:20]))
    return [(i, tool) for i, tool in numbered if tool.type in types]


def tool_of(*types: str | None, require: str) -> dict[str, Any]:
    """JSON Schema of a tool that has one of these types and the required field, or any other type."""
    known = {"enum": list(types)}
    required = [require] if None in types else ["type", require]
    return {
        "anyOf": [
            {"properties": {"type": known, require: NOT_NULL}, "required": required},
            {"properties": {"type": {"not": known}}, "required": ["type"]},
        ]
    }


def tool_choice_of(tools: Sequence[Tool], choice: str | None) -> ToolChoice:
    """Of the words "none", "auto" and "required"; None is "auto"."""
    _check_tool_names(tools)
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "'required' needs at least one tool that can be called here")
        return "required"
    return "none" if choice == "none" else "auto"


def named_tool(tools: Sequence[Tool], name: str) -> NamedTool:
    _check_tool_names(tools)
    if name not in {tool.name for tool in tools}:
        raise invalid("tool_choice", f"names {name!r}, which is not among the tools that can be called here")
    return NamedTool(name)


def allowed_functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The functions in OpenAI's allowed_tools."""
    return [tool for tool in tools if tool.get("type", "function") == "function"]


def keep_allowed(tools: Sequence[Tool], names: Sequence[Any], mode: str) -> tuple[list[Tool], ToolChoice]:
    """OpenAI's allowed_tools: the prompt shows only the allowed tools."""
    known = {tool.name for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise invalid("tool_choice", f"allows {str(name)[:100]!r}, which is not among the tools")
    wanted = set(names)
    allowed = [tool for tool in tools if tool.name in wanted]
    return allowed, tool_choice_of(allowed, mode)


def _check_tool_names(tools: Sequence[Tool]) -> None:
    names = Counter(tool.name for tool in tools)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise invalid("tools", f"the name {twice[0]!r} is used twice: give each tool its own name")
    if "" in names:
        raise invalid("tools", "a tool has an empty name")
