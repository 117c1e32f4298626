"""`outrider serve outrider-vision-135m`: held-out images through OpenAI's client, while text streams."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from drawn_images import SHAPE_AND_COLOUR, Question, questions_about_shapes
from outrider.models.errors import ModelUnavailable
from outrider.models.files import vision_model
from patience import PATIENCE_S, in_test_or_soak
from server_process import ServerProcess, serving

ALL_QUESTIONS = questions_about_shapes()
SINGLE = [question for question in ALL_QUESTIONS if question.num_shapes == 1]
QUESTIONS = ALL_QUESTIONS[:: in_test_or_soak(3, 1)]
LEAST_RIGHT = 0.9
EXAMPLE = Path(__file__).parents[2] / "examples" / "image.py"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    try:
        vision_model.ensure()
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    name = Path(vision_model.NAME.upper())  # by its name, in any case
    with serving(name, "--max-rows", "6", "--log-level", "warning") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def ask(client: openai.OpenAI, question: Question, **extra: Any) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model=vision_model.NAME,
        messages=[{"role": "user", "content": question.content}],
        temperature=0,
        max_tokens=24,
        extra_body=extra,
    )


def words(answer: openai.types.chat.ChatCompletion) -> str:
    return (answer.choices[0].message.content or "").strip()


class TextStream:
    """A long answer to a question without pictures, read on a thread until it is closed."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.arrivals_s: list[float] = []
        self._stream = client.chat.completions.create(
            model=vision_model.NAME,
            messages=[{"role": "user", "content": "Tell me a long story about a river."}],
            temperature=0,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        self._closing = threading.Event()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        for _ in self._stream:
            self.arrivals_s.append(time.monotonic())
            if self._closing.is_set():
                break
        self._stream.close()

    def close(self) -> None:
        self._closing.set()
        self._reading.join()


@pytest.fixture(scope="module")
def beside_text(client: openai.OpenAI) -> tuple[list[str], int]:
    """The answers to all questions, four at a time; the pieces of text that came meanwhile."""
    stream = TextStream(client)
    begin_s = time.monotonic()
    try:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda question: words(ask(client, question)), QUESTIONS))
        end_s = time.monotonic()
    finally:
        stream.close()
    return answers, sum(begin_s < arrival_s < end_s for arrival_s in stream.arrivals_s)


@pytest.mark.soak
@pytest.mark.parametrize("kind", SHAPE_AND_COLOUR)
@pytest.mark.parametrize(
    ("fits", "num_asked"),
    [
        pytest.param(lambda num_shapes: num_shapes >= 1, in_test_or_soak(12, 38), id="all"),
        pytest.param(lambda num_shapes: num_shapes == 1, in_test_or_soak(7, 22), id="one shape"),
        pytest.param(lambda num_shapes: num_shapes > 1, in_test_or_soak(5, 16), id="one of several shapes"),
    ],
)
def test_held_out_pictures_are_seen_while_text_streams(
    beside_text: tuple[list[str], int], kind: str, fits: Callable[[int], bool], num_asked: int
) -> None:
    answers, pieces = beside_text
    asked = [
        (question.text, answer, question.answer)
        for question, answer in zip(QUESTIONS, answers, strict=True)
        if question.kind == kind and fits(question.num_shapes)
    ]
    wrong = [one for one in asked if one[1] != one[2]]
    assert len(asked) >= num_asked
    assert len(asked) - len(wrong) >= LEAST_RIGHT * len(asked), wrong
    assert pieces > 20


def test_the_picture_decides_the_answer(client: openai.OpenAI) -> None:
    pictures = list({one.shape: one for one in SINGLE}.values())[:4]
    answers = [words(ask(client, replace(one, text="What shape is in the picture?"))) for one in pictures]
    assert len(set(answers)) == 4
    right = [one.shape in answer for one, answer in zip(pictures, answers, strict=True)]
    assert sum(right) >= 3, answers


def test_drafts_change_nothing_and_stand(client: openai.OpenAI, beside_text: tuple[list[str], int]) -> None:
    accepted = 0
    for question, expected in list(zip(QUESTIONS, beside_text[0], strict=True))[:6]:
        plain, drafted = (ask(client, question, draft_depth=depth) for depth in (0, 3))
        assert words(plain) == words(drafted) == expected
        assert plain.usage is not None
        assert drafted.usage is not None
        assert drafted.usage.completion_tokens_details is not None
        accepted += drafted.usage.completion_tokens_details.accepted_prediction_tokens or 0
    assert accepted >= 3


def test_the_server_goes_by_the_proper_name_and_has_the_default_head(server: ServerProcess) -> None:
    assert [one["id"] for one in server.get("/v1/models")["data"]] == [vision_model.NAME]
    assert "smollm2-135m-instruct" in server.banner


def test_requests_may_use_the_old_name(client: openai.OpenAI) -> None:
    for name in vision_model.OLD_NAMES:
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=1
        )
        assert answer.choices
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="outrider-other", messages=[{"role": "user", "content": "Hi"}])


def test_the_example_sees_its_red_circle(server: ServerProcess) -> None:
    environment = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1"}
    command = [sys.executable, str(EXAMPLE)]
    shape, colour = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "circle" in shape
    assert "red" in colour
