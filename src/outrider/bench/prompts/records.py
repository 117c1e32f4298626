"""Short texts, each with the schema of the JSON object that must hold its facts.

Strings are bounded and every field is required, so that an answer ends within about a hundred tokens.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def _number(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


MEETING = _object(
    title=_text(40), day=_one_of("mon", "tue", "wed", "thu", "fri"), hour=_number(23), people=_number(99)
)
ORDER = _object(
    customer=_text(30),
    items={
        "type": "array",
        "items": _object(name=_text(24), count=_number(99)),
        "minItems": 1,
        "maxItems": 3,
    },
    is_gift={"type": "boolean"},
)
REVIEW = _object(product=_text(30), mood=_one_of("good", "mixed", "bad"), stars=_number(5), reason=_text(60))
PERSON = _object(
    first_name=_text(20), last_name=_text(20), age=_number(120), city=_text(24), occupation=_text(30)
)
TRIP = _object(
    start=_text(24), end=_text(24), means=_one_of("train", "car", "plane", "boat", "foot"), hours=_number(99)
)
TICKET = _object(
    subject=_text(50), area=_one_of("billing", "login", "delivery", "other"), is_urgent={"type": "boolean"}
)

# (text, schema)
PROMPTS: tuple[tuple[str, Schema], ...] = (
    ("On Tuesday at 10 the four of us meet to talk about the budget.", MEETING),
    ("Mrs Alvarez orders two teapots and one tray; please wrap it as a present.", ORDER),
    ("The lamp is bright enough, but its switch broke in the first week.", REVIEW),
    ("Tom Reed, 42, bakes bread in Leeds.", PERSON),
    ("We took the night train from Vienna to Venice, eleven hours in all.", TRIP),
    ("I cannot sign in since this morning and my report is due at noon!", TICKET),
    ("Friday, 15:00: review of the spring catalogue with nine colleagues.", MEETING),
    ("Please send three pairs of wool socks and a scarf to Mr Okafor.", ORDER),
    ("Best kettle I ever had: quick, quiet and easy to clean.", REVIEW),
    ("Ingrid Dahl is a vet from Bergen; she turned 57 in May.", PERSON),
    ("From the harbour to the island it is two hours by boat.", TRIP),
    ("You charged me twice for the same book. No hurry, but please look into it.", TICKET),
    ("The choir of thirty rehearses on Wednesday at 19 o'clock.", MEETING),
    ("Lin Wei buys one bicycle pump, four inner tubes and a bell.", ORDER),
    ("The coat looks fine, yet it lets the rain through at the seams.", REVIEW),
    ("Yusuf Kaya, aged 29, drives a tram in Izmir.", PERSON),
)
