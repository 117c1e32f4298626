"""The limits of a request's fields. docs/SERVING.md has the same table, and a test compares the two.

They are checked in time linear in the size of the body, before anything is rendered, tokenized or queued. All
values are chosen by hand: several times what clients send, and small enough that a body of this size blocks
the event loop for a fraction of a second. The length of a prompt is limited in `chat.prompt_limit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from outrider.api.errors import ApiError, invalid
from outrider.chat.json_text import members_of


@dataclass(frozen=True)
class Limit:
    most: int
    what: str  # its row in docs/SERVING.md


JSON_VALUES = Limit(300_000, "commas and opening brackets of a body, outside of its texts")
JSON_OBJECTS = Limit(20_000, "opening braces of a body, outside of its texts")
JSON_DEPTH = Limit(128, "nested lists and objects of a body")
INT_DIGITS = Limit(64, "digits of an integer")
_TOO_MANY_DIGITS = 10**INT_DIGITS.most
SLICE_BYTES = 1 << 18  # of a body that is searched; chosen by hand: a slice of quotes takes 5 ms

MESSAGES = Limit(10_000, "messages; input items; content parts of one of them; tool calls of one of them")
TOOLS = Limit(1024, "tools; tools in `allowed_tools`")
NAME = Limit(256, "characters of a tool's name")
WORD = Limit(1024, "characters of a model name, an id, `cache_salt`, `user` and other short texts")
OBJECT_VALUES = Limit(20_000, "values of a JSON schema, a call's arguments or `chat_template_kwargs`")
OBJECT_CHARACTERS = Limit(1 << 20, "characters of one of these")
GRAMMAR = Limit(1 << 18, "characters of a regular expression, a Lark grammar or a schema given as text")
CHOICES = Limit(1024, "strings of `guided_choice` and `structured_outputs.choice`")

ANSWERS = Limit(128, "answers to one prompt (`n`)")
PROMPTS = Limit(10_000, "prompts of a completion")
EMBEDDING_INPUTS = Limit(
    2048, "inputs of an embeddings or `/api/embed` request; documents of a rerank request"
)
EMBEDDING_TOKENS = Limit(300_000, "tokens of all inputs of one of these together")
STOPS = Limit(4, "stop strings (`stop`)")
STOP_SEQUENCES = Limit(64, "stop strings (`stop_sequences`; `options.stop`)")
STOPS_TOTAL = Limit(4096, "characters of all stop strings together")
STOP_IDS = Limit(1024, "`stop_token_ids`")
LOGIT_BIAS = Limit(4096, "entries of `logit_bias`")
ALLOWED_IDS = Limit(65_536, "`allowed_token_ids`")
BAD_WORDS = Limit(256, "strings of `bad_words`")
BAD_WORD = Limit(64, "characters of a string of `bad_words`")
TOP_LOGPROBS = Limit(20, "`top_logprobs`; `logprobs` of a completion")
METADATA = Limit(16, "entries of `metadata`")
METADATA_KEY = Limit(64, "characters of a key of `metadata`")
METADATA_VALUE = Limit(512, "characters of a value of `metadata`")
OPTIONS = Limit(64, "strings in `include` and `modalities`")


# -- JSON ------------------------------------------------------------------------------------------------


def check_counts(body: bytes) -> None:
    """Refuse too many values before they are parsed: a value follows a comma or an opening bracket."""
    # Prompts hold code and tables, so only what lies outside of texts counts.
    if _excess(slices(body)) and (excess := _excess(_without_texts(body))):
        num, limit = excess
        raise ApiError(400, f"the body has {num:,} {limit.what}; the limit is {limit.most:,}")


def slices(body: bytes) -> Iterator[bytes]:
    """Parts of a body that are searched one by one: other threads can run between two of them."""
    return (body[begin : begin + SLICE_BYTES] for begin in range(0, len(body), SLICE_BYTES))


def _excess(parts: Iterable[bytes]) -> tuple[int, Limit] | None:
    """The first count over its limit."""
    num_values = num_objects = 0
    for found in parts:
        num_opened = found.count(b"{")
        num_objects += num_opened
        num_values += num_opened + found.count(b",") + found.count(b"[")
    counts = ((num_values, JSON_VALUES), (num_objects, JSON_OBJECTS))
    return next(((num, limit) for num, limit in counts if num > limit.most), None)


def _without_texts(body: bytes) -> Iterator[bytes]:
    """The body without its texts, in slices."""
    begin, is_text = 0, 0
    while begin < len(body):
        found = body[begin : begin + SLICE_BYTES]
        num_backslashes = len(found) - len(found.rstrip(b"\\"))
        if num_backslashes % 2 and len(found) > 1:
            found = found[:-1]  # it escapes the first character of the next slice
        begin += len(found)
        parts = found.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_text::2])
        is_text ^= (len(parts) - 1) % 2


def check_values(value: Any) -> None:
    """Refuse what is nested too deeply, and numbers that JSON cannot express or that take long to print."""
    level: list[Any] = [value]
    for _ in range(JSON_DEPTH.most + 1):
        for number in level:
            if isinstance(number, float) and math.isinf(number):
                raise ApiError(400, "the body is not valid JSON: a number is too large")
            if isinstance(number, int) and abs(number) >= _TOO_MANY_DIGITS:
                raise ApiError(400, f"an integer of the body has more than {INT_DIGITS.most} digits")
        outers = [outer for outer in level if isinstance(outer, (dict, list))]
        if not outers:
            return
        level = [member for outer in outers for member in members_of(outer)]
    raise ApiError(400, f"the body is nested too deeply: at most {JSON_DEPTH.most} {JSON_DEPTH.what}")


# -- types of fields -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AtMost:
    """The limit of a string, list or dict.

    A list is refused at its first bad item and a dict before its entries are checked: the number of errors,
    each of which costs time, does not grow with the body.
    """

    limit: Limit

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)  # of a string, list or dict
        schema["max_length"] = self.limit.most
        if schema["type"] == "list":
            schema["fail_fast"] = True
        if schema["type"] == "dict":
            return core_schema.no_info_before_validator_function(self._check_count, schema)
        return schema

    def _check_count(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.limit.most:
            raise _too_long(len(value), "entries", self.limit)
        return value


def _check_object(value: dict[str, Any]) -> dict[str, Any]:
    num_values = num_characters = 0
    unseen: list[Any] = [value]
    while unseen:
        outer = unseen.pop()
        num_values += len(outer)
        num_characters += sum(map(len, outer)) if isinstance(outer, dict) else 0
        num_characters += sum(len(member) for member in members_of(outer) if isinstance(member, str))
        unseen += [member for member in members_of(outer) if isinstance(member, (dict, list))]
    for num, limit in ((num_values, OBJECT_VALUES), (num_characters, OBJECT_CHARACTERS)):
        if num > limit.most:
            raise _too_long(num, limit.what.split()[0], limit)
    return value


def _too_long(num: int, unit: str, limit: Limit) -> PydanticCustomError:
    numbers = {"num": num, "unit": unit, "most": limit.most}
    return PydanticCustomError("too_long", "has {num} {unit}, of at most {most}", numbers)


AnyText = Annotated[str, Field(json_schema_extra={"minLength": 1})]  # a string that must not be empty
Word = Annotated[str, AtMost(WORD)]
Name = Annotated[str, AtMost(NAME)]
GrammarText = Annotated[str, AtMost(GRAMMAR)]
JsonObject = Annotated[dict[str, Any], AtMost(OBJECT_VALUES), AfterValidator(_check_object)]
Metadata = Annotated[
    dict[Annotated[str, AtMost(METADATA_KEY)], Annotated[str, AtMost(METADATA_VALUE)]], AtMost(METADATA)
]
StopString = Annotated[str, Field(json_schema_extra={"maxLength": STOPS_TOTAL.most})]
StopStrings = StopString | Annotated[list[AnyText], AtMost(STOPS)]


def check_stops(param: str, stops: str | Sequence[str] | None) -> None:
    """The engine builds a state for each character of a stop string."""
    num_characters = len(stops) if isinstance(stops, str) else sum(map(len, stops or ()))
    if num_characters > STOPS_TOTAL.most:
        raise invalid(param, f"has {num_characters:,} characters together, of at most {STOPS_TOTAL.most:,}")
