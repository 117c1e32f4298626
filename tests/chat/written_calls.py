"""Calls as each family's template writes them: for each tool format a function from calls to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]


def js(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """As templates write an argument between tags: strings as they are, other values as JSON."""
    return value if isinstance(value, str) else js(value)


def each(
    call: Callable[[str, dict[str, Any]], str], between: str = "", around: tuple[str, str] = ("", "")
) -> Writer:
    return lambda calls: around[0] + between.join(call(*one) for one in calls) + around[1]


def tagged(argument: Callable[[str, Any], str]) -> Callable[[dict[str, Any]], str]:
    return lambda arguments: "".join(argument(name, value) for name, value in arguments.items())


def named(name: str, arguments: dict[str, Any]) -> str:
    return js({"name": name, "arguments": arguments})


def _parameters(name: str, arguments: dict[str, Any]) -> str:
    return js({"name": name, "parameters": arguments})


def harmony(calls: Sequence[Call]) -> str:
    (name, arguments), *_ = calls
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{js(arguments)}<|call|>"


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma(quote: str) -> Callable[[Any], str]:
    def value(found: Any) -> str:
        if isinstance(found, str):
            return quote + found + quote
        if isinstance(found, dict):
            return "{" + ",".join(f"{key}:{value(member)}" for key, member in found.items()) + "}"
        return "[" + ",".join(map(value, found)) + "]" if isinstance(found, list) else js(found)

    return value


GEMMA4 = gemma('<|"|>')


def numbered(calls: Sequence[Call]) -> str:
    begin, argument, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    inner = "".join(
        f"{begin}functions.{name}:{i}{argument}{js(given)}{end}" for i, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def xtml(calls: Sequence[Call]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    argument = tagged(
        lambda key, value: (
            f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{bare(value)}'
            "<|close|>argument<|sep|>"
        )
    )
    inner = "".join(
        f'<|open|>call tool="{name}" index="{i}"<|sep|>{argument(given)}<|close|>call<|sep|>'
        for i, (name, given) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def minimax_m3(name: str, arguments: dict[str, Any]) -> str:
    mark = "]<]minimax[>["

    def element(tag: str, value: Any) -> str:
        inner = bare(value)
        if isinstance(value, dict) and value:
            inner = "".join(element(key, member) for key, member in value.items())
        elif isinstance(value, list) and value:
            inner = "".join(element("item", member) for member in value)
        return f"{mark}<{tag}>{inner}{mark}</{tag}>"

    inner = "".join(element(key, value) for key, value in arguments.items())
    return f'{mark}<invoke name="{name}">{inner}{mark}</invoke>'


def minicpm5(name: str, arguments: dict[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        text = bare(value)
        text = f"<![CDATA[{text}]]>" if any(c in text for c in "<&\n") else text
        return f'<param name="{key}">{text}</param>'

    return f'<function name="{name}">{tagged(parameter)(arguments)}</function>'


def invoked(mark: str) -> Callable[[str, dict[str, Any]], str]:
    parameter = tagged(lambda key, value: f'<{mark}parameter name="{key}">{bare(value)}</{mark}parameter>\n')
    return lambda name, given: f'<{mark}invoke name="{name}">\n{parameter(given)}</{mark}invoke>\n'


def dsml(mark: str, outer: str) -> Writer:
    parameter = tagged(
        lambda key, value: (
            f'<{mark}parameter name="{key}" string="{js(isinstance(value, str))}">'
            f"{bare(value)}</{mark}parameter>\n"
        )
    )
    return each(
        lambda name, given: f'<{mark}invoke name="{name}">\n{parameter(given)}</{mark}invoke>\n',
        "",
        (f"<{mark}{outer}>\n", f"</{mark}{outer}>"),
    )


def glm(prefix: str) -> Callable[[str, dict[str, Any]], str]:
    pair = tagged(
        lambda key, value: (
            f"<{prefix}arg_key>{key}</{prefix}arg_key>\n"
            f"<{prefix}arg_value>{bare(value)}</{prefix}arg_value>\n"
        )
    )
    return lambda name, given: f"<{prefix}tool_call>{name}\n{pair(given)}</{prefix}tool_call>"


def hunyuan(separator: str, blank: str) -> Writer:
    pair = tagged(
        lambda key, value: f"<arg_key>{key}</arg_key>{blank}<arg_value>{bare(value)}</arg_value>{blank}"
    )
    return each(
        lambda name, given: f"<tool_call>{name}{separator}{blank}{pair(given)}</tool_call>{blank}",
        "",
        (f"<tool_calls>{blank}", "</tool_calls>"),
    )


def solar(name: str, arguments: dict[str, Any]) -> str:
    argument = tagged(
        lambda key, value: f"<|tool_arg:start|>{key}<|tool_arg:value|>{bare(value)}<|tool_arg:end|>\n"
    )
    return f"<|tool_call:start|>{name}\n{argument(arguments)}<|tool_call:end|>"


def solar_open(name: str, arguments: dict[str, Any]) -> str:
    named = f"a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{js(arguments)}"
    return f"<|tool_call:begin|>{named}<|tool_call:end|>"


def ifm(name: str, arguments: dict[str, Any]) -> str:
    pair = tagged(
        lambda key, value: f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{bare(value)}</ifm|arg_value>\n"
    )
    return f"<ifm|tool_call>{name}\n{pair(arguments)}</ifm|tool_call>\n"


def plamo(name: str, arguments: dict[str, Any]) -> str:
    def between(part: str, text: str) -> str:
        return f"<|plamo:begin_{part}:plamo|>{text}<|plamo:end_{part}:plamo|>"

    content = f"<|plamo:constrain|>json<|plamo:msg|>{js(arguments)}"
    return between("tool_request", between("tool_name", name) + between("tool_arguments", content))


def inkling(calls: Sequence[Call]) -> str:
    """The prompt has written the start of the first message."""
    texts = [
        f"{name}<|content_invoke_tool_json|>"
        + json.dumps({"name": name, "args": given}, ensure_ascii=False, separators=(",", ":"))
        for name, given in calls
    ]
    return "<|end_message|><|message_model|>".join(texts) + "<|end_message|>"


def cohere(calls: Sequence[Call]) -> str:
    listed = [
        js({"tool_call_id": str(i), "tool_name": name, "parameters": given})
        for i, (name, given) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(listed) + "\n]<|END_ACTION|>"


def step3(name: str, arguments: dict[str, Any]) -> str:
    parameter = tagged(
        lambda key, value: f'<steptml:parameter name="{key}">{bare(value)}</steptml:parameter>'
    )
    invoke = f'<steptml:invoke name="{name}">{parameter(arguments)}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"


_qwen = tagged(lambda key, value: f"<parameter={key}>\n{bare(value)}\n</parameter>\n")
_seed = tagged(lambda key, value: f"<parameter={key}>{bare(value)}</parameter>\n")
WRITERS: dict[str, Writer] = {
    "hermes": each(lambda *call: f"<tool_call>\n{named(*call)}\n</tool_call>", "\n"),
    "qwen3_coder": each(
        lambda name, given: f"<tool_call>\n<function={name}>\n{_qwen(given)}</function>\n</tool_call>", "\n"
    ),
    "seed_oss": each(
        lambda name, given: (
            f"<seed:tool_call>\n<function={name}>\n{_seed(given)}</function>\n</seed:tool_call>"
        )
    ),
    "glm": each(glm(""), "\n"),
    "longcat": each(glm("longcat_"), "\n"),
    "llama3": each(_parameters, "; "),
    "mistral": each(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{js(given)}"),
    "mistral_list": each(named, ", ", ("[TOOL_CALLS] [", "]")),
    "deepseek": each(
        lambda name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{js(given)}<｜tool▁call▁end｜>",
        "",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v3": each(
        lambda name, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{js(given)}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v32": dsml("｜DSML｜", "function_calls"),
    "deepseek_v4": dsml("｜DSML｜", "tool_calls"),
    "deepseek_v41": dsml("｜DSML｜ ", "calls"),
    "minimax": each(invoked(""), "", ("<minimax:tool_call>\n", "</minimax:tool_call>")),
    "dots": each(invoked(""), "", ("<dots_function_call>\n", "</dots_function_call>")),
    "hy_v3": hunyuan("<tool_sep>", "\n"),
    "hy_v4": hunyuan("", ""),
    "solar_open": each(solar_open, "", ("<|tool_calls|>", "<|calls|>")),
    "solar_open2": each(solar, "\n"),
    "k2_horizon": each(ifm, "", ("<ifm|tool_calls>\n", "</ifm|tool_calls>")),
    "plamo3": each(plamo, "", ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>")),
    "inkling": inkling,
    "muse": each(invoked("atem:"), "", ("<atem:function_calls>\n", "</atem:function_calls>")),
    "step3": each(step3, "", ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")),
    "minimax_m3": each(minimax_m3, "", ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>")),
    "minicpm5": each(minicpm5),
    "kimi": numbered,
    "kimi_k3": xtml,
    "gemma4": each(lambda name, given: f"<|tool_call>call:{name}{GEMMA4(given)}<tool_call|>"),
    "function_gemma": each(
        lambda name, given: f"<start_function_call>call:{name}{gemma('<escape>')(given)}<end_function_call>"
    ),
    "gemma3": each(python, "\n", ("```tool_code\n", "\n```")),
    "lfm2": each(python, ", ", ("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "pythonic": each(python, ", ", ("<|python_start|>[", "]<|python_end|>")),
    "olmo3": each(python, "\n", ("<function_calls>\n", "\n</function_calls>")),
    "granite": each(named, ", ", ("<|tool_call|>[", "]")),
    "granite_20b_fc": each(lambda *call: f"<function_call> {named(*call)}", "\n"),
    "jamba": each(named, ", ", ("<tool_calls>[", "]</tool_calls>")),
    "minimax_m1": each(named, "\n", ("<tool_calls>\n", "\n</tool_calls>")),
    "nemotron": each(named, ", ", ("<TOOLCALL>[", "]</TOOLCALL>")),
    "cohere": cohere,
    "apertus": each(lambda name, given: js({name: given}), ", ", ("<|tools_prefix|>[", "]<|tools_suffix|>")),
    "internlm": each(
        lambda name, given: f"<|action_start|><|plugin|>{_parameters(name, given)}<|action_end|>"
    ),
    "phi4_mini": each(named, ", ", ("functools[", "]")),
    "gigachat3": lambda calls: f"function call<|role_sep|>\n{named(*calls[0])}",
    "xlam": each(named, ", ", ("[", "]")),
    "harmony": harmony,
}
