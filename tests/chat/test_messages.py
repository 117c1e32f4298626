"""Normalisation: each rule does one thing, to conversations that need it and to no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.chat import messages as rules
from outrider.chat.conversation import MediaPart, Message, Role, TextPart, ToolCall
from outrider.chat.messages import Conversation, role_named, variants
from outrider.request import InvalidRequest

IMAGE = MediaPart("image", "data:,")


def says(role: Role, *texts: str) -> Message:
    return Message(role, tuple(map(TextPart, texts)))


def calls(*ids: str, text: str = "") -> Message:
    content = (TextPart(text),) if text else ()
    return Message("assistant", content, tool_calls=tuple(ToolCall(id, "f", "{}") for id in ids))


def result(id: str, text: str = "ok") -> Message:
    return Message("tool", (TextPart(text),), tool_call_id=id)


S, U, A = (lambda text, role=role: says(role, text) for role in ("system", "user", "assistant"))
PICTURE = Message("user", (TextPart("see"), IMAGE))

WELL_FORMED = [S("s"), U("u"), A("a"), U("u"), calls("abcdef123"), result("abcdef123"), A("a"), U("u")]

CASES: list[tuple[Callable[[Conversation], Conversation], Conversation, Conversation]] = [
    (rules.hoist_system, [U("u"), S("s")], [S("s"), U("u")]),
    (rules.hoist_system, [S("1"), U("u"), S("2"), A("a")], [S("1\n\n2"), U("u"), A("a")]),
    (rules.hoist_system, [S("1"), S(""), U("u")], [S("1"), U("u")]),
    (rules.hoist_system, [S("1"), U("u")], [S("1"), U("u")]),
    (rules.hoist_system, [U("u")], [U("u")]),
    (rules.merge_neighbours, [U("1"), U("2"), A("a"), A("b")], [U("1\n\n2"), A("a\n\nb")]),
    (rules.merge_neighbours, [U("1"), U("2"), U("3")], [U("1\n\n2\n\n3")]),
    (rules.merge_neighbours, [U("1"), U("")], [U("1")]),
    (rules.merge_neighbours, [A("a"), calls("x")], [A("a"), calls("x")]),
    (rules.merge_neighbours, [calls("x"), A("a")], [calls("x"), A("a")]),
    (rules.merge_neighbours, [result("x"), result("y")], [result("x"), result("y")]),
    (rules.merge_neighbours, [U("1"), PICTURE], [U("1"), PICTURE]),
    (rules.merge_neighbours, [PICTURE, U("1")], [PICTURE, U("1")]),
    (rules.merge_neighbours, [says("user", "1", "2"), U("3")], [says("user", "1", "2"), U("3")]),
    (
        rules.shorten_call_ids,
        [calls("abcdef123"), result("abcdef123")],
        [calls("abcdef123"), result("abcdef123")],
    ),
    (rules.separate_calls, [calls("x"), result("x")], [calls("x"), result("x")]),
    (
        rules.separate_calls,
        [U("u"), calls("x", "y", text="t"), result("y", "2"), result("x", "1"), U("u")],
        [U("u"), calls("x", text="t"), result("x", "1"), calls("y"), result("y", "2"), U("u")],
    ),
    (rules.separate_calls, [calls("x", "y"), result("z")], [calls("x"), calls("y"), result("z")]),
    (rules.drop_reasoning, [Message("assistant", (TextPart("a"),), reasoning="r")], [A("a")]),
    (
        rules.write_calls_as_text,
        [calls("x", text="t"), result("x", "1"), U("u")],
        [
            A('t\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
            U("<tool_response>\n1\n</tool_response>\n\nu"),
        ],
    ),
    (rules.fold_system, [S("s"), U("u"), A("a")], [U("s\n\nu"), A("a")]),
    (rules.fold_system, [S("s"), Message("user", (IMAGE,))], [Message("user", (TextPart("s"), IMAGE))]),
    (rules.fold_system, [S("s"), A("a")], [U("s"), A("a")]),
    (rules.fold_system, [U("u")], [U("u")]),
]


@pytest.mark.parametrize(("rule", "before", "after"), CASES)
def test_a_rule(
    rule: Callable[[Conversation], Conversation], before: Conversation, after: Conversation
) -> None:
    assert rule(before) == after


@pytest.mark.parametrize(
    "rule", [rule for rule in rules.RULES if rule.__name__ not in ("write_calls_as_text", "fold_system")]
)
def test_a_rule_leaves_well_formed_conversations_alone(rule: Callable[[Conversation], Conversation]) -> None:
    assert rule(WELL_FORMED) == WELL_FORMED


@pytest.mark.parametrize("rule", rules.RULES)
def test_a_rule_has_nothing_to_do_twice(rule: Callable[[Conversation], Conversation]) -> None:
    mess = [
        U("1"),
        S("s"),
        calls("x", "y"),
        result("y"),
        result("x"),
        U("2"),
        U("3"),
        A("a"),
        PICTURE,
        S("t"),
    ]
    assert rule(rule(mess)) == rule(mess)


def test_shortened_ids_still_belong_together() -> None:
    [call, answer] = rules.shorten_call_ids([calls("call_0123456789"), result("call_0123456789")])
    assert call.tool_calls[0].id == answer.tool_call_id
    assert answer.tool_call_id is not None
    assert len(answer.tool_call_id) == 9
    assert answer.tool_call_id.isalnum()


def test_each_variant_applies_one_more_rule() -> None:
    first, second, *_ = variants([U("1"), U("2"), S("s")])
    assert first == [S("s"), U("1"), U("2")]
    assert second == [S("s"), U("1\n\n2")]


def test_a_conversation_that_no_rule_changes_has_no_variants() -> None:
    assert list(variants([U("1"), A("2"), U("3")])) == []


@pytest.mark.parametrize(("name", "role"), [("developer", "system"), ("function", "tool"), ("user", "user")])
def test_roles_have_other_names(name: str, role: str) -> None:
    assert role_named(name) == role


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unknown role 'king'"):
        role_named("king")
