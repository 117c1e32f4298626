"""Owns the registry of the tools that `outrider launch` can start.

To add a tool: a module like its neighbours, a line here, its requests in tests/agents.
"""

from __future__ import annotations

from outrider.cli.launch import aider, claude, codex, llm, opencode
from outrider.cli.launch.tool import Tool

TOOLS: dict[str, Tool] = {
    "claude": claude.TOOL,
    "codex": codex.TOOL,
    "opencode": opencode.TOOL,
    "aider": aider.TOOL,
    "llm": llm.TOOL,
}
