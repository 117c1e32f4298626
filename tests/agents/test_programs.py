"""The real coding agents, headless, against a real server with a scripted model: `make test-agents`.

Each reads a file, edits it, runs it and answers, in its own wire format. No request may be refused, and no
grammar may forbid what the script says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import recorded
from script import Call, Scene, Turn
from workplace import INSTALLED, AgentServer, Workplace, refused, skip_as_missing

HERE = Path(__file__).parent
DONE = "All done: it says hello now."
TASK = "Please mend the greeting"
MORE = "Please greet me"


def loop(task: str, *calls: Call) -> Scene:
    """One call a turn, then the answer."""
    return Scene([task], [*(Turn("I go on.", [call]) for call in calls), Turn(DONE)])


def check(
    name: str | None, server: AgentServer, workplace: Workplace, path: str, num_requests: int
) -> list[dict[str, Any]]:
    """Every request was answered, and no grammar left the script. RECORD_AGENTS=1 makes fixtures."""
    records = server.records()
    assert refused(records) == []
    assert server.off_script() == ""
    assert len([record for record in records if record["path"] == path]) >= num_requests
    if name is not None and os.environ.get("RECORD_AGENTS"):
        recording = recorded.Recording(server.scenes, [recorded.trimmed(record) for record in records])
        folders = {str(workplace.folder): "/home/me/greeter", str(workplace.home): "/home/me"}
        recorded.save(name, recording, folders | {sys.executable: "python3"}, [TASK, DONE, "/home/me"])
    return records


CLAUDE = (
    "-p",
    TASK,
    "--permission-mode",
    "acceptEdits",
    "--allowedTools",
    "Bash Edit Read Agent CronList ToolSearch",
)
OPENCODE = {  # nothing is fetched
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
CODEX = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json", TASK)
AIDER = (
    "--yes-always",
    "--no-check-update",
    "--no-analytics",
    "--no-git",
    "--no-pretty",
    "--no-fancy-input",
)


def test_claude_code_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    file = str(workplace.file)
    agent_server.play(
        loop(
            TASK,
            Call("Read", {"file_path": file}),
            Call("Edit", {"file_path": file, "old_string": "helo", "new_string": "hello"}),
            Call("Bash", {"command": f"{sys.executable} {file} > said", "description": "Runs it"}),
        )
    )
    ended = workplace.launch("claude", agent_server, *CLAUDE)
    assert (ended.status, ended.output.strip()) == (0, DONE), ended.errors
    assert (workplace.folder / "said").read_text() == "hello\n"
    records = check("claude_code", agent_server, workplace, "/v1/messages", 4)
    assert "context window" not in ended.errors  # the model's context was told
    assert not any("billing-header" in json.dumps(record["body"]["system"]) for record in records)


def test_claude_code_loads_a_deferred_tool(agent_server: AgentServer, workplace: Workplace) -> None:
    search = Call("ToolSearch", {"query": "select:CronList", "max_results": 5})
    agent_server.play(loop(TASK, search, Call("CronList", {})))
    ended = workplace.launch("claude", agent_server, *CLAUDE)
    assert ended.output.strip() == DONE, ended.errors
    last = check("claude_code_deferred", agent_server, workplace, "/v1/messages", 3)[-1]["body"]
    assert "tool_reference" in json.dumps(last["messages"])
    assert "No scheduled jobs" in json.dumps(last["messages"])


def test_claude_code_calls_two_tools_at_once(agent_server: AgentServer, workplace: Workplace) -> None:
    read = Call("Read", {"file_path": str(workplace.file)})
    both = [read, Call("Bash", {"command": "echo two", "description": "Says two"})]
    agent_server.play(Scene([TASK], [Turn("Both.", both), Turn(DONE)]))
    ended = workplace.launch("claude", agent_server, *CLAUDE)
    assert ended.output.strip() == DONE, ended.errors
    results = check(None, agent_server, workplace, "/v1/messages", 2)[-1]["body"]["messages"][-1]["content"]
    assert [block["type"] for block in results][:2] == ["tool_result", "tool_result"]


def test_codex_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    file = workplace.file
    commands = (f"cat {file}", f"sed -i s/helo/hello/ {file}", f"{sys.executable} {file} > said")
    agent_server.play(loop(TASK, *(Call("exec_command", {"cmd": command}) for command in commands)))
    ended = workplace.launch("codex", agent_server, *CODEX)
    assert ended.status == 0, ended.errors
    events = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert said[-1] == DONE
    assert (workplace.folder / "said").read_text() == "hello\n"
    check("codex", agent_server, workplace, "/v1/responses", 4)


def test_opencode_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    file = str(workplace.file)
    agent_server.play(
        Scene(["Generate a title"], [Turn("Greeting")]),
        loop(
            TASK,
            Call("read", {"filePath": file}),
            Call("edit", {"filePath": file, "oldString": "helo", "newString": "hello"}),
            Call("bash", {"command": f"{sys.executable} {file} > said"}),
        ),
    )
    ended = workplace.launch("opencode", agent_server, "run", TASK, **OPENCODE)
    assert ended.status == 0, ended.errors
    assert DONE in ended.output
    assert (workplace.folder / "said").read_text() == "hello\n"
    check("opencode", agent_server, workplace, "/v1/chat/completions", 4)


def test_aider_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    """Once, and once more in the same chat."""
    whole = "I mend it.\n\ngreet.py\n```\n{}\n```\n"
    scenes = [(MORE, 'print("hello, you")'), (TASK, 'print("hello")')]
    agent_server.play(*(Scene([task], [Turn(whole.format(line))]) for task, line in scenes))
    ended = workplace.launch("aider", agent_server, *AIDER, "greet.py", typed=f"{TASK}\n{MORE}\n")
    assert ended.status == 0, ended.output + ended.errors
    assert workplace.file.read_text() == 'print("hello, you")\n'
    assert "Unknown context window" not in ended.output
    check("aider", agent_server, workplace, "/v1/chat/completions", 2)


LLM_TOOLS = """
def read_file(path: str) -> str:
    "Reads a file"
    return open(path).read()

