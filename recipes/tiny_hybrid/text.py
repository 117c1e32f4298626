"""The text that the tiny hybrid is trained on: short exchanges, made up by rule, none of it from anywhere.

An exchange is a question and its answer. The answers are regular but not fixed: they copy from the question,
count, multiply, remember facts, and choose freely between phrases, so that drafts are neither hopeless nor
always right. Questions with a certain checksum are held out: `exchanges` never yields them, `held_out` yields
nothing else. Must not know tokens.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator

Exchange = tuple[str, str]  # question, answer

HELD_OUT_SHARE = 10  # one question of so many

NAMES = (
    "Ada", "Bela", "Cora", "Dario", "Edda", "Falk", "Gita", "Hugo", "Ines", "Jonas", "Kira", "Leon",
    "Mira", "Nils", "Olga", "Pavel", "Quinn", "Rosa", "Sami", "Tilda", "Uwe", "Vera", "Wim", "Yara",
)  # fmt: skip
CITIES = (
    "Aachen", "Bergen", "Cadiz", "Delft", "Exeter", "Faro", "Ghent", "Lund", "Malmo", "Nantes", "Oulu",
    "Parma", "Riga", "Siena", "Turku", "York",
)  # fmt: skip
THINGS = (
    "lantern", "kettle", "ladder", "drum", "map", "coin", "boat", "clock", "basket", "whistle",
    "letter", "stone", "rope", "window", "key",
)  # fmt: skip
PLACES = ("forest", "harbour", "mill", "market", "bridge", "tower", "garden", "cave", "meadow", "station")
MOODS = ("glad", "tired", "curious", "brave", "quiet", "hungry", "proud", "careful")
DISHES = ("soup", "bread", "salad", "stew", "pie", "porridge")
FOODS = ("carrots", "beans", "onions", "apples", "rice", "leeks", "plums", "barley", "peas", "nuts")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy")
ANIMALS = {  # legs, home, food
    "fox": ("four", "a den", "mice"), "owl": ("two", "a hollow tree", "mice"),
    "otter": ("four", "a river bank", "fish"), "crab": ("ten", "the sea shore", "snails"),
    "bee": ("six", "a hive", "nectar"), "goat": ("four", "a steep hill", "grass"),
    "spider": ("eight", "a dark corner", "flies"), "heron": ("two", "a reed bed", "fish"),
    "ant": ("six", "a nest of sand", "seeds"), "mole": ("four", "a tunnel", "worms"),
    "hare": ("four", "an open field", "grass"), "wren": ("two", "a thick hedge", "insects"),
}  # fmt: skip


def story(rng: random.Random) -> Exchange:
    name, friend = rng.sample(NAMES, 2)
    animal, thing, place, mood = (rng.choice(words) for words in (list(ANIMALS), THINGS, PLACES, MOODS))
    found = rng.choice(["in the grass", "under a bench", "behind the door", "beside the path"])
    sentences = [
        rng.choice([f"One morning {name} went to the {place}.", f"Once {name} lived near the {place}."]),
        f"There {name} met {article(animal)} {animal} who had lost a {thing}.",
        rng.choice([f"The {animal} was {mood}.", f'"I am so {mood}," said the {animal}.']),
        f'"Let us look for the {thing} together," said {name}.',
        rng.choice(
            [f"They looked all day and asked {friend}.", f"On the way they met {friend}, who helped."]
        ),
        f"In the evening they found the {thing} {found}.",
        f"The {animal} thanked {name}, and they all went home.",
    ]
    return f"Tell a story about {name}, {friend} and {article(animal)} {animal}.", " ".join(sentences)


def record(rng: random.Random) -> Exchange:
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(18, 79)
    fields = {
        "name": name,
        "age": age,
        "city": city,
        "email": f"{name.lower()}@{city.lower()}.example",
        "likes": rng.sample(FOODS, 2),
        "active": rng.random() < 0.5,
    }
    question = f"Write a JSON record: {name}, {age}, from {city}."
    return question, json.dumps(fields, indent=2)


def counting(rng: random.Random) -> Exchange:
    first, step = rng.randint(1, 60), rng.randint(1, 12)
    numbers = [first + step * i for i in range(10)]
    return f"Count from {first} in steps of {step}.", ", ".join(map(str, numbers)) + "."


def table(rng: random.Random) -> Exchange:
    n, first = rng.randint(2, 19), rng.randint(1, 9)
    rows = [f"{n} x {i} = {n * i}" for i in range(first, first + 6)]
    return f"Write the table of {n}, from {first} on.", "\n".join(rows)


def function(rng: random.Random) -> Exchange:
    verbs = {"add": "+", "subtract": "-", "multiply by": "*"}
    verb, n, name = rng.choice(list(verbs)), rng.randint(2, 40), rng.choice(["value", "number", "total", "x"])
    title = f"{verb.split()[0]}_{n}"
    values = rng.sample(range(2, 30), 2)
    results = [{"+": value + n, "-": value - n, "*": value * n}[verbs[verb]] for value in values]
    lines = [
        f"def {title}({name}):",
        f'    """{verb.capitalize()} {n}."""',
        f"    return {name} {verbs[verb]} {n}",
        "",
        *[f"assert {title}({value}) == {result}" for value, result in zip(values, results, strict=True)],
    ]
    return f"Write a function to {verb} {n}. Call the argument {name}.", "\n".join(lines)


def recipe(rng: random.Random) -> Exchange:
    dish, (first, second) = rng.choice(DISHES), rng.sample(FOODS, 2)
    minutes = 5 * rng.randint(2, 12)
    steps = [
        rng.choice([f"Wash the {first} and the {second}.", f"Rinse the {first}. Wash the {second}."]),
        f"Cut the {first} into small pieces.",
        rng.choice([f"Mix them with the {second}.", f"Add the {second} and some salt."]),
        f"Cook the {dish} for {minutes} minutes.",
        rng.choice([f"Serve the {dish} hot.", f"Let the {dish} rest, then serve it."]),
    ]
    answer = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    return f"How do I make {dish} with {first} and {second}?", answer


def comparison(rng: random.Random) -> Exchange:
    pair = rng.sample(list(ANIMALS), 2)
    asks = rng.choice(["What is the difference between", "Compare", "Tell me about"])
    lines = [
        f"{article(animal).capitalize()} {animal} has {legs} legs, lives in {home} and eats {food}."
        for animal, (legs, home, food) in ((animal, ANIMALS[animal]) for animal in pair)
    ]
    same = ANIMALS[pair[0]][0] == ANIMALS[pair[1]][0]
    lines.append(
        "Both have the same number of legs." if same else "They do not have the same number of legs."
    )
    return f"{asks} {article(pair[0])} {pair[0]} and {article(pair[1])} {pair[1]}.", " ".join(lines)


def weather(rng: random.Random) -> Exchange:
    city, degrees = rng.choice(CITIES), rng.randint(1, 25)
    rows = ["| day | sky | degrees |", "|---|---|---|"]
    for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"):
        rows.append(f"| {day} | {rng.choice(SKIES)} | {degrees} |")
        degrees += rng.choice([-1, 0, 1])
    return f"Weather table of {city}, {rows[2].split()[-2]} degrees on Monday.", "\n".join(rows)


KINDS: tuple[Callable[[random.Random], Exchange], ...] = (
    story, record, counting, table, function, recipe, comparison, weather,
)  # fmt: skip


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0


def exchanges(seed: int) -> Iterator[Exchange]:
    """Exchanges to train on, without end."""
    rng = random.Random(seed)
    while True:
        question, answer = rng.choice(KINDS)(rng)
        if not is_held_out(question):
            yield question, answer


def held_out(seed: int) -> Iterator[Exchange]:
    """Exchanges whose questions are never trained on, each once: every kind in turn."""
    rng = random.Random(seed)
    asked: set[str] = set()
    while True:
        for kind in KINDS:
            question, answer = kind(rng)
            while not is_held_out(question) or question in asked:
                question, answer = kind(rng)
            asked.add(question)
            yield question, answer
