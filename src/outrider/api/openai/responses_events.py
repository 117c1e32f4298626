"""Renders chat events as the events of OpenAI's responses API, and collects them in the whole response.

    response.created, response.in_progress
      output_item.added                                   for each item: reasoning, message, function_call
        content_part.added, text deltas, text done, content_part.done   or: arguments deltas, arguments done
      output_item.done
    response.completed | response.failed

A response that is cut off also ends with response.completed; its status is "incomplete". OpenAI's SDK
(get_final_response), Codex and others take a stream without this event for a broken one.

Must not know HTTP or the store of responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.api.answers import failure_of
from outrider.api.logprobs import TokenText, chat_logprobs
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenOrigins,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

Event = dict[str, Any]


class ResponseBuilder:
    """`response` is the whole answer, which the last event of a stream carries too.

    `on_success` gets the response when it ends without a failure. `tokens` is set before the first event.
    `namespaces`: (namespace, name) of the functions that have one, by the name that the model knows.
    """

    tokens: TokenText

    def __init__(
        self,
        response: dict[str, Any],
        with_logprobs: bool,
        new_id: Callable[[str], str],
        now_s: Callable[[], float],
        on_success: Callable[[dict[str, Any]], None],
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self.response = response
        self.with_logprobs = with_logprobs
        self._new_id = new_id
        self._now_s = now_s
        self._on_success = on_success
        self._namespaces = namespaces
        self._num_events = 0
        self._open: _Item | None = None
        self._logprobs: list[dict[str, Any]] = []  # they wait for the event of their text

    def start(self) -> list[Event]:
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def feed(self, event: ChatEvent) -> list[Event]:
        match event:
            case TextDelta(text):
                return [*self._enter("message"), *self._grow(text)]
            case ReasoningDelta(text):
                return [*self._enter("reasoning"), *self._grow(text)]
            case ToolCallStarted(_, call_id, name):
                namespace, name = self._namespaces.get(name, (None, name))
                item = _CallItem(self._new_id("fc_"), call_id, name, namespace)
                return [*self._leave("completed"), *self._begin(item)]
            case ToolCallArguments(_, fragment):
                return self._grow(fragment)
            case ToolCallEnded(_, arguments):
                return self._end_call(arguments)
            case Logprobs(tokens):
                self._logprobs += chat_logprobs(tokens, self.tokens) if self.with_logprobs else []
                return []
            case TokenOrigins() | PromptProgress() | PromptLogprobs():  # of chat completions and completions
                return []
            case Finished():
                return self._finish(event)

    # -- items -------------------------------------------------------------------------------------------

    def _enter(self, kind: str) -> list[Event]:
        """Start an item of this kind, unless the current item has the same kind."""
        if self._open is not None and self._open.kind == kind:
            return []
        ended = self._leave("completed")
        item = _TextItem(self._new_id("msg_")) if kind == "message" else _ReasoningItem(self._new_id("rs_"))
        return [*ended, *self._begin(item)]

    def _begin(self, item: _Item) -> list[Event]:
        self._open = item
        self.response["output"].append(item.render("in_progress", empty=True))
        events = [self._event("response.output_item.added", item=item.render("in_progress", empty=True))]
        if item.part_kind is not None:
            events.append(self._part_event("response.content_part.added", item, part=item.part(empty=True)))
        return events

    def _grow(self, text: str) -> list[Event]:
        item = self._open
        assert item is not None, "text without an item"
        item.text += text
        fields: dict[str, Any] = {"delta": text}
        if item.kind == "message":
            fields["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += fields["logprobs"]
        return [self._part_event(item.delta_type, item, **fields)]

    def _end_call(self, arguments: str) -> list[Event]:
        if self._open is not None and self._open.kind == "function_call":
            self._open.text = arguments
        return self._leave("completed")

    def _leave(self, status: str) -> list[Event]:
        """End the current item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        events = [self._part_event(item.done_type, item, **item.done())]
        if item.part_kind is not None:
            events.append(self._part_event("response.content_part.done", item, part=item.part()))
        self.response["output"][-1] = item.render(status)
        return [*events, self._event("response.output_item.done", item=item.render(status))]

    # -- the end -----------------------------------------------------------------------------------------

    def _finish(self, finished: Finished) -> list[Event]:
        error = failure_of(finished)
        is_cut = finished.reason == "length"
        if self._open is not None and self._open.kind == "message" and self._logprobs:
            self._open.logprobs += self._logprobs
        events = self._leave("incomplete" if is_cut or error else "completed")
        self.response["usage"] = _usage(finished.usage)
        if error is not None:
            return [*events, *self.fail("server_error", error.detail)]
        if is_cut:
            self.response["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["status"] = "completed"
            self.response["completed_at"] = int(self._now_s())
        self._on_success(self.response)
        return [*events, self._lifecycle("response.completed")]

    def fail(self, code: str, message: str) -> list[Event]:
        """End the response with an error."""
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [self._lifecycle("response.failed")]

    # -- events ------------------------------------------------------------------------------------------

    def _lifecycle(self, kind: str) -> Event:
        response = self.response | {"output": list(self.response["output"])}
        return self._numbered({"type": kind, "response": response})

    def _event(self, kind: str, **fields: Any) -> Event:
        return self._numbered({"type": kind, "output_index": len(self.response["output"]) - 1, **fields})

    def _part_event(self, kind: str, item: _Item, **fields: Any) -> Event:
        place: dict[str, Any] = {"item_id": item.id}
        if item.part_kind is not None:
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event


class _Item:
    """One entry of `output`. There is a subclass for each of the three kinds."""

    kind: str
    delta_type: str
    done_type: str
    part_kind: str | None = None  # the type of its single content part; None: the item has no parts

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []

    def part(self, empty: bool = False) -> dict[str, Any]:
        return {"type": self.part_kind, "text": "" if empty else self.text}

    def done(self) -> dict[str, Any]:
        return {"text": self.text}

    def render(self, status: str, empty: bool = False) -> dict[str, Any]:
        raise NotImplementedError


class _TextItem(_Item):
    kind = "message"
    delta_type = "response.output_text.delta"
    done_type = "response.output_text.done"
    part_kind = "output_text"

    def part(self, empty: bool = False) -> dict[str, Any]:
        logprobs = [] if empty else self.logprobs
        return super().part(empty) | {"annotations": [], "logprobs": logprobs}

    def done(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": self.logprobs}

    def render(self, status: str, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class _ReasoningItem(_Item):
    kind = "reasoning"
    delta_type = "response.reasoning_text.delta"
    done_type = "response.reasoning_text.done"
    part_kind = "reasoning_text"

    def render(self, status: str, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self.part()]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class _CallItem(_Item):
    kind = "function_call"
    delta_type = "response.function_call_arguments.delta"
    done_type = "response.function_call_arguments.done"

    def __init__(self, item_id: str, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._name = name
        self._namespace = {} if namespace is None else {"namespace": namespace}

    def done(self) -> dict[str, Any]:
        return {"name": self._name, "arguments": self.text}

    def render(self, status: str, empty: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "arguments": "" if empty else self.text,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    details = {"cached_tokens": usage.num_cached, "cache_write_tokens": usage.num_stored}
    if usage.num_skipped:
        details["skipped_tokens"] = usage.num_skipped
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": details,
        "output_tokens": usage.num_generated,
        "output_tokens_details": {
            "reasoning_tokens": usage.num_reasoning,
            "accepted_prediction_tokens": usage.num_accepted,
            "rejected_prediction_tokens": usage.num_rejected,
        },
        "total_tokens": usage.num_prompt + usage.num_generated,
    }
