"""What the real programs have sent is answered turn by turn, most of it from the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import recorded
from script import LOST, Call, Scene, Turn
from workplace import AgentServer, refused

from patience import PATIENCE_S

# Of the prompt tokens of all turns but the first, at least so many are cached; 0.9 where nothing is said.
LEAST_HITS = {
    "aider": 0.45,  # the conversation comes before the files, which change
    "claude_code": 0.98,
    "claude_code_compaction": 0.75,  # the summary replaces the conversation
    "claude_code_sub_agent": 0.6,  # the sub-agent has a prompt of its own
    "codex": 0.98,
    "codex_compaction": 0.6,  # asks for the summary without tools: the prompt begins differently
    "opencode": 0.7,  # asks for a title first, with a prompt of its own
    "opencode_sub_agent": 0.6,
    "ollama_javascript": 0.0,  # Ollama's API does not say what was cached
    "ollama_python": 0.0,
}


def events_of(answer: str) -> list[dict[str, Any]]:
    """Of a stream; a whole answer is one event."""
    lines = [line.removeprefix("data:").strip() for line in answer.splitlines() if line.startswith("data:")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    return events or [json.loads(line) for line in answer.split("\n") if line]  # Ollama's are lines


def output_messages(answer: str) -> list[dict[str, Any]]:
    """What the assistant said, of a stream of responses."""
    done = [event["item"] for event in events_of(answer) if event.get("type") == "response.output_item.done"]
    return [item for item in done if item["type"] == "message"]


def usage_of(answer: str) -> tuple[int, int]:
    """(tokens of the prompt, those that were cached), of a stream or a whole answer in any of the APIs."""
    prompt = cached = 0
    for event in events_of(answer):
        prompt = event.get("prompt_eval_count", prompt)  # Ollama's; it does not say how many were cached
        holders = [event, event.get("message"), event.get("response")]
        for usage in [each["usage"] for each in holders if each and each.get("usage")]:
            if "cache_read_input_tokens" in usage:  # Anthropic's counts add up
                cached = usage["cache_read_input_tokens"]
                prompt = cached + usage["cache_creation_input_tokens"] + usage["input_tokens"]
            else:
                prompt = usage.get("prompt_tokens") or usage.get("input_tokens") or prompt
                details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
                cached = details.get("cached_tokens", cached)
    return prompt, cached


def replay(server: AgentServer, recording: recorded.Recording) -> list[tuple[int, int]]:
    server.play(*recording.scenes)
    found, said = [], []  # said: ids of messages
    for request in recording.requests:
        body: dict[str, Any] = request["body"] | {"model": server.process.model}
        if body.get("stream") and "stream_options" not in body and "chat/completions" in request["path"]:
            body["stream_options"] = {"include_usage": True}
        references = [item for item in body.get("input", ()) if item.get("type") == "item_reference"]
        for item, item_id in zip(references, said, strict=False):
            item["id"] = item_id  # of this replay, not of the recording
        answer = httpx.post(
            server.url + request["path"], json=body, headers=request["headers"], timeout=PATIENCE_S
        )
        assert answer.status_code == 200, (request["path"], answer.text)
        if not request["path"].endswith("/count_tokens"):
            found.append(usage_of(answer.text))
        said += [item["id"] for item in output_messages(answer.text)]
    assert refused(server.records()) == []
    assert server.off_script() == ""
    return found


@pytest.mark.parametrize("name", recorded.names())
def test_every_turn_is_answered_and_begins_with_what_is_cached(name: str, agent_server: AgentServer) -> None:
    httpx.delete(f"{agent_server.url}/v1/cache", timeout=PATIENCE_S).raise_for_status()
    counts = replay(agent_server, recorded.load(name))
    assert all(prompt for prompt, _ in counts)
    later = counts[1:]
    hit_rate = sum(cached for _, cached in later) / max(1, sum(prompt for prompt, _ in later))
    assert hit_rate >= LEAST_HITS.get(name, 0.9), counts


# -- the scripted model itself ---------------------------------------------------------------------------

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def ask(server: AgentServer, messages: list[dict[str, Any]], **fields: Any) -> Any:
    answer = server.process.post("/v1/chat/completions", {"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def test_the_script_is_played_turn_by_turn(agent_server: AgentServer) -> None:
    call = Call("read", {"path": "ä 😀.txt"})
    agent_server.play(Scene(["Knock"], [Turn("Who is there?", [call], thought="Hm."), Turn("Come in.")]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Knock"}]
    first = ask(agent_server, messages, tools=[READ])
    (made,) = first["tool_calls"]
    assert (first["reasoning_content"].strip(), first["content"].strip()) == ("Hm.", "Who is there?")
    assert json.loads(made["function"]["arguments"]) == call.arguments
    messages += [first, {"role": "tool", "tool_call_id": made["id"], "content": "..."}]
    assert ask(agent_server, messages, tools=[READ])["content"] == "Come in."
    assert ask(agent_server, [{"role": "user", "content": "Else"}])["content"] == LOST


def test_a_script_that_breaks_a_grammar_is_reported(agent_server: AgentServer) -> None:
    """The answer obeys the grammar all the same."""
    agent_server.play(Scene(["Knock"], [Turn("", [Call("write", {"path": "x"})])]))
    fields = {"tools": [READ], "tool_choice": "required", "max_tokens": 60}
    ask(agent_server, [{"role": "user", "content": "Knock"}], **fields)
    assert "the grammar forbids what follows" in agent_server.off_script()
    agent_server.forget_off_script()
    agent_server.play(Scene(["Knock"], [Turn("", [Call("read", {"path": "x"})])]))
    (made,) = ask(agent_server, [{"role": "user", "content": "Knock"}], **fields)["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"path": "x"}
    assert agent_server.off_script() == ""


def test_a_recording_has_neither_prose_nor_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    prose, other = (
        "This is what a company wrote about its tool.",
        "A second line, which is long as well, only new.",
    )
    call = {"id": "call_0123456789abcdef0123", "arguments": '{"path": "/work/of/ann/x"}'}
    turns = [
        [{"role": "user", "content": f"{prose}\nin /work/of/ann\nDo it"}],
        [
            {"role": "user", "content": f"{prose}\nin /work/of/ann\nDo it"},
            {"role": "assistant", "call": call},
        ],
        [{"role": "user", "content": f"{prose}\nin /work/of/ann\nDo it\n{other}"}],
    ]
    requests = [{"path": "/v1/x", "headers": {}, "body": {"messages": turn}} for turn in turns]
    recorded.save("some", recorded.Recording([], requests), {"/work/of/ann": "/home/me"}, ["Do it"])
    text = (tmp_path / "some.json").read_text()
    assert not any(word in text for word in ("company", "ann", "0123456789abcdef"))
    first, second, third = (request["body"]["messages"] for request in recorded.load("some").requests)
    assert second[:1] == first
    assert third[0]["content"].startswith(first[0]["content"] + "\n")
    assert len(third[0]["content"]) == len(turns[2][0]["content"]) - len("/work/of/ann") + len("/home/me")
    assert second[1]["call"]["arguments"] == '{"path": "/home/me/x"}'
