"""The first words of synthesised conversations, as data, and functions that sample them.

The model continues an opening to a whole user turn, so most of the question is the model's own. Plain text
begins like a page of a book, an article or a file.
"""

from __future__ import annotations

import random

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a concise assistant. Answer in a few sentences.",
    "You are an experienced programmer who explains code clearly.",
    "You are a friendly teacher. Explain things step by step.",
    "You are an editor. Improve the text that you are given.",
    "You answer with facts, and say so when you are not sure.",
    "You are a storyteller with a vivid imagination.",
)

FREE_OPENINGS = (
    "Write", "Write a", "Write an", "Write a short", "Write a Python", "Write a function", "Write a letter",
    "Write an email", "Write a poem", "Write a story", "Explain", "Explain the", "Explain why",
    "Explain how", "What is", "What is the", "What are", "What does", "What would", "How do", "How do I",
    "How can", "How does", "How many", "How much", "Why", "Why is", "Why do", "When", "When was", "Where",
    "Where can", "Who", "Who was", "Which", "Can you", "Could you", "Would you", "Should I", "Is it",
    "Is there", "Are there", "Do you", "Does", "I want", "I need", "I have", "I am", "I'm looking for",
    "My", "We are", "Our", "Please", "Please help", "Help me", "Give me", "Give me an example", "Tell me",
    "Tell me a", "Show me", "List", "List the", "Name", "Describe", "Describe a", "Compare", "Summarize",
    "Summarize this:", "Rewrite", "Rewrite this:", "Translate", "Correct", "Fix", "Improve", "Convert",
    "Calculate", "Solve", "Find", "Suppose", "If", "Given", "Let x", "Design", "Create", "Create a", "Make",
    "Plan", "Suggest", "Recommend", "Generate", "Outline", "Define", "Classify", "Return JSON",
    "The following", "In this", "Here is", "Hello", "Hi", "Thanks", "A farmer", "Two", "Anna", "Tom has",
    "On Monday", "```", "def ", "SELECT", "{", "1.", "#",
)  # fmt: skip

REQUESTS = (
    "Tell me something about {}.", "What should everyone know about {}?", "How did {} begin?",
    "Explain {} simply.", "Explain {} to an expert.", "Why does {} matter?", "What is hard about {}?",
    "Give three facts about {}.", "Write a story in which {} plays a part.",
    "Write four lines of verse about {}.", "Write a headline about {}.", "Write a short article about {}.",
    "Write a message to a friend about {}.", "Ask me five questions about {}.",
    "Make a plan for a week around {}.", "Make a table about {}.", "Give me tips for {}.",
    "What comes after {}?", "What are the arguments for and against {}?", "Who is known for {}?",
    "What does {} cost?", "Which words belong to {}?", "Write a program that has to do with {}.",
    "Give a JSON object about {}.", "Describe {} as seen by a child.",
    "What will become of {} in fifty years?", "How do I start with {}?",
    "What mistakes do people make with {}?", "Summarize what is known about {}.",
    "Invent a dialogue about {}.",
)  # fmt: skip

TOPICS = (
    "bread", "the tides", "football", "a broken clock", "tax returns", "glaciers", "sorting a list", "jazz",
    "the heart", "train travel", "old maps", "learning French", "a lost dog", "solar panels",
    "chess openings", "the Roman army", "databases", "house plants", "a job interview", "the moon",
    "honey bees", "public libraries", "swimming", "unit tests", "a haunted mill", "inflation",
    "earthquakes", "knitting", "a first apartment", "vaccines", "the printing press", "electric guitars",
    "regular expressions", "a desert island", "coffee", "sleep", "whales", "elections", "prime numbers",
    "a birthday party", "wood stoves", "the Silk Road", "climbing", "photosynthesis", "password managers",
    "a talking cat", "savings", "bridges", "rain", "medieval towns", "robots", "a long letter",
    "binary search", "vegetable soup", "black holes", "kindness", "city traffic", "the violin", "recycling",
    "insurance", "a mountain village", "weather forecasts", "penguins", "web pages",
    "the French Revolution", "yoga", "camping", "probability", "a small bakery", "running shoes",
    "the immune system", "film music", "negotiation", "snow", "operating systems", "a sea voyage", "tea",
    "wolves", "teamwork", "algebra", "street markets", "gravity", "a rusty bicycle", "fashion",
    "newspapers", "version control", "opera", "volcanoes", "gardening", "a secret door",
)  # fmt: skip

TEXT_OPENINGS = (
    "The", "In", "It was", "When", "There are", "A", "For many years", "According to", "Once upon a time",
    "She", "He had", "This article", "Chapter 1\n\n", "Abstract\n\n", "Introduction\n\n", "import ", "def ",
    "#include <", "<html>", "Question:", "Q: ", "Dear", "Ingredients:", "The history of", "Most people",
    "The first", "If you", "During the", "One of the", "Scientists", "- ", "1. ", "Today", "The city of",
    "In mathematics,",
)  # fmt: skip

FOLLOW_UPS = (
    "",
    "",
    "And",
    "Why",
    "Can you",
    "What about",
    "Now",
    "Thanks",
    "How",
    "Please",
    "Make it",
    "But",
)


def sample_user_opening(rng: random.Random) -> str:
    """The first words of a user turn: 15 % empty, 45 % a few words, 40 % a whole request."""
    kind = rng.random()
    if kind < 0.15:
        return ""
    if kind < 0.6:
        return rng.choice(FREE_OPENINGS)
    return rng.choice(REQUESTS).format(rng.choice(TOPICS))


def sample_text_opening(rng: random.Random) -> str:
    """The first words of a plain text, for models without a chat template."""
    if rng.random() < 0.6:
        return rng.choice(TEXT_OPENINGS)
    return f"{rng.choice(TEXT_OPENINGS).strip()} {rng.choice(TOPICS)}"


def sample_system_message(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.25 else None
