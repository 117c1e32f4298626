"""Ollama's API on a real server process with a real, tiny model: the same answers as OpenAI's; Open WebUI."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import PATIENCE_S, in_test_or_soak, wait_until
from server_process import CONTEXT, ServerProcess

OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**32), "num_predict": st.integers(1, 12)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.integers(1, 50),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "repeat_penalty": st.floats(0.8, 1.5),
        "presence_penalty": st.floats(-1.0, 1.0),
        "frequency_penalty": st.floats(-1.0, 1.0),
        "stop": st.lists(st.sampled_from(["e", " ", "th"]), min_size=1, max_size=2),
    },
)
OPENAI_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
FEW = settings(
    deadline=None,
    max_examples=in_test_or_soak(8, 200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text[:-1].split("\n")]


def openai_fields(options: dict[str, Any]) -> dict[str, Any]:
    return {OPENAI_NAMES.get(name, name): value for name, value in options.items()}


@pytest.mark.soak
@FEW
@given(
    text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20),
    options=OPTIONS,
)
def test_chat_equals_openais_chat(live: ServerProcess, text: str, options: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": text}]
    answer = live.post("/v1/chat/completions", {"messages": messages} | openai_fields(options)).json()
    (choice,), usage = answer["choices"], answer["usage"]
    request = {"model": live.model, "messages": messages, "options": options}
    parts = lines_of(live.post("/api/chat", request))
    whole = live.post("/api/chat", request | {"stream": False}).json()
    assert whole["message"]["content"] == choice["message"]["content"]
    assert "".join(part["message"]["content"] for part in parts) == choice["message"]["content"]
    for last in (parts[-1], whole):
        assert last["done_reason"] == choice["finish_reason"]
        assert (last["prompt_eval_count"], last["eval_count"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        times = [last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
        assert all(time >= 0 for time in times)
        assert 0 < sum(times) <= last["total_duration"]


@pytest.mark.soak
@FEW
@given(text=st.text(st.sampled_from("abc dé"), min_size=1, max_size=20), options=OPTIONS)
def test_a_raw_prompt_is_continued_as_by_openais_completions(
    live: ServerProcess, text: str, options: dict[str, Any]
) -> None:
    (choice,) = live.post("/v1/completions", {"prompt": text} | openai_fields(options)).json()["choices"]
    request = {"model": live.model, "prompt": text, "raw": True, "options": options}
    parts = lines_of(live.post("/api/generate", request))
    assert "".join(part["response"] for part in parts) == choice["text"]
    assert parts[-1]["done_reason"] == choice["finish_reason"]


def test_a_prompt_is_answered_as_a_chat(live: ServerProcess) -> None:
    options = {"seed": 5, "num_predict": 6}
    request = {"model": live.model, "stream": False, "options": options}
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    chat = live.post("/api/chat", request | {"messages": messages}).json()
    generated = live.post("/api/generate", request | {"prompt": "Hi", "system": "Be brief"}).json()
    assert generated["response"] == chat["message"]["content"]


def test_formats_are_enforced(live: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [True]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    request = {"model": live.model, "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    answer = live.post("/api/chat", request | {"format": schema}).json()
    assert json.loads(answer["message"]["content"]) == {"a": True}
    raw = {"model": live.model, "prompt": "Hi", "raw": True, "format": schema, "stream": False}
    assert json.loads(live.post("/api/generate", raw).json()["response"]) == {"a": True}
    bad = live.post("/api/chat", request | {"format": {"type": "nonsense"}})
    assert bad.status_code == 400
    assert isinstance(bad.json()["error"], str)


def test_a_prompt_that_does_not_fit_is_refused_with_figures(live: ServerProcess) -> None:
    request = {"model": live.model, "prompt": "x " * CONTEXT, "options": {"num_ctx": 10 * CONTEXT}}
    for truncate in (None, True):
        response = live.post("/api/generate", request | {"truncate": truncate})
        assert response.status_code == 400
        assert f"maximum context length is {CONTEXT} tokens" in response.json()["error"]


def test_images_are_refused_by_a_model_that_reads_text(live: ServerProcess) -> None:
    message = {"role": "user", "content": "Look", "images": ["aGk="]}
    response = live.post("/api/chat", {"model": live.model, "messages": [message]})
    assert response.status_code == 400
    assert "this model reads text only" in response.json()["error"]


def test_client_that_leaves_frees_its_row(live: ServerProcess) -> None:
    request = {"model": live.model, "prompt": "Hi", "options": {"num_predict": 4000, "stop": ["\x00"]}}
    with httpx.stream("POST", f"{live.url}/api/generate", json=request, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines))["done"] is False
    assert live.wait_until_idle()["live_tokens"] == 0


def test_what_is_known_of_a_real_model(live: ServerProcess) -> None:
    (model,) = live.get("/api/tags")["models"]
    assert model["name"] == f"{live.model}:latest"
    assert model["size"] > 1000
    assert len(model["digest"]) == 64
    assert model["details"]["family"] == "llama"
    shown = live.post("/api/show", {"model": model["name"]}).json()
    info = shown["model_info"]
    assert info["llama.context_length"] == CONTEXT
    assert info["llama.embedding_length"] > 0
    assert info["general.parameter_count"] > 1000
    assert "messages" in shown["template"]
    assert shown["capabilities"] == ["completion", "tools"]
    refused = live.post(
        "/api/chat", {"model": live.model, "messages": [{"role": "user", "content": "a"}], "think": True}
    )
    assert (refused.status_code, refused.json()) == (
        400,
        {"error": f'"{live.model}" does not support thinking'},
    )


def test_a_model_is_unloaded_and_loaded_again(live: ServerProcess) -> None:
    unloaded = live.post("/api/generate", {"model": live.model, "keep_alive": 0}).json()
    assert unloaded["done_reason"] == "unload"
    wait_until(lambda: not live.get("/api/ps")["models"])
    assert live.get("/api/tags")["models"][0]["details"]["family"] == "llama"
    loaded = live.post("/api/generate", {"model": live.model, "keep_alive": "10m"}).json()
    assert loaded["done_reason"] == "load"
    (model,) = live.get("/api/ps")["models"]
    left_s = datetime.fromisoformat(model["expires_at"]).timestamp() - time.time()
    assert 0 < left_s <= 600
    live.post("/api/generate", {"model": live.model, "keep_alive": -1}).raise_for_status()


# -- Open WebUI ------------------------------------------------------------------------------------------

HEADERS = {  # that its back end sends, with the forwarding of users turned on
    "content-type": "application/json",
    "authorization": "Bearer sk-anything",
    "x-openwebui-user-name": "Ann%20Smith",
    "x-openwebui-user-id": "8b1c9c5e-0000-4000-8000-000000000000",
    "x-openwebui-user-email": "ann@example.org",
    "x-openwebui-user-role": "admin",
    "accept": "*/*",
    "accept-encoding": "gzip, deflate, br",
    "user-agent": "Python/3.11 aiohttp/3.11.11",
}


class OpenWebUI:
    """The requests of Open WebUI to a connection of the kind Ollama, as its back end makes them."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, headers=HEADERS, timeout=PATIENCE_S)

    def verify(self) -> Any:
        return self._http.get("/api/version").raise_for_status().json()

    def models(self) -> dict[str, Any]:
        """By name, with the time at which they are unloaded."""
        listed = self._http.get("/api/tags").raise_for_status().json()["models"]
        loaded = self._http.get("/api/ps").raise_for_status().json()["models"]
        expires = {one["name"]: int(datetime.fromisoformat(one["expires_at"]).timestamp()) for one in loaded}
        return {one["model"]: one | {"expires_at": expires.get(one["name"])} for one in listed}

    def post(self, path: str, payload: dict[str, Any]) -> httpx.Response:
        name = payload["model"]
        payload = payload | {"model": name if ":" in name else f"{name}:latest"}
        return self._http.post(path, content=json.dumps(payload))


