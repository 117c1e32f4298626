"""How many simple questions a model answers right, with and without the system prompt of the default file.

    python -m benchmarks.short_answers [--model M] [--tries 4] [--temperature 0.2] [--top-p 0.9]

An answer is right if it contains the expected word. Both prompts get the same seeds, one for each try.
"""

from __future__ import annotations

import argparse
import re

from outrider import LLM, SamplingParams
from outrider.models.files.default_model import SYSTEM_PROMPT

QUESTIONS = {  # and what a right answer contains
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Spain?": "Madrid",
    "What is the capital of Russia?": "Moscow",
    "What is the capital of Egypt?": "Cairo",
    "What is the capital of England?": "London",
    "What is the capital of China?": "Beijing",
    "What is the capital of Greece?": "Athens",
    "What is 2 + 2?": "4",
    "How many days are in a week?": "7|seven",
    "How many months are in a year?": "12|twelve",
    "What color is the sky on a clear day?": "blue",
    "What planet do we live on?": "Earth",
    "What is the largest planet in the solar system?": "Jupiter",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What gas do plants absorb?": "carbon dioxide|CO2",
    "What is the chemical symbol of water?": "H2O|H₂O",
    "What is the opposite of hot?": "cold",
    "What animal says meow?": "cat",
    "What do bees make?": "honey",
    "What is the freezing point of water in Celsius?": "0",
    "Which ocean is the largest?": "Pacific",
    "Who painted the Mona Lisa?": "Leonardo|Vinci",
    "What language is spoken in Brazil?": "Portuguese",
    "What is the tallest mountain in the world?": "Everest",
    "What is the longest river in Africa?": "Nile",
    "How many legs does a spider have?": "8|eight",
    "What is the currency of Japan?": "yen",
    "What is the largest country in the world?": "Russia",
    "What force pulls objects toward the Earth?": "gravity",
    "What is the closest star to the Earth?": "sun",
    "What organ pumps blood?": "heart",
    "What is the first letter of the alphabet?": "'A'|\"A\"",
    "What is H2O?": "water",
    "What is the square root of 9?": "3|three",
    "Who was the first president of the United States?": "Washington",
    "What continent is Egypt in?": "Africa",
    "What is the boiling point of water in Celsius?": "100",
}
MAX_TOKENS = 32  # of an answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, GGUF file or name (the default model)")
    parser.add_argument("--tries", type=int, default=4, help="answers to each question")
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--top-p", type=float, default=0.9)
    args = parser.parse_args()
    systems = {"no system prompt": [], "the file's": [{"role": "system", "content": SYSTEM_PROMPT}]}
    with LLM(args.model, generation_config="none") as llm:
        for name, system in systems.items():
            right = _num_right(llm, system, args.tries, args.temperature, args.top_p)
            first = next(iter(QUESTIONS))
            print(
                f"{name}: {sum(right.values())} of {args.tries * len(right)} answers are right; "
                f"to {first!r} {right[first]} of {args.tries}"
            )


def _num_right(
    llm: LLM, system: list[dict[str, str]], tries: int, temperature: float, top_p: float
) -> dict[str, int]:
    """For each question: how many of the answers to it."""
    found = {}
    for question, expected in QUESTIONS.items():
        chat = [*system, {"role": "user", "content": question}]
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, top_p=top_p, seed=seed)
            for seed in range(tries)
        ]
        answers = llm.chat([chat] * tries, params)
        found[question] = sum(
            re.search(rf"(?<!\w)({expected})", answer.text, re.IGNORECASE) is not None for answer in answers
        )
    return found


if __name__ == "__main__":
    main()
