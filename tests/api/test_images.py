"""Pictures through all three APIs, to a real engine with a tiny vision model, and what is refused."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_backend import Client, settings

from image_files import animation, data_url, encoded, noise
from outrider import LLM
from outrider.api.app import create_server
from outrider.chat.service import ChatService
from outrider.isolation.worker import IsolatedWorker, WorkerUnavailable
from outrider.media.limits import MediaLimits
from outrider.media.loader import MediaLoader
from patience import PATIENCE_S, Hurdle, goes_on_while_held
from tiny_models import write_checkpoint
from tiny_vision import write_vision_checkpoint

LIMITS = MediaLimits(max_image_bytes=20_000, max_image_pixels=10_000, max_images=4, max_frames=3)
RED, BLUE = noise(20, 12, 1), noise(20, 12, 2)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


class Seeing:
    """A server over one tiny vision model; pictures may also come from `web` and from `folder`."""

    def __init__(self, llm: LLM, limits: MediaLimits) -> None:
        assert llm.engine.reader is not None
        self.llm = llm
        self.reader = llm.engine.reader
        self.loader = MediaLoader(limits, llm.engine.reader.read)
        self.service = ChatService(llm.async_engine, llm.renderer, self.loader)
        self.client = Client(create_server(self.service, llm.engine.facts, llm.tokenizer, settings()))

    def chat(self, *content: Any, **changes: Any) -> Any:
        body = {"messages": [{"role": "user", "content": list(content)}], **GREEDY, **changes}
        return self.client.post("/v1/chat/completions", body)

    def say(self, *content: Any, **changes: Any) -> str:
        answer = self.chat(*content, **changes)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    write_vision_checkpoint(folder, request.param)
    with LLM(folder, max_rows=4, prefill_step_size=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def seeing(llm: LLM) -> Iterator[Seeing]:
    seeing = Seeing(llm, LIMITS)
    yield seeing
    seeing.service.close()


class Web:
    """A web server on this machine."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, bytes, str]] = {}
        self.asked: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                status, body, where = web.pages.get(self.path, (404, b"", ""))
                self.send_response(status)
                if where:
                    self.send_header("Location", where)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def picture(pixels: Any) -> dict[str, Any]:
    return image(data_url(encoded(pixels)))


# -- what is seen ----------------------------------------------------------------------------------------


def test_the_picture_and_its_place_change_the_answer(seeing: Seeing) -> None:
    answers = {
        seeing.say(text("what?")),
        seeing.say(picture(RED), text("what?")),
        seeing.say(picture(BLUE), text("what?")),
        seeing.say(text("what?"), picture(RED)),
        seeing.say(picture(RED), picture(BLUE), text("what?")),
        seeing.say(picture(BLUE), picture(RED), text("what?")),
    }
    assert len(answers) == 6
    assert seeing.say(picture(RED), text("what?")) in answers


def test_all_apis_and_all_ways_to_send_a_picture_give_one_answer(llm: LLM, web: Web, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(encoded(RED))
    web.pages["/red"] = (200, encoded(RED, "BMP"), "")
    web.pages["/moved"] = (302, b"", "/red")
    seeing = Seeing(llm, MediaLimits(allow_private_urls=True, local_folder=str(tmp_path)))
    expected = seeing.say(picture(RED), text("what?"))
    for url in (f"{web.url}/red", f"{web.url}/moved", (tmp_path / "red.png").as_uri()):
        assert seeing.say(image(url), text("what?")) == expected
    url = data_url(encoded(RED))
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}]
    body = {"input": [{"role": "user", "content": items}], "temperature": 0, "max_output_tokens": 8}
    response = seeing.client.post("/v1/responses", body | {"ignore_eos": True}).json()
    assert response["output"][0]["content"][0]["text"] == expected
    sources = [
        {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]},
        {"type": "url", "url": f"{web.url}/red"},
    ]
    for source in sources:
        blocks = [{"type": "image", "source": source}, text("what?")]
        body = {"messages": [{"role": "user", "content": blocks}], **GREEDY}
        assert seeing.client.post("/v1/messages", body).json()["content"][0]["text"] == expected
        count = seeing.client.post("/v1/messages/count_tokens", {"messages": body["messages"]}).json()
        usage = seeing.client.post("/v1/messages", body).json()["usage"]
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert count["input_tokens"] == sum(usage.get(part) or 0 for part in parts)
    seeing.service.close()


def test_a_picture_of_an_earlier_turn_is_still_seen(seeing: Seeing) -> None:
    def ask(pixels: Any) -> str:
        messages = [
            {"role": "user", "content": [text("look"), picture(pixels)]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "what was it?"},
        ]
        return str(
            seeing.client.post("/v1/chat/completions", {"messages": messages, **GREEDY}).json()["choices"]
        )

    assert ask(RED) != ask(BLUE)


