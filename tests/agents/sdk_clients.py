"""The official SDKs as one client: the same conversation and tools in each of the three APIs.

A conversation is a list of ("user", text), ("call", name, arguments) and ("result", text). A result is one of
the call before it, or of no call at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anthropic
import openai
from workplace import AgentServer

from patience import PATIENCE_S

MAX_TOKENS = 20_000
CALL_ID = "call_1"
Item = tuple[Any, ...]


@dataclass(frozen=True)
class Tool:
    name: str
    schema: dict[str, Any]
    strict: bool | None = None

    def described(self, schema_field: str) -> dict[str, Any]:
        found = {"name": self.name, "description": "A tool.", schema_field: self.schema}
        return found if self.strict is None else found | {"strict": self.strict}


@dataclass(frozen=True)
class Answer:
    text: str
    calls: Sequence[tuple[str, dict[str, Any]]]
    reasoning: str
    num_prompt: int


class Refused(Exception):
    """The server refused the request: the message and the type that the SDK found."""

    def __init__(self, message: str, kind: str | None) -> None:
        super().__init__(message)
        self.kind = kind


class Api(Protocol):
    def __init__(self, server: AgentServer) -> None: ...

    def ask(
        self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto", stream: bool = False
    ) -> Answer:
        """`choice`: auto, required, or the name of a tool. Raises Refused."""

    def count(self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto") -> int | None:
        """The tokens of the prompt; None if the API counts none."""


def openai_sdk(server: AgentServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


class Chat:
    def __init__(self, server: AgentServer) -> None:
        self._sdk = openai_sdk(server).chat.completions
        self._model = server.process.model

    def ask(
        self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto", stream: bool = False
    ) -> Answer:
        named = {"type": "function", "function": {"name": choice}}
        body: Any = {
            "model": self._model,
            "messages": [self._message(*item) for item in said],
            "max_tokens": MAX_TOKENS,
            "tools": [{"type": "function", "function": tool.described("parameters")} for tool in tools],
            "tool_choice": choice if choice in ("auto", "required") else named,
        }
        try:
            return self._streamed(body) if stream else self._whole(body)
        except openai.APIError as error:
            raise Refused(error.message, error.type) from error

    def count(self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto") -> int | None:
        return None

    def _message(self, kind: str, *given: Any) -> dict[str, Any]:
        if kind == "call":
            function = {"name": given[0], "arguments": json.dumps(given[1])}
            call = {"id": CALL_ID, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if kind == "result":
            return {"role": "tool", "tool_call_id": CALL_ID, "content": given[0]}
        return {"role": kind, "content": given[0]}

    def _whole(self, body: Any) -> Answer:
        answer = self._sdk.create(**body)
        message = answer.choices[0].message
        calls = [
            (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
        ]
        reasoning = getattr(message, "reasoning_content", None) or ""
        return Answer(message.content or "", calls, reasoning, answer.usage.prompt_tokens)

    def _streamed(self, body: Any) -> Answer:
        text = reasoning = ""
        calls: list[list[str]] = []  # [name, arguments]
        num_prompt = 0
        for chunk in self._sdk.create(**body, stream=True, stream_options={"include_usage": True}):
            num_prompt = chunk.usage.prompt_tokens if chunk.usage else num_prompt
            for delta in [choice.delta for choice in chunk.choices]:
                text += delta.content or ""
                reasoning += getattr(delta, "reasoning_content", None) or ""
                for call in delta.tool_calls or ():
                    calls += [["", ""]] if call.index == len(calls) else []
                    calls[call.index][0] += call.function.name or ""
                    calls[call.index][1] += call.function.arguments or ""
        return Answer(text, [(name, json.loads(given)) for name, given in calls], reasoning, num_prompt)


class Responses:
    def __init__(self, server: AgentServer) -> None:
        self._sdk = openai_sdk(server).responses
        self._model = server.process.model

    def ask(
        self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto", stream: bool = False
    ) -> Answer:
        body = self._body(said, tools, choice) | {"max_output_tokens": MAX_TOKENS}
        try:
            if stream:
                with self._sdk.stream(**body) as events:
                    answer = events.get_final_response()
            else:
                answer = self._sdk.create(**body)
        except openai.APIError as error:
            raise Refused(error.message, error.type) from error
        if answer.error is not None:  # the stream had begun
            raise Refused(answer.error.message, "invalid_request_error")
        calls = [
            (item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"
        ]
        thoughts = [item for item in answer.output if item.type == "reasoning"]
        reasoning = "".join(part.text for item in thoughts for part in item.content or ())
        return Answer(answer.output_text, calls, reasoning, answer.usage.input_tokens)

    def count(self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto") -> int | None:
        return int(self._sdk.input_tokens.count(**self._body(said, tools, choice)).input_tokens)

    def _body(self, said: Sequence[Item], tools: Sequence[Tool], choice: str) -> Any:
        return {
            "model": self._model,
            "input": [self._item(*item) for item in said],
            "tools": [{"type": "function", **tool.described("parameters")} for tool in tools],
            "tool_choice": (
                choice if choice in ("auto", "required") else {"type": "function", "name": choice}
            ),
        }

    def _item(self, kind: str, *given: Any) -> dict[str, Any]:
        if kind == "call":
            called = {"name": given[0], "arguments": json.dumps(given[1])}
            return {"type": "function_call", "call_id": CALL_ID, **called}
        if kind == "result":
            return {"type": "function_call_output", "call_id": CALL_ID, "output": given[0]}
        return {"role": kind, "content": given[0]}


class Messages:
    def __init__(self, server: AgentServer) -> None:
        self._sdk = anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
        ).messages
        self._model = server.process.model

    def ask(
        self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto", stream: bool = False
    ) -> Answer:
        body = self._body(said, tools, choice) | {"max_tokens": MAX_TOKENS}
        try:
            if stream:
                with self._sdk.stream(**body) as events:
                    answer = events.get_final_message()
            else:
                answer = self._sdk.create(**body)
        except anthropic.APIStatusError as error:
            raise Refused(str(error.body["error"]["message"]), error.body["error"]["type"]) from error
        usage = answer.usage
        num_prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
        return Answer(
            "".join(block.text for block in answer.content if block.type == "text"),
            [(block.name, block.input) for block in answer.content if block.type == "tool_use"],
            "".join(block.thinking for block in answer.content if block.type == "thinking"),
            num_prompt,
        )

    def count(self, said: Sequence[Item], tools: Sequence[Tool] = (), choice: str = "auto") -> int | None:
        return int(self._sdk.count_tokens(**self._body(said, tools, choice)).input_tokens)

    def _body(self, said: Sequence[Item], tools: Sequence[Tool], choice: str) -> Any:
        words = {"auto": {"type": "auto"}, "required": {"type": "any"}}
        return {
            "model": self._model,
            "messages": [self._message(*item) for item in said],
            "tools": [tool.described("input_schema") for tool in tools],
            "tool_choice": words.get(choice, {"type": "tool", "name": choice}),
            "thinking": {"type": "enabled", "budget_tokens": 5_000},
        }

    def _message(self, kind: str, *given: Any) -> dict[str, Any]:
        if kind == "call":
            call = {"type": "tool_use", "id": CALL_ID, "name": given[0], "input": given[1]}
            return {"role": "assistant", "content": [call]}
        if kind == "result":
            result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": given[0]}
            return {"role": "user", "content": [result]}
        return {"role": kind, "content": given[0]}


APIS: dict[str, type[Api]] = {"chat": Chat, "responses": Responses, "messages": Messages}