def edit_file(path: str, old: str, new: str) -> str:
    "Replaces a text in a file"
    text = open(path).read()
    open(path, "w").write(text.replace(old, new))
    return "replaced"
"""


def test_llm_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    file = str(workplace.file)
    edit = Call("edit_file", {"path": file, "old": "helo", "new": "hello"})
    agent_server.play(loop(TASK, Call("read_file", {"path": file}), edit))
    (workplace.folder / "tools.py").write_text(LLM_TOOLS)
    ended = workplace.launch("llm", agent_server, TASK, "--functions", "tools.py")
    assert ended.status == 0, ended.errors
    assert DONE in ended.output
    assert workplace.file.read_text() == 'print("hello")\n'
    check("llm", agent_server, workplace, "/v1/chat/completions", 3)


# -- sub-agents and compaction -------------------------------------------------------------------------------

LOOK = "Look at the greeting in greet.py"  # the task of a sub-agent
SEEN = "It says helo."


def test_claude_code_asks_a_sub_agent(agent_server: AgentServer, workplace: Workplace) -> None:
    task = {"description": "Looks", "prompt": LOOK, "subagent_type": "general-purpose"}
    agent_server.play(
        loop(TASK, Call("Agent", task | {"run_in_background": False})),
        Scene([LOOK], [Turn("", [Call("Read", {"file_path": str(workplace.file)})]), Turn(SEEN)]),
    )
    ended = workplace.launch("claude", agent_server, *CLAUDE)
    assert ended.output.strip() == DONE, ended.errors
    records = check("claude_code_sub_agent", agent_server, workplace, "/v1/messages", 4)
    assert SEEN in json.dumps(records[-1]["body"]["messages"])


def test_opencode_asks_a_sub_agent(agent_server: AgentServer, workplace: Workplace) -> None:
    task = {"description": "Looks", "prompt": LOOK, "subagent_type": "general"}
    agent_server.play(
        Scene(["Generate a title"], [Turn("Greeting")]),
        loop(TASK, Call("task", task)),
        Scene([LOOK], [Turn("", [Call("read", {"filePath": str(workplace.file)})]), Turn(SEEN)]),
    )
    ended = workplace.launch("opencode", agent_server, "run", TASK, **OPENCODE)
    assert DONE in ended.output, ended.errors
    records = check("opencode_sub_agent", agent_server, workplace, "/v1/chat/completions", 4)
    assert SEEN in json.dumps(records[-1]["body"]["messages"])


SUMMARY = "We have read a long file twice and nothing is left to do."


def growing(workplace: Workplace, tool: str, argument: str, **others: str) -> Scene:
    """Reads a long file again and again: the context is full before the answer comes."""
    file = workplace.folder / "long.txt"
    file.write_text("\n".join(f"{i}: " + "all that can be read " * 12 for i in range(50)))
    calls = [Call(tool, {argument: f"cat {file}; echo {i}", **others}) for i in range(8)]
    return Scene([TASK], [*(Turn("I go on.", [call]) for call in calls), Turn("It was never compacted.")])


def compacting(request: str, grows: Scene) -> list[Scene]:
    """`request`: words in which the program asks for a summary."""
    return [Scene([request], [Turn(SUMMARY)]), Scene([SUMMARY], [Turn(DONE)]), grows]


def test_claude_code_compacts_in_time(small_server: AgentServer, workplace: Workplace) -> None:
    grows = growing(workplace, "Bash", "command", description="Shows it")
    small_server.play(*compacting("detailed summary of", grows))
    ended = workplace.launch("claude", small_server, *CLAUDE)
    assert ended.output.strip() == DONE, ended.errors
    check("claude_code_compaction", small_server, workplace, "/v1/messages", 3)


def test_codex_compacts_in_time(small_server: AgentServer, workplace: Workplace) -> None:
    grows = growing(workplace, "exec_command", "cmd")
    small_server.play(*compacting("CONTEXT CHECKPOINT COMPACTION", grows))
    ended = workplace.launch("codex", small_server, *CODEX)
    assert ended.status == 0, ended.errors
    assert DONE in ended.output
    check("codex_compaction", small_server, workplace, "/v1/responses", 4)


# -- libraries: a program of ours calls them with two tools and prints what the model says in the end --------


def library_program(
    name: str, server: AgentServer, workplace: Workplace, command: Sequence[str], path: str
) -> None:
    file = str(workplace.file)
    edit = Call("edit_file", {"path": file, "old": "helo", "new": "hello"})
    server.play(loop(TASK, Call("read_file", {"path": file}), edit))
    ended = workplace.run(*command, server.url, server.process.model, TASK)
    assert ended.status == 0, ended.errors
    assert ended.output.strip().endswith(DONE)
    assert workplace.file.read_text() == 'print("hello")\n'
    check(name, server, workplace, path, 3)


@pytest.mark.parametrize(("api", "path"), [("openai", "/v1/chat/completions"), ("anthropic", "/v1/messages")])
def test_langchain_mends_a_file(api: str, path: str, agent_server: AgentServer, workplace: Workplace) -> None:
    if not Path(f"{INSTALLED}/python.installed").exists():
        skip_as_missing("LangChain")
    python = Path(f"{INSTALLED}/python/bin/python")
    command = [os.path.abspath(python), str(HERE / "clients" / "langchain_agent.py"), api]
    library_program(f"langchain_{api}", agent_server, workplace, command, path)


def python_client(name: str) -> list[str]:
    if not Path(f"{INSTALLED}/python.installed").exists():
        skip_as_missing("Ollama's Python client")
    return [os.path.abspath(f"{INSTALLED}/python/bin/python"), str(HERE / "clients" / name)]


def test_ollamas_python_client_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    command = python_client("ollama_agent.py")
    library_program("ollama_python", agent_server, workplace, command, "/api/chat")


def test_ollamas_javascript_client_mends_a_file(agent_server: AgentServer, workplace: Workplace) -> None:
    folder = Path(f"{INSTALLED}/npm")
    if not (folder / "node_modules" / "ollama").exists():
        skip_as_missing("Ollama's JavaScript client")
    program = folder / "ollama_agent.mjs"  # beside node_modules, which it imports
    program.write_text((HERE / "clients" / "ollama_agent.mjs").read_text())
    command = ["node", os.path.abspath(program)]
    library_program("ollama_javascript", agent_server, workplace, command, "/api/chat")


def test_ollamas_python_client_reads_every_answer(agent_server: AgentServer, workplace: Workplace) -> None:
    agent_server.play(Scene([TASK], [Turn(DONE, thought="Hm.")]))
    model = agent_server.process.model
    ended = workplace.run(*python_client("ollama_calls.py"), agent_server.url, model, TASK)
    assert ended.status == 0, ended.errors
    found = json.loads(ended.output)
    text, thinking, reason = found.pop("chat")
    assert (text.strip(), thinking.strip(), reason) == (DONE, "Hm.", "stop")
    (status, message), (streamed_status, streamed_message) = (
        found.pop("no model"),
        found.pop("no model, streamed"),
    )
    assert status == streamed_status == 404
    assert message == streamed_message
    assert message.startswith("model 'none' not found")
    assert [found.pop(name)[0] for name in ("bad option", "embed", "delete")] == [400, 404, 403]
    thinking, reason, num_tokens = found.pop("generate")
    assert (thinking in "\nHm.\n", reason, num_tokens) == (True, "length", 3)
    (loaded,) = found.pop("ps")
    assert loaded[0] == f"{model}:latest"
    assert loaded[1] > 1000
    capabilities, family, same = found.pop("show")
    assert capabilities == ["completion", "tools", "thinking"]
    assert family == same
    assert found == {
        "list": [f"{model}:latest"],
        "logprobs": True,
        "figures": [True, True],
        "raw": 2,
        "load": "load",
        "pull": ["success"],
    }


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("compatible", "/v1/chat/completions"),
        ("openai", "/v1/responses"),
        ("anthropic", "/v1/messages"),
    ],
)
def test_vercels_ai_mends_a_file(
    api: str, path: str, agent_server: AgentServer, workplace: Workplace
) -> None:
    folder = Path(f"{INSTALLED}/npm")
    if not (folder / "node_modules" / "ai").exists():
        skip_as_missing("Vercel's ai")
    program = folder / f"vercel_{api}.mjs"  # beside node_modules, which it imports; tests run side by side
    program.write_text((HERE / "clients" / "vercel_agent.mjs").read_text())
    command = ["node", os.path.abspath(program), api]
    library_program(f"vercel_{api}", agent_server, workplace, command, path)