def test_the_next_response_remembers_the_picture(seeing: Seeing) -> None:
    def ask(pixels: Any) -> str:
        content = [{"type": "input_image", "image_url": data_url(encoded(pixels))}]
        opening = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2, "temperature": 0}
        first = seeing.client.post("/v1/responses", opening).json()
        body = {
            "input": "and?",
            "previous_response_id": first["id"],
            "max_output_tokens": 8,
            "temperature": 0,
        }
        return str(seeing.client.post("/v1/responses", body).json()["output"][0]["content"][0]["text"])

    assert ask(RED) != ask(BLUE)


def test_a_picture_in_a_tool_result_is_seen_through_each_api(seeing: Seeing) -> None:
    def ask(pixels: Any) -> list[str]:
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [text("seen"), picture(pixels)]},
        ]
        chat = seeing.client.post("/v1/chat/completions", {"messages": messages, **GREEDY}).json()
        source = {
            "type": "base64",
            "media_type": "image/png",
            "data": data_url(encoded(pixels)).partition(",")[2],
        }
        content = [text("seen"), {"type": "image", "source": source}]
        blocks = [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": content}],
            },
        ]
        claude = seeing.client.post("/v1/messages", {"messages": blocks, **GREEDY}).json()
        shown = {"type": "input_image", "image_url": data_url(encoded(pixels))}
        output = [{"type": "input_text", "text": "seen"}, shown]
        items = [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": output},
        ]
        body = {"input": items, "max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = seeing.client.post("/v1/responses", body).json()
        return [
            chat["choices"][0]["message"]["content"],
            claude["content"][0]["text"],
            response["output"][0]["content"][0]["text"],
        ]

    red, blue = ask(RED), ask(BLUE)
    assert len({*red}) == 1
    assert all(a != b for a, b in zip(red, blue, strict=True))


def test_a_video_is_seen_as_its_frames(seeing: Seeing) -> None:
    video = {"type": "video_url", "video_url": {"url": data_url(animation(3), "image/gif")}}
    answer = seeing.chat(video, text("what?"))
    assert answer.status_code == 200
    one = seeing.chat(picture(noise(10, 6)), text("what?")).json()["usage"]["prompt_tokens"]
    none = seeing.chat(text("what?")).json()["usage"]["prompt_tokens"]
    assert answer.json()["usage"]["prompt_tokens"] == none + 3 * (one - none)


def test_words_for_a_picture_written_by_a_client_are_only_words(seeing: Seeing) -> None:
    word = seeing.reader.placeholder
    assert seeing.chat(text(f"{word} what?")).status_code == 200
    with_one = seeing.chat(picture(RED), text(f"{word} what? {word}"))
    assert with_one.status_code == 200
    assert with_one.json()["choices"][0]["message"]["content"] != seeing.say(text(f"{word} what?"))


def test_several_choices_load_their_picture_once(llm: LLM, web: Web) -> None:
    web.pages["/red"] = (200, encoded(RED), "")
    seeing = Seeing(llm, MediaLimits(allow_private_urls=True))
    answer = seeing.chat(image(f"{web.url}/red"), text("what?"), n=3, temperature=0.9, seed=1)
    assert len(answer.json()["choices"]) == 3
    assert web.asked == ["/red"]
    seeing.service.close()


def test_a_picture_is_encoded_once_for_all_turns_and_requests(seeing: Seeing, monkeypatch: Any) -> None:
    runner: Any = seeing.llm.engine._loop.parts.runner
    encoded_keys: list[str] = []
    encode = runner._vision_encoder.encode
    monkeypatch.setattr(
        runner._vision_encoder, "encode", lambda inputs, n: encoded_keys.append("") or encode(inputs, n)
    )
    fresh = noise(20, 12, 77)
    first = seeing.say(picture(fresh), text("what?"))
    count = len(encoded_keys)
    assert count > 0
    assert seeing.say(image(data_url(encoded(fresh, "BMP"), "image/bmp")), text("what?")) == first
    seeing.say(text("hm"), picture(fresh), text("and now?"))
    assert len(encoded_keys) == count


# -- what is refused -------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left(llm: LLM, tmp_path: Path, monkeypatch: Any) -> Iterator[None]:
    """After the test no temporary file, request, task or held piece is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
    assert llm.engine._loop.scheduler.is_idle
    assert llm.engine._loop.parts.runner.image_embeddings.num_held == 0  # type: ignore[union-attr]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("data:image/png;base64,AAAA"), "known format"),
        (image(data_url(encoded(noise()), "image/jpeg")), "declared"),
        (image(data_url(encoded(noise(60, 60))[:3000])), "cut short"),
        (picture(noise(150, 150)), "bytes"),
        (image(data_url(encoded(noise(101, 100) * 0))), "101 x 100"),
        (image("file:///etc/passwd"), "--allow-local-media"),
        (image("http://127.0.0.1:1/a.png"), "public internet"),
        (image("http://169.254.169.254/latest/meta-data"), "public internet"),
        (image("ftp://host/a"), "http"),
        (image("https://"), "host"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAAIGZ0eXBpc29t"}}, "damaged"),
    ],
)
def test_a_picture_that_breaks_a_rule_is_a_400_that_says_so(
    seeing: Seeing, part: dict[str, Any], words: str
) -> None:
    answer = seeing.chat(part, text("what?"))
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert seeing.client.get("/v1/status").json()["live_requests"] == 0


@pytest.mark.usefixtures("nothing_left")
def test_pictures_that_do_not_come_in_time_are_a_400(llm: LLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        limits = MediaLimits(allow_private_urls=True, fetch_timeout_s=0.3, fetch_total_s=PATIENCE_S)
        seeing = Seeing(llm, limits)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        answer = seeing.chat(image(url), text("what?"))
        assert answer.status_code == 400
        assert "image or video 1 of 1 cannot be fetched: timed out" in answer.json()["error"]["message"]
        assert seeing.client.get("/v1/status").json()["live_requests"] == 0
        seeing.service.close()


def test_killed_child_process_is_a_503(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_killed(*_: object) -> None:
        raise WorkerUnavailable("a child process was killed: details")

    monkeypatch.setattr(IsolatedWorker, "call", be_killed)
    grammar = {"guided_regex": "[ab]{3}[cde]", "ignore_eos": False}
    for answer in (seeing.chat(picture(RED)), seeing.chat(text("what?"), stream=True, **grammar)):
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) > 0
        assert "details" not in answer.text
    assert 'outrider_refusals_total{reason="child_process"} 2.0' in seeing.client.get("/metrics").text
    monkeypatch.undo()
    assert seeing.chat(text("what?"), **grammar).status_code == 200  # nothing is remembered


def test_audio_is_refused_with_the_reason_through_each_api(seeing: Seeing) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    source = {"type": "base64", "media_type": "audio/wav", "data": "AAAA"}
    blocks = [{"type": "audio", "source": source}]
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [sound, picture(RED)]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [sound]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": blocks}]}),
    ):
        answer = seeing.client.post(path, body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("a message has audio, which is not read: ")
        assert message.endswith(" has no audio encoder")


def test_too_many_pictures_are_refused_through_each_api(seeing: Seeing) -> None:
    assert seeing.chat(*[picture(RED)] * 5).status_code == 400
    blocks = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a"}}] * 5
    answer = seeing.client.post("/v1/messages", {"messages": [{"role": "user", "content": blocks}], **GREEDY})
    assert answer.status_code == 400
    assert "5 images" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_redirect_to_a_private_address_is_refused(llm: LLM, web: Web, monkeypatch: Any) -> None:
    from outrider.media import addresses

    monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.1")
    web.pages["/a"] = (302, b"", "http://127.0.0.2:9/secret")
    seeing = Seeing(llm, LIMITS)
    answer = seeing.chat(image(f"{web.url}/a"))
    assert answer.status_code == 400
    assert "public internet" in answer.json()["error"]["message"]
    seeing.service.close()


def test_a_text_model_answers_400_to_media(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with LLM(tmp_path) as llm:
        service = ChatService(llm.async_engine, llm.renderer)
        client = Client(create_server(service, llm.engine.facts, llm.tokenizer, settings()))
        for part in (picture(RED), {"type": "video_url", "video_url": {"url": "http://a/b"}}):
            answer = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
            assert answer.status_code == 400
            assert "text only" in answer.json()["error"]["message"]
        shown = {"type": "input_image", "image_url": data_url(encoded(RED))}
        source = {
            "type": "base64",
            "media_type": "image/png",
            "data": shown["image_url"].partition(",")[2],
        }
        for path, body in (
            ("/v1/responses", {"input": [{"role": "user", "content": [shown]}]}),
            (
                "/v1/messages",
                {
                    "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
                    "max_tokens": 1,
                },
            ),
        ):
            answer = client.post(path, body)
            assert answer.status_code == 400
            assert "text only" in answer.json()["error"]["message"]
        service.close()


def test_the_event_loop_goes_on_while_pictures_are_read(seeing: Seeing, monkeypatch: Any) -> None:
    read = seeing.reader.read

    hurdle = Hurdle()

    def slow(found: Any) -> Any:
        hurdle.stop()
        return read(found)

    monkeypatch.setattr(seeing.loader, "_use", slow)

    async def go() -> None:
        from outrider.api.openai.chat_request import ChatCompletionRequest, chat_request

        body = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": [picture(RED)]}], "max_tokens": 1}
        )
        work = asyncio.create_task(seeing.service.start(chat_request(body, None)))
        await goes_on_while_held(hurdle)
        (await work).abort()

    asyncio.run(go())
