"""Which formats a chat template speaks, told from its text."""

from __future__ import annotations

from typing import ClassVar

import pytest
from chat_tokenizers import new_tokenizer

from outrider.chat.conversation import ChatRequest, Message, TextPart, Tool
from outrider.chat.events import ToolCallStarted
from outrider.chat.formats import TOOL_FORMATS, TOOL_PARSER_NAMES, detect
from outrider.chat.renderer import ChatRenderer
from outrider.request import SamplingParams

# A few words of each family's template: what it is told by.
TEMPLATES = {
    "Qwen 2.5": ('{% if tools %}<tool_call>\n{"name": <function-name>}</tool_call>', "hermes", None),
    "Qwen 3": ("{{ tools }}<tool_call>{% if enable_thinking %}<think>\n\n</think>", "hermes", "think"),
    "Qwen 3 Coder": ("{{ tools }}<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", None),
    "Llama 3.1": ("{{ tools }}<|start_header_id|><|python_tag|>", "llama3", None),
    "Llama 3.2": ('{{ tools }}format {"name": function name, "parameters": dictionary}', "llama3", None),
    "Mistral Small 3.1": ("{{ tools }}[TOOL_CALLS] [ [TOOL_RESULTS]", "mistral_list", None),
    "Ministral 3": ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}[THINK]", "mistral", "magistral"),
    "DeepSeek V3": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n", "deepseek_v3", None),
    "DeepSeek V3.1": ("<｜tool▁call▁begin｜>f<｜tool▁sep｜></think>", "deepseek", "think"),
    "GLM 4.5": ("{{ tools }}<tool_call>{{ name }}\n<arg_key>k</arg_key><think></think>", "glm", "think"),
    "LongCat": ("<longcat_tool_call><longcat_arg_key><longcat_think>", "longcat", "longcat_think"),
    "Gemma 3": ("<start_of_turn>user\n{{ m.content }}<end_of_turn>", "gemma3", None),
    "Gemma 4": (
        "{{ tools }}<|tool_call>call:f{}<tool_call|><|channel>thought\n<channel|>",
        "gemma4",
        "gemma4",
    ),
    "FunctionGemma": ("{{ tools }}<start_of_turn><start_function_call>", "function_gemma", None),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    "MiniMax M2": ('<minimax:tool_call><invoke name="f"><think>', "minimax", "think"),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi", None),
    "LFM 2": ("{{ tools }}<|tool_list_start|>", "lfm2", None),
    "Seed-OSS": ("{{ tools }}<seed:tool_call>\n<function=f>\n<seed:think>", "seed_oss", "seed_think"),
    "Muse": ('<atem:function_calls><atem:invoke name="f">', "muse", None),
    "Step 3": ('<｜tool_calls_begin｜><steptml:invoke name="f">', "step3", None),
    "MiniMax M3": (
        "{% set ns = ']<]minimax[>[' %}]<]minimax[>[<tool_call><mm:think>",
        "minimax_m3",
        "minimax_m3",
    ),
    "MiniCPM 5": ('{{ tools }}<function name="f"><param name="a">', "minicpm5", None),
    "Kimi K3": ("<|open|>message<|sep|><|close|>message<|sep|><|end_of_msg|>", "kimi_k3", "kimi_k3"),
    "Laguna": ("{{ tools }}<tool_call>{{ name }}<arg_key>k</arg_key>", "glm", None),
    "Granite 3": ("{{ tools }}<|tool_call|>[", "granite", None),
    "Granite 4": ('{{ tools }}<tool_call>\n{"name": <function-name>}</tool_call>', "hermes", None),
    "Granite 20B": ("{{ tools }}<function_call>", "granite_20b_fc", None),
    "Jamba": ("{{ tools }}<tool_calls>[", "jamba", None),
    "Nemotron Nano 2": ("{{ tools }}<TOOLCALL>[", "nemotron", None),
    "Command A": ("{{ tools }}<|START_ACTION|>[", "cohere", None),
    "Apertus": ("{{ tools }}<|tools_prefix|>[", "apertus", None),
    "InternLM 3": ("{{ tools }}<|action_start|><|plugin|>", "internlm", None),
    "GigaChat 3": ("{{ tools }}function call<|role_sep|>", "gigachat3", None),
    "Llama 4": ("{{ tools }}<|python_start|>", "pythonic", None),
    "OLMo 3": ("{{ tools }}<function_calls>", "olmo3", None),
    "SmolLM 2": ("<|im_start|>{{ m.role }}", None, None),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_tells_its_formats(family: str) -> None:
    template, tool, reasoning = TEMPLATES[family]
    found_tool, found_reasoning = detect(template, _NoTokens())
    assert (found_tool.name if found_tool else None) == tool
    assert (found_reasoning.name if found_reasoning else None) == reasoning


def test_a_silent_template_leaves_the_tokens_to_tell() -> None:
    _, reasoning = detect("<|im_start|>", new_tokenizer())
    assert reasoning is not None
    assert reasoning.name == "think"
    tool, _ = detect("", new_tokenizer())
    assert tool is not None
    assert tool.name == "mistral"


def test_every_other_name_of_a_format_is_one_of_a_format() -> None:
    assert set(TOOL_PARSER_NAMES.values()) <= set(TOOL_FORMATS)
    assert not set(TOOL_PARSER_NAMES) & set(TOOL_FORMATS)


def test_the_named_format_goes_before_the_templates() -> None:
    renderer = ChatRenderer(new_tokenizer(), tool_format=TOOL_FORMATS["llama3"])  # the template shows Hermes
    tool = Tool("clock", "", {})
    request = ChatRequest([Message("user", (TextPart("hi"),))], SamplingParams(), (tool,))
    parser = renderer.render(request).new_parser()
    events = [*parser.push('{"name": "clock", "parameters": {}}'), *parser.finish()]
    assert isinstance(events[0], ToolCallStarted)


class _NoTokens:
    added_tokens_decoder: ClassVar[dict[int, object]] = {}
