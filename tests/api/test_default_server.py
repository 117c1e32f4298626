"""The server as `make serve` starts it: the default model, through both official clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model
from server_process import ServerProcess, serving

README = Path(__file__).parents[2] / "README.md"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}


@pytest.fixture(scope="module")
def default_server() -> Iterator[ServerProcess]:
    try:
        folder = default_model.ensure()
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    with serving(folder, "--max-rows", "4", "--log-level", "warning") as server:
        yield server


def test_the_readme_s_first_question_is_answered_and_sampled_as_the_publisher_recommends(
    default_server: ServerProcess,
) -> None:
    """Measured: "Tokyo" with 96 of 96 seeds. Paris, of France, comes with 59 of 96 only: docs/MODELS.md."""

    def answer(**fields: Any) -> str:
        body = question | {"max_tokens": 12} | fields
        return str(
            default_server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        )

    found = re.search(r"-d '(\{\"messages\".*\})'", README.read_text())
    assert found is not None
    question = json.loads(found.group(1))
    assert "sampling temperature 0.2, top_p 0.9" in default_server.banner
    answers = [answer(seed=i) for i in range(4)]
    assert all("Tokyo" in text for text in answers)
    assert answers == [answer(seed=i, temperature=0.2, top_p=0.9) for i in range(4)]


def test_openai_client(default_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model=default_server.model, messages=QUESTION, temperature=0, max_tokens=12, stream=True
    )
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    answer = client.chat.completions.create(
        model=default_server.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    )
    assert "city" in json.loads(answer.choices[0].message.content or "")


def test_anthropic_client(default_server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=default_server.url, api_key="none", max_retries=0)
    message = client.messages.create(
        model=default_server.model,
        max_tokens=60,
        messages=[{"role": "user", "content": "Look up the weather in Paris."}],
        tools=[{"name": "weather", "description": "The weather of a city", "input_schema": CITY}],
        tool_choice={"type": "tool", "name": "weather"},
        extra_body={"temperature": 0},
    )
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert "city" in call.input
