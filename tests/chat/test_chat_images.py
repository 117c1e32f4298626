"""Images in conversations: templates with lists or strings, tool results, order, words that look alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import new_tokenizer
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from image_files import data_url, encoded, noise
from outrider.chat.conversation import ChatRequest, ImagePart, MediaPart, Message, Role, TextPart, ToolCall
from outrider.chat.messages import move_result_images
from outrider.chat.renderer import ChatRenderer
from outrider.chat.service import ChatService
from outrider.chat.special_tokens import Vocabulary
from outrider.chat.template import ChatTemplate, RenderedMessages
from outrider.media.image_reader import ProcessedImage
from outrider.media.images import DecodedImage
from outrider.media.limits import MediaLimits
from outrider.media.loader import MediaLoader
from outrider.prompt_media import MediaPiece, PromptMedia
from outrider.request import InvalidRequest, SamplingParams

SPECIAL = ("<|im_start|>", "<|im_end|>", "<image>", "<row>")
TURN = "<|im_start|>{{ m.role }}\n%s<|im_end|>\n"
PARTS = (
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
)
LISTS_ONLY = "{% for m in messages %}" + TURN % PARTS + "{% endfor %}"
EITHER = "{% for m in messages %}" + TURN % (
    "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
) + "{% endfor %}"  # fmt: skip
STRING_RESULTS = EITHER.replace("m.content is string", "m.content is string or m.role == 'tool'").replace(
    "{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}"
)


def shown(text: str) -> ImagePart:
    return ImagePart((ProcessedImage(text, text, ()),))


def says(role: Role, *parts: Any) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def render(source: str, *messages: Message, placeholder: str | None = "<image>") -> RenderedMessages:
    tokenizer = new_tokenizer(source, SPECIAL)
    template = ChatTemplate(tokenizer, Vocabulary(tokenizer), placeholder=placeholder)
    return template.render(messages, kwargs={"add_generation_prompt": False})


@pytest.mark.parametrize("source", [LISTS_ONLY, EITHER])
def test_images_are_placed_where_they_were_shown(source: str) -> None:
    found = render(
        source,
        says("user", "one", shown("[A]"), "two"),
        says("assistant", "ok"),
        says("user", shown("[B]"), "3"),
    )
    assert found.text == (
        "<|im_start|>user\none[A]two<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\n[B]3<|im_end|>\n"
    )
    assert [image.text for image in found.images] == ["[A]", "[B]"]


def test_a_template_that_takes_lists_only_gets_lists_for_text_too() -> None:
    assert render(LISTS_ONLY, says("user", "hi")).text == "<|im_start|>user\nhi<|im_end|>\n"
    assert render(LISTS_ONLY, Message("user")).text == "<|im_start|>user\n<|im_end|>\n"


@given(st.lists(st.sampled_from([*SPECIAL, "<", "|im_", "end|>", "<|im_start|", ">", "a", ""]), max_size=6))
def test_text_parts_that_a_template_joins_do_not_become_a_special_token(parts: list[str]) -> None:
    tokenizer = new_tokenizer(LISTS_ONLY, SPECIAL)
    found = render(LISTS_ONLY, says("user", *parts))
    special_ids = [i for i in found.ids if i < len(SPECIAL)]
    assert special_ids == [i for i in render(LISTS_ONLY, says("user", "u")).ids if i < len(SPECIAL)]
    assert "".join(parts) in found.text
    assert tokenizer.decode(list(found.ids)) == found.text


def test_the_frames_of_a_video_are_shown_one_after_the_other() -> None:
    frames = ImagePart(tuple(ProcessedImage(str(i), f"[{i}]", ()) for i in range(3)))
    assert "[0][1][2]what" in render(EITHER, says("user", frames, "what")).text


def test_a_template_without_videos_is_noticed() -> None:
    tokenizer = new_tokenizer(EITHER, SPECIAL)
    template = ChatTemplate(
        tokenizer, Vocabulary(tokenizer), placeholder="<image>", video_placeholder="<row>"
    )
    assert not template.shows_videos


def test_a_clients_own_placeholder_is_text() -> None:
    found = render(EITHER, says("user", "<image> and ", shown("<row>"), " <image>"))
    assert len(found.images) == 1
    tokenizer = new_tokenizer(EITHER, SPECIAL)
    image, row = (tokenizer.convert_tokens_to_ids(token) for token in ("<image>", "<row>"))
    assert image not in found.ids  # neither the client's words nor the placeholder, which was replaced
    assert list(found.ids).count(row) == 1


def test_pictures_of_tool_results_follow_them_where_a_template_would_drop_them() -> None:
    call = Message("assistant", tool_calls=(ToolCall("1", "look", "{}"),))
    result = Message("tool", (TextPart("seen"), shown("[A]")), tool_call_id="1")
    kept = render(EITHER, says("user", "look"), call, result).text
    assert "tool\nseen[A]<|im_end|>" in kept
    moved = render(STRING_RESULTS, says("user", "look"), call, result).text
    assert "tool\nseen<|im_end|>\n<|im_start|>user\n[A]<|im_end|>" in moved


def test_move_result_images_moves_images_behind_the_last_result() -> None:
    first = Message("tool", (shown("[A]"),), tool_call_id="1")
    second = Message("tool", (TextPart("x"), shown("[B]")), tool_call_id="2")
    found = move_result_images([first, second, says("user", "so?")])
    assert [message.role for message in found] == ["tool", "tool", "user", "user"]
    assert [part.images[0].text for part in found[2].image_parts] == ["[A]", "[B]"]
    assert [message.text for message in found] == ["(a picture)", "x", "", "so?"]
    untouched = [says("user", shown("[A]")), says("tool", "x")]
    assert move_result_images(untouched) == untouched


def test_a_template_without_images_refuses_them() -> None:
    plain = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="shows 0 of 1 images"):
        render(plain, says("user", shown("[A]")))
    with pytest.raises(InvalidRequest, match="text only"):
        render(EITHER, says("user", shown("[A]")), placeholder=None)


# -- the service -----------------------------------------------------------------------------------------


class Reader:
    """Says "<row>" for a picture."""

    placeholder = "<image>"
    videos = None

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, picture: DecodedImage) -> ProcessedImage:
        self.num_read += 1
        return ProcessedImage(picture.digest, "<row>", ((1, {}),))

    def place(self, prompt_ids: Sequence[int], pictures: Sequence[ProcessedImage]) -> PromptMedia:
        return PromptMedia(tuple(MediaPiece(p.digest, {}, np.array([i])) for i, p in enumerate(pictures)))


class VisionEngine(FakeEngine):
    @property
    def media(self) -> Any:
        return self.submitted[-1].request.media


def start(
    *parts: Any, no_images_reason: str | None = None, reads_images: bool = True
) -> tuple[VisionEngine, Reader]:
    engine, reader = VisionEngine(["ok"]), Reader()
    loader = MediaLoader(MediaLimits(), reader.read) if reads_images else None

    async def go() -> None:
        tokenizer = new_tokenizer(EITHER, SPECIAL)
        renderer = ChatRenderer(tokenizer, reader if reads_images else None, no_images_reason)
        service = ChatService(engine, renderer, loader)  # type: ignore[arg-type]
        try:
            request = await service.with_images(ChatRequest([says("user", *parts)], SamplingParams()))
            for _ in range(2):
                async for _ in await service.start(request):
                    pass
        finally:
            service.close()

    asyncio.run(go())
    return engine, reader


def picture(seed: int) -> MediaPart:
    return MediaPart("image", data_url(encoded(noise(seed=seed))))


def test_images_reach_the_engine_in_order_and_are_read_once() -> None:
    engine, reader = start(picture(1), "and", picture(2), picture(1))
    keys = [piece.key for piece in engine.media.pieces]
    assert len(keys) == 3
    assert keys[0] == keys[2] != keys[1]
    assert reader.num_read == 3  # for two answers


def test_a_text_request_brings_no_media() -> None:
    engine, reader = start("hello")
    assert engine.media is None
    assert reader.num_read == 0


def test_what_cannot_be_read_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="audio"):
        start(MediaPart("audio", "data:audio/wav;base64,AAAA"))
    with pytest.raises(InvalidRequest, match="text only"):
        start(picture(1), reads_images=False)
    with pytest.raises(InvalidRequest, match="both ways"):
        start(picture(1), reads_images=False, no_images_reason="its tokens see each other both ways")
