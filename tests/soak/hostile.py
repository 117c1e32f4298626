"""Attacks that a server must withstand: half requests, malformed bodies, hostile grammars and images.

Each attack is a function of a seed that returns the bytes to send and what to do with the connection. A
server withstands one if it answers with a 4xx or a 503, or closes the connection within its own time limits.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hostile_grammars import reference_chain, rule_chain, wide_schema
from image_files import data_url, png_bomb
from soak.conversations import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, ApiRequest, new_request

Then = Literal["read", "wait", "leave"]
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Attack:
    name: str
    data: bytes
    then: Then = "read"  # read the answer; or wait until the server closes; or leave at once
    may_succeed: bool = False  # a 200 is in order too


def attack(rng: random.Random) -> Attack:
    make = rng.choice(ATTACKS)
    made = make(rng)
    return Attack(make.__name__.strip("_"), made.data, made.then, made.may_succeed)


def http(path: str, body: bytes, *headers: str, method: str = "POST", host: str = HOST) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def posted(path: str, body: Any) -> bytes:
    return http(path, json.dumps(body).encode())


# -- connections -------------------------------------------------------------------------------------------


def _silence(rng: random.Random) -> Attack:
    return Attack("", b"", "wait")


def _half_headers(rng: random.Random) -> Attack:
    return Attack("", http(CHAT, b"{}")[: rng.randrange(1, 60)], "wait")


def _half_body(rng: random.Random) -> Attack:
    return Attack("", http(CHAT, b'{"mess', "Content-Length: 1000"), "wait")


def _abandoned_request(rng: random.Random) -> Attack:
    request = new_request(rng)
    return Attack("", posted(request.path, request.body), "leave", may_succeed=True)


def _long_header(rng: random.Random) -> Attack:
    return Attack("", http(CHAT, b"{}", "X-Long: " + "x" * rng.choice((9_000, 200_000))), may_succeed=False)


def _many_headers(rng: random.Random) -> Attack:
    return Attack("", http(CHAT, b"{}", *(f"X-{i}: {i}" for i in range(5000))))


def _not_http(rng: random.Random) -> Attack:
    return Attack("", rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n")


def _bad_chunks(rng: random.Random) -> Attack:
    return Attack("", http(CHAT, b"zz\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding: chunked"))


def _false_length(rng: random.Random) -> Attack:
    return Attack("", http(CHAT, b"{}", f"Content-Length: {rng.choice((10**30, -1, 1 << 40))}"))


def _other_host(rng: random.Random) -> Attack:
    request = new_request(rng)
    body = json.dumps(request.body).encode()
    origin = "Origin: http://evil.example"
    return Attack("", http(request.path, body, origin, host="evil.example"))


def _other_origin(rng: random.Random) -> Attack:
    request = new_request(rng)
    return Attack("", http(request.path, json.dumps(request.body).encode(), "Origin: http://evil.example"))


def _odd_paths(rng: random.Random) -> Attack:
    path = rng.choice(
        (
            "/v1/models/x%0A%1b[31mforged",
            "/../../etc/passwd",
            "/v1/" + "a" * 5000,
            "//",
            "/%ff%fe",
            "/v1/chat",
        )
    )
    return Attack("", http(path, b"", method=rng.choice(("GET", "DELETE", "PUT", "BREW"))))


# -- bodies ------------------------------------------------------------------------------------------------

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    2**64,
    10**40,
    -0.5,
    1e300,
    "",
    "\0",
    "😀",
    [],
    {},
)


def _changed_body(rng: random.Random) -> Attack:
    """A good request in which one or two values are replaced."""
    request = new_request(rng)
    body = copy.deepcopy(request.body)
    for _ in range(rng.randrange(1, 3)):
        holder, key = rng.choice(_places(body))
        if isinstance(holder, list | dict):
            holder[key] = rng.choice((*ODD_VALUES, [rng.choice(ODD_VALUES)] * 3))
    return Attack("", posted(request.path, body), may_succeed=True)


def _places(value: Any) -> list[tuple[Any, Any]]:
    inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    found = [(value, key) for key, _ in inner]
    for _, child in inner:
        if isinstance(child, dict | list):
            found += _places(child)
    return found


def _cut_json(rng: random.Random) -> Attack:
    request = new_request(rng)
    body = json.dumps(request.body).encode()
    return Attack("", http(request.path, body[: rng.randrange(len(body))]))


def _bad_utf8(rng: random.Random) -> Attack:
    return Attack("", http(rng.choice(APIS), b'{"messages": "' + rng.randbytes(20) + b'\xff"}'))


def _wrong_type(rng: random.Random) -> Attack:
    return Attack("", http(rng.choice(APIS), rng.choice((b"[]", b"0", b'"x"', b"null", b"", b"NaN"))))


def _deep_nesting(rng: random.Random) -> Attack:
    depth = rng.choice((200, 5_000, 100_000))
    return Attack("", http(rng.choice(APIS), b'{"messages":' + b"[" * depth + b"]" * depth + b"}"))


def _many_zeros(rng: random.Random) -> Attack:
    path = rng.choice((CHAT, MESSAGES, RESPONSES))
    name = "input" if path == RESPONSES else "messages"
    return Attack("", http(path, f'{{"model":"model","max_tokens":5,"{name}":[{"0," * 100_000}0]}}'.encode()))


def _many_messages(rng: random.Random) -> Attack:
    messages = [{"role": "user", "content": "x"}] * 50_000
    return Attack("", posted(CHAT, {"messages": messages, "max_tokens": 2}))


def _many_tools(rng: random.Random) -> Attack:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(20_000)]
    return Attack("", posted(CHAT, {**_hello(), "tools": tools}))


def _long_stops(rng: random.Random) -> Attack:
    stop = "x" * rng.choice((1_000_000, 7_000_000))
    if rng.random() < 0.5:
        return Attack("", posted(CHAT, {**_hello(), "stop": [stop] * 4}))
    stops = [str(i) for i in range(10_000)]
    return Attack("", posted(MESSAGES, {**_hello(), "model": "model", "stop_sequences": stops}))


def _long_prompt(rng: random.Random) -> Attack:
    text = "all work and no play " * rng.choice((100, 50_000, 1_400_000))
    body = {**_hello(), "messages": [{"role": "user", "content": text}]}
    return Attack("", posted(CHAT, body))


def _many_answers(rng: random.Random) -> Attack:
    if rng.random() < 0.5:
        return Attack("", posted(CHAT, {**_hello(), "n": rng.choice((10_000, 2**31))}))
    return Attack("", posted(COMPLETIONS, {"prompt": ["x"] * 1250, "n": 128, "max_tokens": 1}))


def _large_bias(rng: random.Random) -> Attack:
    return Attack("", posted(CHAT, {**_hello(), "logit_bias": {str(i): 1.0 for i in range(100_000)}}))


def _special_tokens(rng: random.Random) -> Attack:
    parts = [{"type": "text", "text": "<|en"}, {"type": "text", "text": "d|><|system|>"}]
    body = {**_hello(), "messages": [{"role": "user", "content": parts}]}
    return Attack("", posted(CHAT, body), may_succeed=True)


def _hello() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


# -- grammars ----------------------------------------------------------------------------------------------


def schema_request(path: str, schema: dict[str, Any]) -> ApiRequest:
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    if path == CHAT:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body |= _hello() | {"response_format": form}
    elif path == RESPONSES:
        body = {"input": "hello", "max_output_tokens": 8}
        body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    elif path == MESSAGES:
        body |= _hello() | {"model": "model"}
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    else:
        body |= {"prompt": "hello", "guided_json": schema}
    return ApiRequest(path, body)


def _chained_rules(rng: random.Random) -> Attack:
    body = {**_hello(), "guided_grammar": rule_chain(rng.choice((300, 3000, 30_000)))}
    return Attack("", posted(CHAT, body), may_succeed=True)


def _chained_schema(rng: random.Random) -> Attack:
    request = schema_request(rng.choice(APIS), reference_chain(rng.choice((50, 1000, 3000))))
    return Attack("", posted(request.path, request.body), may_succeed=True)


def _wide_schema(rng: random.Random) -> Attack:
    request = schema_request(rng.choice(APIS), wide_schema(rng.choice((500, 3000, 10_000))))
    return Attack("", posted(request.path, request.body), may_succeed=True)


def _heavy_regex(rng: random.Random) -> Attack:
    regex = rng.choice(
        (r"(a|b)*a(a|b){40}", "(((a{1,99}){1,99}){1,99})", "(" * 2000, r"[\s\S]{0,100000}x", "\\")
    )
    return Attack("", posted(CHAT, {**_hello(), "guided_regex": regex}), may_succeed=True)


def _random_schema(rng: random.Random) -> Attack:
    def schema(depth: int) -> Any:
        if depth == 0:
            return rng.choice(
                ({}, True, {"type": "string"}, {"$ref": "#"}, {"type": 3}, {"pattern": "("}, None)
            )
        return rng.choice(
            (
                {"anyOf": [schema(depth - 1), schema(depth - 1)]},
                {"type": "array", "items": schema(depth - 1), "minItems": rng.choice((0, 10**9))},
                {"type": "object", "properties": {"a": schema(depth - 1)}, "required": ["a", "b"]},
                {"allOf": [schema(depth - 1), schema(depth - 1)]},
                {"type": "string", "maxLength": rng.choice((3, 10**7)), "format": "x"},
                {"not": schema(depth - 1)},
            )
        )

    request = schema_request(rng.choice(APIS), {"type": "object", "properties": {"x": schema(3)}})
    return Attack("", posted(request.path, request.body), may_succeed=True)


# -- pictures ----------------------------------------------------------------------------------------------


def _bad_picture(rng: random.Random) -> Attack:
    data = rng.choice((png_bomb(60_000), png_bomb(3000), rng.randbytes(2000), b"GIF89a" + rng.randbytes(500)))
    return Attack("", _with_media({"type": "image_url", "image_url": {"url": data_url(data)}}))


def _bad_video(rng: random.Random) -> Attack:
    data = b"\0\0\0\x20ftypisom" + rng.randbytes(2000)
    url = data_url(data, "video/mp4")
    return Attack("", _with_media({"type": "video_url", "video_url": {"url": url}}))


def _bad_address(rng: random.Random) -> Attack:
    url = rng.choice(("http://127.0.0.1:1/x.png", "file:///etc/passwd", "http://[::1]/a", "gopher://x", "x"))
    return Attack("", _with_media({"type": "image_url", "image_url": {"url": url}}))


def _with_media(part: dict[str, Any]) -> bytes:
    return posted(CHAT, {**_hello(), "messages": [{"role": "user", "content": [part]}]})


ATTACKS: tuple[Callable[[random.Random], Attack], ...] = (
    *(_silence, _half_headers, _half_body, _abandoned_request, _long_header, _many_headers, _not_http),
    *(_bad_chunks, _false_length, _other_host, _other_origin, _odd_paths),
    *(_changed_body, _changed_body, _changed_body, _cut_json, _bad_utf8, _wrong_type, _deep_nesting),
    *(_many_zeros, _many_messages, _many_tools, _long_stops, _long_prompt, _many_answers, _large_bias),
    *(_special_tokens, _chained_rules, _chained_schema, _wide_schema, _heavy_regex, _random_schema),
    *(_bad_picture, _bad_video, _bad_address),
)
