"""A template with every feature of Qwen3.5's: several steps of tools, thinking, pictures, video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import new_tokenizer

from outrider.chat.conversation import ChatRequest, ImagePart, Message, Role, TextPart, Tool, ToolCall
from outrider.chat.events import ReasoningDelta, TextDelta, ToolCallEnded, ToolCallStarted
from outrider.chat.formats import detect
from outrider.chat.renderer import ChatPrompt, ChatRenderer
from outrider.chat.special_tokens import Vocabulary
from outrider.chat.template import ChatTemplate
from outrider.media.image_reader import ProcessedImage
from outrider.models.files.eos_tokens import eos_ids
from outrider.request import SamplingParams

SOURCE = (Path(__file__).parents[1] / "data" / "templates" / "vision_thinker.jinja").read_text()
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", *VISION)
LOOK = Tool("look", "Looks", {"type": "object", "properties": {"at": {"type": "string"}, "far": {}}})


def says(role: Role, *parts: Any, **fields: Any) -> Message:
    content = tuple(TextPart(part) if isinstance(part, str) else part for part in parts)
    return Message(role, content, **fields)


def called(id: str, arguments: str) -> tuple[ToolCall, ...]:
    return (ToolCall(id, "look", arguments),)


STEPS = (
    says("user", "What is there?"),
    says("assistant", "Let me see.", reasoning="north first", tool_calls=called("a", '{"at": "north"}')),
    says("tool", "snow", tool_call_id="a"),
    says("assistant", reasoning="then south", tool_calls=called("b", '{"at": "south", "far": true}')),
    says("tool", "sea", tool_call_id="b"),
)


def render(*messages: Message, tools: tuple[Tool, ...] = (), **kwargs: Any) -> tuple[str, ChatPrompt]:
    tokenizer = new_tokenizer(SOURCE, SPECIAL)
    prompt = ChatRenderer(tokenizer).render(
        ChatRequest(messages, SamplingParams(), tools=tools, template_kwargs=kwargs)
    )
    return tokenizer.decode(list(prompt.ids)), prompt


def test_thinking_between_the_steps_of_one_turn_is_kept() -> None:
    text, _ = render(*STEPS, tools=(LOOK,))
    assert text.startswith("<|im_start|>system\nFunctions")
    assert text.endswith(
        "<|im_start|>user\nWhat is there?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nnorth first\n</think>\n\nLet me see.\n\n"
        "<tool_call>\n<function=look>\n<parameter=at>\nnorth\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsnow\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nthen south\n</think>\n\n"
        "<tool_call>\n<function=look>\n<parameter=at>\nsouth\n</parameter>\n<parameter=far>\ntrue\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsea\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_thinking_of_earlier_turns_is_dropped_or_kept_on_request() -> None:
    later = (*STEPS, says("assistant", "Snow and sea.", reasoning="done"), says("user", "Thanks."))
    dropped, _ = render(*later, tools=(LOOK,))
    kept, _ = render(*later, tools=(LOOK,), preserve_thinking=True)
    for thought in ("north first", "then south", "done"):
        assert thought not in dropped
        assert f"<think>\n{thought}\n</think>" in kept
    assert dropped.count("<parameter=at>") == kept.count("<parameter=at>") == 2


def test_results_of_parallel_calls_share_a_turn() -> None:
    both = (ToolCall("a", "look", '{"at": "x"}'), ToolCall("b", "look", "{}"))
    text, _ = render(
        says("user", "?"),
        says("assistant", tool_calls=both),
        says("tool", "1", tool_call_id="a"),
        says("tool", "2", tool_call_id="b"),
        tools=(LOOK,),
    )
    responses = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    assert f"<|im_start|>user\n{responses}" in text
    assert "</tool_call>\n<tool_call>\n<function=look>\n</function>" in text


def test_a_system_message_in_the_middle_is_moved_to_the_start() -> None:
    text, _ = render(
        says("user", "a"), says("assistant", "b"), says("system", "Be brief."), says("user", "c")
    )
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")


def test_the_model_reasons_unless_it_is_switched_off() -> None:
    text, prompt = render(says("user", "?"))
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    parser = prompt.new_parser()
    assert [*parser.push("hm\n</think>\n\nyes"), *parser.finish()] == [ReasoningDelta("hm"), TextDelta("yes")]
    text, prompt = render(says("user", "?"), enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert [*prompt.new_parser().push("yes")] == [TextDelta("yes")]


def test_its_formats_are_found_and_a_call_is_read() -> None:
    tokenizer = new_tokenizer(SOURCE, SPECIAL)
    tool, reasoning = detect(SOURCE, tokenizer)
    assert (tool and tool.name, reasoning and reasoning.name) == ("qwen3_coder", "think")
    _, prompt = render(says("user", "?"), tools=(LOOK,))
    call = "<tool_call>\n<function=look>\n<parameter=at>\nnorth\n</parameter>\n</function>\n</tool_call>"
    parser = prompt.new_parser()
    events = [*parser.push(f"so\n</think>\n\n{call}"), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStarted)] == ["look"]
    assert [event.arguments for event in events if isinstance(event, ToolCallEnded)] == ['{"at": "north"}']


@pytest.mark.parametrize("numbered", [False, True])
def test_pictures_and_frames_of_videos_are_placed_where_they_were_shown(numbered: bool) -> None:
    tokenizer = new_tokenizer(SOURCE, SPECIAL)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    template = ChatTemplate(tokenizer, Vocabulary(tokenizer), placeholder=mark)

    def shown(*names: str) -> ImagePart:
        return ImagePart(tuple(ProcessedImage(name, f"[{name}]", ()) for name in names))

    video = shown("frame 1", "frame 2")
    messages = [
        says("user", "Compare", shown("A"), "with", shown("B")),
        says("assistant", "Done."),
        says("user", video, "And this?"),
    ]
    found = template.render(messages, kwargs={"add_vision_id": numbered})
    assert [image.text for image in found.images] == ["[A]", "[B]", "[frame 1]", "[frame 2]"]
    one, two, three = ("Picture 1: ", "Picture 2: ", "Picture 3: ") if numbered else ("", "", "")
    assert f"Compare{one}[A]with{two}[B]<|im_end|>" in found.text
    assert f"<|im_start|>user\n{three}[frame 1]" in found.text
    assert found.text.index("[frame 1]") < found.text.index("[frame 2]") < found.text.index("And this?")


@pytest.mark.parametrize("placeholder", ["<|video_pad|>", "<|vision_start|><|video_pad|><|vision_end|>"])
def test_videos_are_placed_between_pictures(placeholder: str) -> None:
    tokenizer = new_tokenizer(SOURCE, SPECIAL)
    settings = {"placeholder": "<|image_pad|>", "video_placeholder": placeholder}
    template = ChatTemplate(tokenizer, Vocabulary(tokenizer), **settings)  # type: ignore[arg-type]
    assert template.shows_videos
    picture, video = ProcessedImage("A", "[A]", ()), ProcessedImage("V", "[V]", (), num_frames=4)
    parts = (ImagePart((picture,)), "then", ImagePart((video,)), "and", ImagePart((picture,)))
    found = template.render([says("user", *parts, "<|video_pad|>?")])
    assert [image.digest for image in found.images] == ["A", "V", "A"]
    shown = "[V]" if "start" in placeholder else "<|vision_start|>[V]<|vision_end|>"
    assert f"then{shown}and<|vision_start|>[A]<|vision_end|><|video_pad|>?" in found.text
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") not in found.ids  # the client's words are text


def test_an_answer_ends_where_the_template_ends_a_turn() -> None:
    tokenizer = new_tokenizer(SOURCE, SPECIAL)
    tokenizer._tokenizer.eos_token = "<|endoftext|>"
    tokenizer._eos_token_ids = {SPECIAL.index("<|endoftext|>")}
    found = eos_ids(tokenizer, {})
    assert found == {SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")}
