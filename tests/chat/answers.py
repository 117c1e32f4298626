"""Answers as models write them, a few for each tool format, and what they mean."""

from __future__ import annotations

import json
from typing import Any

from outrider.chat.conversation import Tool

WEATHER = Tool(
    "get_weather",
    "Weather at a place",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "string", "enum": ["metric", "imperial"]},
        },
        "required": ["city"],
    },
)
CLOCK = Tool("clock", "The time", {})
TOOLS = {tool.name: tool for tool in (WEATHER, CLOCK)}

PARIS = ("get_weather", {"city": "Paris", "days": 2})
TRICKY = ("get_weather", {"city": 'a "quoted" {brace} \\ </tool_call> é'})
NOW = ("clock", {})

Meaning = list[str | tuple[str, dict[str, Any]]]  # text, or calls


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# format -> answers, each with what it means: text and calls in order
ANSWERS: dict[str, list[tuple[str, Meaning]]] = {
    "hermes": [
        (
            f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {_json(PARIS[1])}}}\n</tool_call>',
            ["I look.", PARIS],
        ),
        (
            f'<tool_call>{{"name": "get_weather", "arguments": {_json(TRICKY[1])}}}</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n',
            [TRICKY, NOW],
        ),
        ('<tool_call>{"name": "clock", "arguments": {}}<tool_call>{"name": "clock"}', [NOW, NOW]),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call> done', [NOW, "done"]),
    ],
    "qwen3_coder": [
        (
            "RequiredElement.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            ["RequiredElement.", PARIS],
        ),
        (
            f"<function=get_weather>\n<parameter=city>\n{TRICKY[1]['city']}\n</parameter>\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
            [TRICKY, NOW],
        ),
        (
            "<function=get_weather><parameter=city>a </function> b</parameter></function></tool_call>",
            [("get_weather", {"city": "a </function> b"})],
        ),
    ],
    "glm": [
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            [PARIS],
        ),
        (
            f"So:\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>{TRICKY[1]['city']}</arg_value>"
            "</tool_call><tool_call>clock</tool_call>",
            ["So:", TRICKY, NOW],
        ),
    ],
    "longcat": [
        (
            "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
            "<longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
            "<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>",
            [PARIS],
        ),
    ],
    "llama3": [
        (f'{{"name": "get_weather", "parameters": {_json(PARIS[1])}}}', [PARIS]),
        (f'<|python_tag|>{{"name": "get_weather", "parameters": {_json(TRICKY[1])}}}', [TRICKY]),
        ('{"name": "clock", "parameters": {}}; {"type": "function", "name": "clock"}', [NOW, NOW]),
        ('It is {"name": "clock", "parameters": {}}', ['It is {"name": "clock", "parameters": {}}']),
        ('{"colour": "red"} is an object', ['{"colour": "red"} is an object']),
    ],
    "mistral": [
        (f"[TOOL_CALLS]get_weather[ARGS]{_json(PARIS[1])}[TOOL_CALLS]clock[ARGS]{{}}", [PARIS, NOW]),
        (f"Well.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{_json(TRICKY[1])}", ["Well.", TRICKY]),
    ],
    "mistral_list": [
        (
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_json(TRICKY[1])}}}, '
            '{"name": "clock", "arguments": {}}]',
            [TRICKY, NOW],
        ),
    ],
    "deepseek": [
        (
            f"Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_json(PARIS[1])}"
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ["Yes.", PARIS, NOW],
        ),
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{_json(TRICKY[1])}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n"
            "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [TRICKY, NOW],
        ),
    ],
    "deepseek_v32": [
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            [PARIS],
        ),
    ],
    "deepseek_v4": [
        (
            'I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
            ["I look.", PARIS, NOW],
        ),
        (  # without the attribute `string`, the schema tells the type
            '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather">'
            '<｜DSML｜parameter name="city">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
            [("get_weather", {"city": "2"})],
        ),
    ],
    "deepseek_v41": [
        (
            'I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
            '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
            '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n'
            '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="clock">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
            ["I look.", PARIS, NOW],
        ),
    ],
    "dots": [
        (
            'So.\n<dots_function_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
            "</dots_function_call>",
            ["So.", PARIS],
        ),
    ],
    "hy_v3": [
        (
            "Checking.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
            "</tool_call>\n<tool_call>clock<tool_sep>\n</tool_call>\n</tool_calls>",
            ["Checking.", PARIS, NOW],
        ),
        ("<tool_calls><tool_call>clock<tool_sep></tool_call></tool_calls>", [NOW]),
    ],
    "hy_v4": [
        (
            "Checking.<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
            "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>clock</tool_call>"
            "</tool_calls>",
            ["Checking.", PARIS, NOW],
        ),
    ],
    "solar_open": [
        (
            "<|content|>I look.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5"
            f"<|tool_call:name|>get_weather<|tool_call:args|>{_json(TRICKY[1])}<|tool_call:end|>"
            "<|tool_call:begin|><|tool_call:name|>clock<|tool_call:args|>{}<|tool_call:end|><|calls|>",
            ["I look.", TRICKY, NOW],
        ),
        ("<|content|>Hello.<|flush|>", ["Hello."]),
    ],
    "solar_open2": [
        (
            "I look.<|tool_call:start|>get_weather\n"
            "<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
            "<|tool_arg:start|>days<|tool_arg:value|>2<|tool_arg:end|>\n<|tool_call:end|>"
            "<|tool_call:start|>clock\n<|tool_call:end|>",
            ["I look.", PARIS, NOW],
        ),
    ],
    "k2_horizon": [
        (
            "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n"
            "<ifm|arg_value>Paris</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n"
            "<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>2</ifm|arg_value>\n</ifm|tool_call>\n"
            '<ifm|tool_call>{"name": "clock", "arguments": {}}</ifm|tool_call>\n</ifm|tool_calls>',
            [PARIS, NOW],
        ),
    ],
    "plamo3": [
        (
            "Yes.<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
            "<|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{_json(TRICKY[1])}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
            "<|plamo:end_tool_requests:plamo|>",
            ["Yes.", TRICKY],
        ),
    ],
    "inkling": [
        (
            "<|content_text|>I look.<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>"
            f'{{"name":"get_weather","args":{_json(TRICKY[1])}}}<|end_message|><|message_model|>'
            '<|content_invoke_tool_json|>{"name": "clock", "args": {}}<|end_message|>'
            "<|content_model_end_sampling|>",
            ["I look.", TRICKY, NOW],
        ),
        ("Hello without a marker.", ["Hello without a marker."]),
        ("<|content_text|>Hello.<|end_message|><|message_model|>get_wea", ["Hello."]),
    ],
    "minimax": [
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n'
            "</minimax:tool_call>",
            [PARIS, NOW],
        ),
    ],
    "kimi": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            f"{_json(PARIS[1])}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            [PARIS, NOW],
        ),
    ],
    "gemma4": [
        ('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>', [PARIS]),
        (
            '<|tool_call>call:get_weather{city:<|"|>a, b:{c} <tool_call|> "d"<|"|>}<tool_call|>'
            "<|tool_call>call:clock{}<tool_call|>",
            [("get_weather", {"city": 'a, b:{c} <tool_call|> "d"'}), NOW],
        ),
    ],
    "function_gemma": [
        (
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
            [PARIS],
        ),
    ],
    "gemma3": [
        ('Let me see.\n```tool_code\nget_weather(city="Paris", days=2)\n```', ["Let me see.", PARIS]),
        ("```tool_code\nprint(clock())\n```", [NOW]),
        ('```tool_code\n{"name": "clock", "parameters": {}}\n```', [NOW]),
        ("```python\nprint(1)\n```", ["```python\nprint(1)\n```"]),
    ],
    "lfm2": [
        (
            "<|tool_call_start|>[get_weather(city='Paris', days=2)]<|tool_call_end|>",
            [PARIS],
        ),
        (
            '<|tool_call_start|>[get_weather(city="Paris", days=2), clock()]<|tool_call_end|>ok',
            [PARIS, NOW, "ok"],
        ),
    ],
    "seed_oss": [
        (
            "So.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
            "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
            ["So.", PARIS],
        ),
    ],
    "muse": [
        (
            '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
            '<atem:parameter name="city">Paris</atem:parameter>\n'
            '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n<atem:invoke name="clock">\n'
            "</atem:invoke>\n</atem:function_calls>",
            [PARIS, NOW],
        ),
    ],
    "step3": [
        (
            "Yes.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris</steptml:parameter>'
            '<steptml:parameter name="days">2</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="clock"></steptml:invoke>'
            "<｜tool_call_end｜><｜tool_calls_end｜>",
            ["Yes.", PARIS, NOW],
        ),
    ],
    "minimax_m3": [
        (
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">\n'
            "]<]minimax[>[<city>Paris]<]minimax[>[</city>\n]<]minimax[>[<days>2]<]minimax[>[</days>\n"
            ']<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="clock">]<]minimax[>[</invoke>'
            "]<]minimax[>[</tool_call>",
            [PARIS, NOW],
        ),
    ],
    "minicpm5": [
        (
            'I look.<function name="get_weather"><param name="city">Paris</param><param name="days">2</param>'
            '</function>\n<function name="clock"></function>',
            ["I look.", PARIS, NOW],
        ),
        (
            '<function name="get_weather"><param name="city"><![CDATA[a </param> & </function>]]></param>'
            "</function>",
            [("get_weather", {"city": "a </param> & </function>"})],
        ),
    ],
    "kimi_k3": [
        (
            'Well.<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
            '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
            '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
            '<|open|>call tool="clock" index="2"<|sep|><|open|>json type="object"<|sep|>{}'
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            ["Well.", PARIS, NOW],
        ),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "get_weather", "arguments": {_json(TRICKY[1])}}}]', [TRICKY]),
        ('Now: <|tool_call|> {"name": "clock", "arguments": {}}', ["Now:", NOW]),
    ],
    "granite_20b_fc": [
        (
            f'<function_call> {{"name": "get_weather", "arguments": {_json(PARIS[1])}}} '
            '<function_call> {"name": "clock", "arguments": {}}',
            [PARIS, NOW],
        ),
    ],
    "jamba": [
        (
            f'<tool_calls>[{{"name": "get_weather", "arguments": {_json(TRICKY[1])}}}, '
            '{"name": "clock", "arguments": {}}]</tool_calls>',
            [TRICKY, NOW],
        ),
    ],
    "minimax_m1": [
        (
            f'<tool_calls>\n{{"name": "get_weather", "arguments": {_json(PARIS[1])}}}\n'
            '{"name": "clock", "arguments": {}}\n</tool_calls>',
            [PARIS, NOW],
        ),
    ],
    "nemotron": [
        (f'<TOOLCALL>[{{"name": "get_weather", "arguments": {_json(PARIS[1])}}}]</TOOLCALL>', [PARIS]),
    ],
    "cohere": [
        (
            "<|START_ACTION|>[\n    "
            f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_json(TRICKY[1])}}},\n    '
            '{"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>',
            [TRICKY, NOW],
        ),
    ],
    "apertus": [
        (
            f'<|tools_prefix|>[{{"get_weather": {_json(PARIS[1])}}}, {{"clock": {{}}}}]<|tools_suffix|>',
            [PARIS, NOW],
        ),
    ],
    "internlm": [
        (
            f'I look.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {_json(PARIS[1])}}}'
            "<|action_end|>",
            ["I look.", PARIS],
        ),
    ],
    "phi4_mini": [
        (
            f'functools[{{"name": "get_weather", "arguments": {_json(TRICKY[1])}}}, '
            '{"name": "clock", "arguments": {}}]',
            [TRICKY, NOW],
        ),
        ("the module functools", ["the module functools"]),
    ],
    "gigachat3": [
        (
            f'function call<|role_sep|>\n{{"name": "get_weather", "arguments": {_json(PARIS[1])}}}',
            [PARIS],
        ),
    ],
    "xlam": [
        (
            f'[{{"name": "get_weather", "arguments": {_json(TRICKY[1])}}}, {{"name": "clock"}}]',
            [TRICKY, NOW],
        ),
        ("[1, 2] is a list", ["[1, 2] is a list"]),
    ],
    "pythonic": [
        ("[get_weather(city='Paris', days=2), clock()]", [PARIS, NOW]),
        ("<|python_start|>[clock()]<|python_end|>", [NOW]),
        ("[a link](https://example.org)", ["[a link](https://example.org)"]),
    ],
    "olmo3": [
        ("<function_calls>\nget_weather(city='Paris', days=2)\nclock()\n</function_calls>", [PARIS, NOW]),
    ],
    "harmony": [
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{_json(PARIS[1])}<|call|>",
            ["I look.", PARIS],
        ),
        (
            "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
            f"{_json(TRICKY[1])}",
            [TRICKY],
        ),
        ("<|channel|>final<|message|>Hello.<|return|>", ["Hello."]),
        ("Hello without a channel.", ["Hello without a channel."]),
    ],
}

