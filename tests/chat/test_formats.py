"""Which formats a chat template speaks, told from its text."""

from __future__ import annotations

from typing import ClassVar

import pytest
from chat_tokenizers import BARE, SPECIAL, new_tokenizer, plain_tokenizer

from outrider.chat.conversation import ChatRequest, Message, TextPart, Tool
from outrider.chat.events import ToolCallArguments, ToolCallEnded, ToolCallStarted
from outrider.chat.formats import TOOL_FORMATS, TOOL_PARSER_NAMES, detect, think, tool_format_named
from outrider.chat.renderer import ChatRenderer
from outrider.config import InvalidConfig
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
    "DeepSeek V3.2": ("<｜DSML｜function_calls>{{ thinking_end }}</think>", "deepseek_v32", "think"),
    "DeepSeek V4": ("<｜DSML｜tool_calls></think>", "deepseek_v4", "think"),
    "DeepSeek V4.1": ("<｜DSML｜ calls></think>", "deepseek_v41", "think"),
    "Dots": ('{{ tools }}<dots_function_call><invoke name="f">', "dots", None),
    "Hy3": ("{{ tools }}<tool_calls><tool_call>f<tool_sep><arg_key><think></think>", "hy_v3", "think"),
    "Hy4": ("{{ tools }}<tool_calls><tool_call>f<arg_key><think></think>", "hy_v4", "think"),
    "Ling 3": ("{{ tools }}<tool_call>f<arg_key><think></think>", "glm", "think"),
    "Solar Open": (
        "<|begin|>assistant<|think|><|content|><|flush|><|tool_call:args|>",
        "solar_open",
        "solar_open",
    ),
    "Solar Open 2": ("<|tool_call:start|><|tool_arg:start|><|think:start|>", "solar_open2", "solar_open2"),
    "K2 Horizon": ("{{ tools }}<ifm|tool_calls><ifm|tool_call><ifm|think>", "k2_horizon", "k2_horizon"),
    "PLaMo 3": (
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_think:plamo|>",
        "plamo3",
        "plamo3",
    ),
    "Inkling": (
        "<|message_model|><|content_thinking|><|content_invoke_tool_json|>",
        "inkling",
        "inkling",
    ),
    "Muse Glimmer": (
        "<|start|>assistant to=self<|message|><atem:function_calls><|eom|>",
        "muse",
        "muse",
    ),
    "Command A+": ("{{ tools }}<|START_THINKING|><|START_ACTION|>[<|START_TEXT|>", "cohere", "cohere"),
    "ERNIE 4.5": ("{{ tools }}<tool_call></think>\n\n\n<response>", "hermes", "ernie45"),
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


def test_a_token_tells_deepseek_v32_from_v3() -> None:
    special = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "｜DSML｜")
    for tokens, format in ((special, "deepseek_v32"), (special[:2], "deepseek")):
        tool, _ = detect("", plain_tokenizer(None, (*SPECIAL[:2], *tokens)))
        assert tool is not None
        assert tool.name == format


def test_every_other_name_of_a_format_is_one_of_a_format() -> None:
    assert set(TOOL_PARSER_NAMES.values()) <= set(TOOL_FORMATS)
    assert not set(TOOL_PARSER_NAMES) & set(TOOL_FORMATS)


# The names in vLLM's list of tool parsers (0.33.0), and those that its forks for single models add.
VLLM_PARSERS = (  # noqa: SIM905
    "dots deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 cohere_command3 "
    "cohere_command4 ernie45 glm45 glm47 ling3 granite-20b-fc granite granite4 hermes hf beam "
    "poolside_v1 hunyuan_a13b hy_v3 hy_v4 internlm jamba lfm2 kimi_k2 kimi_k3 k2_horizon llama3_json "
    "llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 plamo3 muse "
    "muse_glimmer musespark1x openai phi4_mini_json pythonic qwen3_coder qwen3_json qwen3_xml seed_oss "
    "step3 step3p5 step5 inkling xlam gigachat3 functiongemma gemma4 apertus solar_open2"
).split()


@pytest.mark.parametrize("name", VLLM_PARSERS)
def test_every_parser_of_vllm_has_a_format_or_is_refused_with_the_reason(name: str) -> None:
    if name in ("hf", "beam"):
        with pytest.raises(
            InvalidConfig, match=f"{name} is not supported: it reads calls with the response_t"
        ):
            tool_format_named(name)
    else:
        assert tool_format_named(name).name in TOOL_FORMATS


@pytest.mark.parametrize("name", [None, "hy_v3"])
def test_the_tags_of_hunyuan_have_the_suffix_of_the_tokenizer(name: str | None) -> None:
    tags = ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    special = tuple(f"<{slash}{tag}:open>" for tag in tags for slash in ("", "/"))
    tokenizer = plain_tokenizer(BARE, (*SPECIAL[:2], *special))
    renderer = ChatRenderer(tokenizer, tool_format=None if name is None else tool_format_named(name))
    request = ChatRequest([Message("user", (TextPart("hi"),))], SamplingParams(), (Tool("clock", "", {}),))
    parser = renderer.render(request).new_parser()
    text = "<tool_calls:open>\n<tool_call:open>clock<tool_sep:open>\n</tool_call:open>\n</tool_calls:open>"
    events = [*parser.push(text), *parser.finish()]
    assert [type(event) for event in events] == [ToolCallStarted, ToolCallArguments, ToolCallEnded]


def test_the_tags_of_reasoning_have_the_suffix_of_the_tokenizer() -> None:
    found = think.for_tokens(None, {"<think:open>", "</think:open>", "<tool_calls:open>"})
    assert found is not None
    assert (found.opening, found.closing) == ("<think:open>", "</think:open>")
    assert think.for_tokens(think.THINK, {"<think>", "</think>", "<think:x>", "</think:x>"}) is think.THINK
    assert think.for_tokens(think.SEED, {"<think:x>", "</think:x>"}) is think.SEED
    assert think.for_tokens(None, {"<think:x>"}) is None


def test_the_named_format_goes_before_the_templates() -> None:
    renderer = ChatRenderer(new_tokenizer(), tool_format=TOOL_FORMATS["llama3"])  # the template shows Hermes
    tool = Tool("clock", "", {})
    request = ChatRequest([Message("user", (TextPart("hi"),))], SamplingParams(), (tool,))
    parser = renderer.render(request).new_parser()
    events = [*parser.push('{"name": "clock", "parameters": {}}'), *parser.finish()]
    assert isinstance(events[0], ToolCallStarted)


class _NoTokens:
    added_tokens_decoder: ClassVar[dict[int, object]] = {}
