"""The real coding agents with odd tools, as their users' MCP servers give them: `make test-agents`.

No request may be refused, and the agent must go on to the model's answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from script import Call, Scene, Turn
from test_programs import CODEX, DONE, OPENCODE, TASK, check, loop
from workplace import AgentServer, Ended, Workplace, scripted_server

MCP_SERVER = Path(__file__).parent / "clients" / "odd_tools.py"


def run_claude(server: AgentServer, workplace: Workplace, kind: str) -> Ended:
    servers = {"odd": {"command": sys.executable, "args": [str(MCP_SERVER), kind]}}
    config = json.dumps({"mcpServers": servers})
    arguments = ("-p", TASK, "--mcp-config", config, "--strict-mcp-config", "--allowedTools", "mcp__odd")
    return workplace.launch("claude", server, *arguments, ENABLE_TOOL_SEARCH="false")


def run_codex(server: AgentServer, workplace: Workplace, kind: str) -> Ended:
    command, arguments = json.dumps(sys.executable), json.dumps([str(MCP_SERVER), kind])  # TOML as well
    settings = ("-c", f"mcp_servers.odd.command={command}", "-c", f"mcp_servers.odd.args={arguments}")
    return workplace.launch("codex", server, CODEX[0], *settings, *CODEX[1:])


def run_opencode(server: AgentServer, workplace: Workplace, kind: str) -> Ended:
    odd = {"type": "local", "command": [sys.executable, str(MCP_SERVER), kind], "enabled": True}
    (workplace.folder / "opencode.json").write_text(json.dumps({"mcp": {"odd": odd}}))
    return workplace.launch("opencode", server, "run", TASK, **OPENCODE)


PROGRAMS: dict[str, tuple[Callable[[AgentServer, Workplace, str], Ended], str, str]] = {
    "claude": (run_claude, "mcp__odd__look", "/v1/messages"),
    "codex": (run_codex, "mcp__odd__look", "/v1/responses"),
    "opencode": (run_opencode, "odd_look", "/v1/chat/completions"),
}
TITLE = Scene(["Generate a title"], [Turn("Greeting")])  # OpenCode asks for one


@pytest.mark.parametrize("kind", ["bad_schema", "many", "twins"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_odd_tools_are_called(
    program: str, kind: str, agent_server: AgentServer, workplace: Workplace
) -> None:
    run, name, path = PROGRAMS[program]
    agent_server.play(TITLE, loop(TASK, Call(name, {"file": str(workplace.file)})))
    ended = run(agent_server, workplace, kind)
    assert ended.status == 0, ended.errors
    assert DONE in ended.output
    records = check(None, agent_server, workplace, path, 2)
    assert "helo" in json.dumps(records[-1]["body"])  # what the tool has read


@pytest.fixture(scope="module")
def free_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    """A server that lets the model write any call."""
    with scripted_server(tmp_path_factory.mktemp("free-server"), "--no-tool-grammar") as server:
        yield server


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_of_a_tool_that_does_not_exist_is_shown_as_text(
    program: str, free_server: AgentServer, workplace: Workplace
) -> None:
    run, _, path = PROGRAMS[program]
    free_server.play(TITLE, Scene([TASK], [Turn("I call.", [Call("Nobody", {})])]))
    ended = run(free_server, workplace, "bad_schema")
    assert ended.status == 0, ended.errors
    assert "Nobody" in ended.output
    check(None, free_server, workplace, path, 1)