# Openings of calls that lead to nothing: text, every character of it.
BROKEN: dict[str, list[str]] = {
    "hermes": [
        "<tool_call>not json</tool_call> and on",
        '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>\n{"name": "clock", "argu',
        "a < b <tool",
        f'<tool_call>{{"name": "clock", "arguments": {"[" * 3000}</tool_call>',
        f'<tool_call>{{"name": "clock", "arguments": {{"a": {"[" * 850}{"]" * 850}}}}}</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call> is a tag, <function=x too",
        "<tool_call>\n<function=clock>\n<parameter=a>\n1",
        "<tool_call><function=clock>stray</function></tool_call>.",
        "</tool_call>",
    ],
    "glm": ["<tool_call></tool_call>", "<tool_call>clock<arg_key>a</arg_key></tool_call>"],
    "llama3": ['{"name": "clock", "para', "{}", '{"name": 3}', "[1]", "<|python_tag|>print(1)"],
    "mistral": ["[TOOL_CALLS]clock{}", "[TOOL_CALLS] nothing", "[TOOL_CALLS]clock[ARGS]{"],
    "mistral_list": ['[TOOL_CALLS] [{"name": "clock"}, 3]', "[TOOL_CALLS][]"],
    "deepseek": [
        "<｜tool▁calls▁begin｜> no",
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{} x<｜tool▁call▁end｜>",
    ],
    "kimi": ["<|tool_call_begin|>clock<|tool_call_argument_begin|>{}<|tool_call_end|>"],
    "deepseek_v4": [
        '<｜DSML｜tool_calls><｜DSML｜invoke name="clock">x</｜DSML｜invoke>',
        "<｜DSML｜tool_calls> no",
    ],
    "hy_v3": ["<tool_calls> is a tag", "<tool_calls><tool_call><tool_sep></tool_call></tool_calls>"],
    "hy_v4": ["<tool_call>clock<arg_key>a</arg_key></tool_call>"],
    "solar_open2": ["<|tool_call:start|>clock\n<|tool_arg:start|>a<|tool_call:end|>"],
    "plamo3": ["<|plamo:begin_tool_request:plamo|>clock<|plamo:end_tool_request:plamo|>"],
    "minimax": ['<minimax:tool_call><invoke name="clock">x</invoke>'],
    "gemma4": ['<|tool_call>call:clock{a:<|"|>}<tool_call|>', "<|tool_call>clock{}<tool_call|>"],
    "gemma3": [
        "```tool_code\nimport os\n```",
        "```tool_code\nclock(1)\n```",
        "```tool_code\nclock(a=b)\n```",
        "```tool_code\nclock(a=[{1}])\n```",
        "```tool_code\nclock(a={(1, 2): b'3'})\n```",
        f"```tool_code\nclock(a=0x{'f' * 400} + 1j)\n```",
        f"```tool_code\nclock{'.a' * 400}(a=1)\n```",
    ],
    "seed_oss": ["<seed:tool_call> is a tag", "<seed:tool_call>\n<function=clock>x</function>"],
    "minimax_m3": [
        ']<]minimax[>[<invoke name="clock">]<]minimax[>[<a>1]<]minimax[>[</b>]<]minimax[>[</invoke>'
    ],
    "minicpm5": ['<function name="clock"><param name="a">1</function>', "<function name=clock></function>"],
    "kimi_k3": ["<|open|>call<|sep|><|close|>call<|sep|>", "<|open|>tools<|sep|> none"],
    "granite": ["<|tool_call|>[1]", "<|tool_call|>nothing"],
    "jamba": ["<tool_calls></tool_calls>", "<tool_calls>[1]</tool_calls>"],
    "apertus": ['<|tools_prefix|>[{"clock": {}, "b": {}}]<|tools_suffix|>'],
    "lfm2": ["<|tool_call_start|>[clock(**x)]<|tool_call_end|>"],
}
