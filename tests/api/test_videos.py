"""Videos through all APIs, to real engines with tiny models that read them by temporal patches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_backend import Client, settings

from image_files import animation, data_url, encoded, noise
from outrider import LLM, InvalidRequest, SamplingParams
from outrider.api.app import create_server
from outrider.chat.service import ChatService
from outrider.media.limits import MediaLimits
from outrider.media.loader import MediaLoader
from patience import case_only_in_soak
from tiny_vision import write_vision_checkpoint
from video_files import clip, encoded_video

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
LIMITS = MediaLimits(max_image_bytes=200_000, max_image_pixels=10_000, max_images=3, max_video_frames=16)
LEFT, RIGHT = (encoded_video(clip(40, seed=seed)) for seed in (1, 2))  # 8 frames are read of each


class Watching:
    """A server over one tiny vision model."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        assert llm.engine.reader is not None
        facts, videos = llm.engine.facts, llm.renderer.video_reader
        self.loader = MediaLoader(LIMITS, llm.engine.reader.read, videos, facts.max_context)
        self.service = ChatService(llm.async_engine, llm.renderer, self.loader)
        self.client = Client(create_server(self.service, facts, llm.tokenizer, settings()))

    def chat(self, *content: Any, **changes: Any) -> Any:
        body = {"messages": [{"role": "user", "content": list(content)}], **GREEDY, **changes}
        return self.client.post("/v1/chat/completions", body)

    def say(self, *content: Any) -> str:
        answer = self.chat(*content)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def first_logprob(self, *content: Any) -> float:
        answer = self.chat(*content, logprobs=True, max_tokens=1).json()
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])


@pytest.fixture(scope="module", params=["qwen3_5", case_only_in_soak("qwen2_5_vl")])
def watching(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    folder = tmp_path_factory.mktemp(request.param)
    write_vision_checkpoint(folder, request.param)
    with LLM(folder, max_rows=4, prefill_step_size=32) as llm:
        watching = Watching(llm)
        yield watching
        watching.service.close()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def video(data: bytes, media_type: str = "video/mp4") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, media_type)}}


def test_the_video_and_its_place_change_the_answer(watching: Watching) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(encoded(noise(20, 12)))}}
    asked = [
        [text("what?")],
        [video(LEFT), text("what?")],
        [video(RIGHT), text("what?")],
        [text("what?"), video(LEFT)],
        [video(LEFT), picture, text("what?")],
        [picture, video(LEFT), text("what?")],
    ]
    found = [watching.first_logprob(*content) for content in asked]
    assert len({round(one, 5) for one in found}) == len(asked)
    again = [watching.first_logprob(*content) for content in asked]  # from the prefix cache
    assert again == pytest.approx(found, abs=1e-5)
    assert watching.say(*asked[1]) != watching.say(*asked[2])


def test_all_apis_give_one_answer_and_count_the_same_tokens(watching: Watching) -> None:
    answer = watching.chat(video(LEFT), text("what?"))
    expected, usage = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
    url = data_url(LEFT, "video/mp4")
    items = [{"type": "input_video", "video_url": url}, {"type": "input_text", "text": "what?"}]
    body = {"input": [{"role": "user", "content": items}], "temperature": 0, "max_output_tokens": 8}
    response = watching.client.post("/v1/responses", body | {"ignore_eos": True}).json()
    assert response["output"][0]["content"][0]["text"] == expected
    assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
    source = {"type": "base64", "media_type": "video/mp4", "data": url.partition(",")[2]}
    blocks = [{"type": "video", "source": source}, text("what?")]
    messages = [{"role": "user", "content": blocks}]
    answer = watching.client.post("/v1/messages", {"messages": messages, **GREEDY}).json()
    assert answer["content"][0]["text"] == expected
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(answer["usage"].get(part) or 0 for part in parts) == usage["prompt_tokens"]
    count = watching.client.post("/v1/messages/count_tokens", {"messages": messages}).json()
    assert count["input_tokens"] == usage["prompt_tokens"]
    content = [video(LEFT), text("what?")]
    tokenized = watching.client.post("/tokenize", {"messages": [{"role": "user", "content": content}]})
    assert tokenized.json()["count"] == usage["prompt_tokens"]


def test_the_python_api_reads_files_bytes_and_frames(watching: Watching, tmp_path: Any) -> None:
    """Frames without a rate are those that the model reads."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    file = tmp_path / "left.mp4"
    file.write_bytes(LEFT)

    def ask(given: Any, **more: Any) -> str:
        content = [{"type": "video", "video": given, **more}, text("what?")]
        return watching.llm.chat([{"role": "user", "content": content}], params).text

    expected = watching.say(video(LEFT), text("what?"))
    assert [ask(form) for form in (LEFT, file, str(file), data_url(LEFT, "video/mp4"))] == [expected] * 4
    frames = clip(40, seed=1)
    assert ask(frames, fps=10) != ask(clip(40, seed=2), fps=10)
    assert ask(frames[:8]) == ask(frames[:8], fps=2)
    for wrong, fps in ((frames[0], 2), (frames.astype(np.float32), 2), (frames, 0), (7, 2), (b"no video", 2)):
        with pytest.raises(InvalidRequest):
            ask(wrong, fps=fps)


def test_an_animation_is_a_video(watching: Watching) -> None:
    moving, still = (animation(count, width=16, height=16) for count in (4, 1))
    counts = [
        watching.chat(*some, text("what?")).json()["usage"]["prompt_tokens"]
        for some in ([], [video(still, "image/gif")], [video(moving, "image/gif")])
    ]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([video(LEFT[:300])], "damaged"),
        ([video(b"#EXTM3U\nhttp://host/a.ts\n")], "known format"),
        ([video(LEFT, "video/webm")], "declared as 'video/webm'"),
        ([video(encoded(noise(101, 100)), "image/png")], "101 x 100"),
        ([video(encoded_video(clip(8, 128, 96)))], "128 x 96"),
        ([video(LEFT)] * 3, "24 frames to read; the limit is 16"),
        ([video(LEFT)] * 4, "4 images"),
        ([video(bytes(300_000))], "200,000"),
        ([{"type": "image_url", "image_url": {"url": data_url(LEFT, "video/mp4")}}], "known format"),
    ],
)
def test_a_video_that_breaks_a_rule_is_a_400_that_says_so(
    watching: Watching, parts: list[dict[str, Any]], words: str
) -> None:
    answer = watching.chat(*parts, text("what?"))
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert watching.client.get("/v1/status").json()["live_requests"] == 0