def test_open_webui_connects_lists_and_chats(live: ServerProcess) -> None:
    webui = OpenWebUI(live.url)
    assert webui.verify()["version"]
    ((name, model),) = webui.models().items()
    assert name == f"{live.model}:latest"
    assert model["expires_at"] > 4_000_000_000
    chat = {
        "model": name,
        "messages": [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}],
        "options": {"temperature": 0.6, "num_ctx": 4096, "num_predict": 5, "repeat_last_n": -1, "seed": 3},
        "stream": True,
        "keep_alive": "5m",
    }
    streamed = webui.post("/api/chat", chat)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *parts, last = lines_of(streamed)
    assert all(part["message"]["role"] == "assistant" and not part["done"] for part in parts)
    assert last["eval_count"] / (last["eval_duration"] / 1e9) > 0  # the speed that it shows
    # The title of the conversation is asked for in the same way, without a stream.
    title = {
        "model": live.model,
        "messages": chat["messages"],
        "stream": False,
        "options": {"num_predict": 5},
    }
    assert webui.post("/api/chat", title).json()["done"] is True
    assert webui.post("/api/show", {"model": name}).json()["details"]["family"] == "llama"


def test_open_webui_shows_why_something_is_refused(live: ServerProcess) -> None:
    """It takes the text from `error`."""
    webui = OpenWebUI(live.url)
    embed = webui.post("/api/embed", {"model": live.model, "input": ["a"]})
    unknown = webui.post("/api/chat", {"model": "llama3.2", "messages": [{"role": "user", "content": "a"}]})
    assert [response.status_code for response in (embed, unknown)] == [404, 404]
    assert "makes no embeddings" in embed.json()["error"]
    assert unknown.json()["error"].startswith("model 'llama3.2:latest' not found")
