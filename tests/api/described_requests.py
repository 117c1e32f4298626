"""Random requests of schemathesis, changed so that they keep to what JSON Schema cannot express."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, cast

from fake_backend import FACTS
from fake_embedder import DIMENSIONS
from fake_embedder import FACTS as POOLING_FACTS
from schemathesis import Case


def fields_of(case: Case) -> Collection[str]:
    """The fields of the request's body that the description has."""
    content = case.operation.definition.raw.get("requestBody", {}).get("content", {})
    name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    model = case.operation.schema.raw_schema["components"]["schemas"].get(name, {})
    return cast(Collection[str], model.get("properties", {}))


def consistent(body: Any, fields: Collection[str]) -> Any:
    """The body with relations between its fields that JSON Schema cannot express.

    `fields`: those of the description. Further ones may have any name and value, and stay as they are.
    """
    if not isinstance(body, dict):
        return body
    further = {name: value for name, value in body.items() if name not in fields}
    return further | _consistent({name: value for name, value in body.items() if name in fields})


def _consistent(body: dict[str, Any]) -> dict[str, Any]:
    body = _with_one_grammar(_with_known_tools(body))
    body.pop("previous_response_id", None)
    if isinstance(body.get("input"), list):  # no item is stored
        items = [item for item in body["input"] if not _is_reference(item)]
        body["input"] = items or "Hi"
    body.pop("timeout", None)  # a short one is a 504
    for name, most in (
        ("dimensions", DIMENSIONS),
        ("truncate_prompt_tokens", POOLING_FACTS.max_tokens),
    ):
        if body.get(name) is not None:
            body[name] = min(body[name], most)
    for name in ("tokens", "input"):
        if name in body:
            body[name] = _in_vocabulary(body[name])
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if body.get("stream_options") is not None or body.get("return_progress"):
        body["stream"] = True
    if "messages" in body and body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("echo"):
        body["truncate_prompt_tokens"] = None
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = None
    if body.get("min_tokens") is not None:
        body["min_tokens"] = min(body["min_tokens"], *_limits(body))
    return _as_ollama_takes_it(body)


def _limits(body: dict[str, Any]) -> list[int]:
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    if "max_tokens" not in body and "prompt" in body:
        limits.append(16)
    return [limit or 1 for limit in limits]


def _as_ollama_takes_it(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("options")
    if isinstance(options, dict) and options.get("repeat_last_n") not in (None, -1, 0):
        body["options"] = options | {"repeat_penalty": None}
    if body.get("raw"):
        body |= {"system": None, "images": None, "think": None}
    if not (body.get("messages") or body.get("prompt")):
        body.pop("keep_alive", None)  # 0 would unload the model
    return body


def _in_vocabulary(value: Any) -> Any:
    """Token ids, also in lists; other values as they are."""
    if isinstance(value, list):
        return [_in_vocabulary(item) for item in value]
    is_id = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value % FACTS.vocab_size if is_id else value


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _with_one_grammar(body: dict[str, Any]) -> dict[str, Any]:
    """Only the first field that constrains the answer is kept."""
    fields = ("response_format", "text", "output_config", "structured_outputs")
    fields += ("guided_json", "guided_regex", "guided_grammar", "guided_choice")
    given = [name for name in fields if body.get(name) is not None]
    for name in given[1:]:
        body[name] = None
    outputs = body.get("structured_outputs")
    if isinstance(outputs, dict):
        forms = [name for name, value in outputs.items() if value is not None]
        body["structured_outputs"] = {name: outputs[name] for name in forms[:1]}
    return body


def _with_known_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Every tool that can be called has a name of its own, and the choice names the first of them."""
    tools = copy.deepcopy(body.get("tools") or [])
    if None in tools:
        return body
    callable_ = [tool for tool in tools if _is_callable(tool)]
    for i, tool in enumerate(callable_):
        named = tool.get("function", tool)
        named["name"] = f"{named['name']}{i}"
    if "input" in body:
        _name_functions([tool for tool in tools if tool["type"] == "namespace"])
    if tools:
        body["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        body["tool_choice"] = None if not callable_ else _choice_of_first(choice, callable_[0])
    return body


def _name_functions(namespaces: Sequence[dict[str, Any]]) -> None:
    functions = [function for namespace in namespaces for function in namespace.get("tools") or ()]
    for i, function in enumerate(function for function in functions if function["type"] == "function"):
        function["name"] = f"{function['name']}_{i}"


def _is_callable(tool: dict[str, Any]) -> bool:
    """False for the tools that the server leaves out."""
    return tool.get("type") in ((None, "custom") if "input_schema" in tool else (None, "function"))


def _choice_of_first(choice: Any, tool: dict[str, Any]) -> Any:
    if choice == "required" or choice["type"] in ("auto", "any", "none"):
        return choice
    named = tool.get("function", tool)["name"]
    match choice["type"]:
        case "tool":
            return choice | {"name": named}
        case "function":
            return choice | {"name": named, "function": {"name": named}}
        case _:
            listed = {"mode": "auto", "tools": [{"name": named, "function": {"name": named}}]}
            return {"type": "allowed_tools", "allowed_tools": listed, **listed}
