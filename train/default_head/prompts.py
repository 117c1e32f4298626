"""What the synthesised conversations begin with: system prompts, openings of user turns, whole questions.

The model writes the rest itself. None of the held-out prompts occurs here; `synthesise` also drops every
conversation in which the model happened to write one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Keep your answers short.",
    "You are an experienced software engineer. Answer with code and a brief explanation.",
    "You are a careful maths teacher who shows every step.",
    "You are a novelist with a warm sense of humour.",
    "You are a science journalist. Explain things to curious adults.",
    "You are a history teacher. Give dates and names.",
    "Answer with a single JSON object and nothing else.",
    "Answer as a numbered list.",
    "You're an AI assistant for text re-writing. Make the text shorter and keep its meaning.",
    "You're an AI assistant for text re-writing. Make the text more formal.",
    "Summarise the text of the user in at most three sentences.",
    "You are a travel guide.",
    "You are a customer support agent of a small online shop.",
    "Extract the key facts of the user's text as bullet points.",
    "You translate everything the user says into French.",
)

OPENINGS = (
    *("What is", "What is the", "What are", "What are the", "What are some", "What was", "What does", "What would"),
    *("What happens when", "What do you", "Which of", "Who is", "Who was", "Who invented", "Where can I"),
    *("Where do", "When was", "When should", "Why is", "Why are", "Why do", "Why did", "How do I", "How do you"),
    *("How does", "How did", "How can", "How can we", "How many", "How much", "How long", "How would you"),
    *("Can you", "Can you give me", "Could you explain", "Would you", "Is there", "Is it true that", "Are"),
    *("Do you know", "Does", "Did", "Should we", "I", "I am", "I'm looking for", "I'm having trouble with"),
    *("I want to learn", "I would like", "I need to", "I need some advice", "I just", "I've been", "My friend"),
    *("My boss", "My dog", "My computer", "We are", "We have", "Our team", "Please", "Please help me", "Help"),
    *("Hi!", "Hello, I", "Hey", "Thanks", "Let's", "Let's play", "Tell me", "Tell me more about", "Tell a story"),
    *("Write", "Write a short", "Write a story", "Write a story in which", "Write a poem", "Write a song"),
    *("Write an article", "Write an essay on", "Write a paragraph", "Write a letter", "Write an email", "Write a post"),
    *("Write a review", "Write a scene", "Write a summary of", "Write a report", "Write a description of"),
    *("Write a Python", "Write a Python script", "Write a function that", "Write a program", "Write a class"),
    *("Write a C++ program", "Write a Java method", "Write a regular expression", "Write a shell script", "Write CSS"),
    *("Write a query", "Write unit tests for", "Implement a", "Fix the bug in this code:\n\n", "Refactor", "Here is my code"),
    *("def ", "import ", "```python\n", "SELECT", "Explain this code:\n\n", "Explain the", "Explain what", "Explain in"),
    *("Describe a", "Describe how", "Discuss the", "Compare the", "Contrast", "Analyse", "Evaluate the", "Argue"),
    *("Give an", "Give me some", "Give me three", "Give a", "List five", "List some", "Name three", "Suggest a"),
    *("Suggest some", "Recommend a", "Create a list", "Create a story", "Create an", "Make a", "Make me", "Design"),
    *("Develop", "Build", "Prepare", "Plan", "Organise", "Generate five", "Come up with", "Think of", "Brainstorm"),
    *("Imagine", "Imagine that", "Pretend you are", "You are", "Act like", "Suppose that", "Given", "Given that"),
    *("Given a", "Consider", "Consider the following", "Assume", "If", "If I", "If there are", "Let x", "Solve for"),
    *("Calculate the", "Compute", "Find", "Find all", "Prove that", "Simplify", "A rectangle", "A car", "A farmer"),
    *("A store", "Tom has", "Maria", "There were", "Summarise", "Summarise this:\n\n", "Summarize the article:\n\n"),
    *("Paraphrase", "Rewrite this paragraph:\n\n", "Rewrite the sentence", "Shorten", "Proofread", "Correct", "Edit the"),
    *("Translate to Spanish:", "Translate the following", "Classify the", "Identify the", "Extract", "Read the"),
    *("Based on the", "Using the", "Convert the", "Format", "Turn this into", "Complete the", "Continue the story:"),
    *("Choose", "Rank", "Sort", "Define the", "What's", "What's your favourite", "In", "In which", "On", "At", "For"),
    *("The", "This", "As an", "Once upon a time", "Yesterday", "Today", "Question:", "Q:", "Task:", "Topic:", "1."),
)

TEMPLATES = (
    "Tell me something about {}.",
    "Explain {} in simple words.",
    "Explain {} to an expert.",
    "What should a beginner know about {}?",
    "Why do people care about {}?",
    "What is the history of {}?",
    "What are the most important facts about {}?",
    "What are the advantages and disadvantages of {}?",
    "What do most people get wrong about {}?",
    "How do I get started with {}?",
    "How has {} changed over time?",
    "How does {} affect our lives?",
    "Can you recommend books about {}?",
    "Can you give me a quick overview of {}?",
    "Give me three tips about {}.",
    "Give me ten facts about {}.",
    "Give me a step-by-step plan for learning about {}.",
    "List the key terms of {} with short definitions.",
    "List seven questions one could ask about {}.",
    "Write a short story about {}.",
    "Write a poem of four verses about {}.",
    "Write a haiku about {}.",
    "Write a blog post about {}.",
    "Write an encyclopedia entry about {}.",
    "Write a newspaper article about {}.",
    "Write a letter to the editor about {}.",
    "Write an email inviting colleagues to a talk about {}.",
    "Write a dialogue between a teacher and a pupil about {}.",
    "Write a speech about {}.",
    "Write a joke about {}.",
    "Write five quiz questions with answers about {}.",
    "Write an advertisement that has to do with {}.",
    "Write a JSON object with five facts about {}.",
    "Write a Markdown table about {}.",
    "Write a Python dictionary with information about {}.",
    "Write a Python class that has to do with {}.",
    "Make a lesson plan about {} for twelve-year-olds.",
    "Make a weekly timetable for someone who studies {}.",
    "Make a list of materials that I need for {}.",
    "Describe {} in one sentence.",
    "Describe {} in three paragraphs.",
    "Describe a day in the life of someone who works with {}.",
    "Summarise what is known about {}.",
    "Compare {} today with {} a hundred years ago.",
    "Argue for and against {}.",
    "Is {} worth the time?",
    "Who are important people in the field of {}?",
    "What will {} look like in fifty years?",
    "Imagine a world without {}. What would be different?",
    "I have to give a talk about {} tomorrow. Help me prepare.",
    "My daughter asked me about {}. What do I tell her?",
    "Let's talk about {}.",
)

TOPICS = (
    *("astronomy", "comets", "the Moon", "rockets", "satellites", "gravity", "light", "sound", "magnets"),
    *("electricity", "atoms", "water", "ice", "volcanoes", "earthquakes", "rivers", "the ocean", "tides", "deserts"),
    *("rainforests", "mushrooms", "trees", "flowers", "seeds", "insects", "bees", "spiders", "frogs", "sharks"),
    *("whales", "octopuses", "penguins", "owls", "horses", "dogs", "cats", "elephants", "bears", "dinosaurs"),
    *("fossils", "evolution", "genes", "cells", "bacteria", "vaccines", "the brain", "the heart", "sleep", "dreams"),
    *("memory", "stress", "nutrition", "vitamins", "running", "swimming", "cycling", "yoga", "football", "tennis"),
    *("chess", "card games", "board games", "video games", "puzzles", "origami", "knitting", "pottery", "painting"),
    *("drawing", "sculpture", "photography", "cinema", "theatre", "opera", "jazz", "rock music", "the violin"),
    *("the piano", "dancing", "poetry", "fairy tales", "science fiction", "detective novels", "comics", "libraries"),
    *("printing", "paper", "writing systems", "grammar", "learning languages", "sign language", "translation"),
    *("rhetoric", "public speaking", "job interviews", "meetings", "teamwork", "leadership", "negotiation", "time management"),
    *("procrastination", "budgeting", "saving money", "taxes", "banks", "insurance", "inflation", "trade", "advertising"),
    *("small businesses", "farming", "gardening", "composting", "houseplants", "beekeeping", "cooking", "baking bread"),
    *("soup", "noodles", "cheese", "chocolate", "coffee", "tea", "spices", "breakfast", "camping", "hiking", "climbing"),
    *("sailing", "fishing", "skiing", "maps", "navigation", "railways", "bridges", "tunnels", "ships", "aeroplanes"),
    *("bicycles", "electric cars", "traffic", "cities", "skyscrapers", "castles", "lighthouses", "windmills"),
    *("solar panels", "nuclear power", "batteries", "recycling", "plastic", "glass", "steel", "concrete", "robots"),
    *("computers", "programming", "databases", "operating systems", "compilers", "sorting algorithms", "graphs"),
    *("recursion", "testing software", "version control", "web browsers", "search engines", "encryption", "passwords"),
    *("spam", "open source", "machine learning", "neural networks", "chatbots", "statistics", "probability"),
    *("prime numbers", "fractions", "geometry", "algebra", "calculus", "infinity", "logic", "paradoxes", "philosophy"),
    *("ethics", "justice", "democracy", "elections", "constitutions", "courts", "newspapers", "ancient Egypt"),
    *("ancient Greece", "the Roman Empire", "the Vikings", "the Silk Road", "the Middle Ages", "the Renaissance"),
    *("the Industrial Revolution", "the Cold War", "Japan", "Brazil", "Kenya", "Norway", "India", "Canada", "Venice"),
    *("friendship", "kindness", "patience", "curiosity", "an old clock", "a lost letter", "a talking fox", "a quiet island"),
)


@dataclass(frozen=True)
class Beginning:
    """Token ids a conversation starts with, and who writes on."""

    token_ids: list[int]
    kind: str  # free, system, opening or question
    asks: bool  # the user's turn is complete: the assistant is next


def user_turn(text: str, system: str = DEFAULT_SYSTEM) -> str:
    """The model's chat template up to and including the (perhaps unfinished) text of the first user turn."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}"


def question(text: str, system: str = DEFAULT_SYSTEM) -> str:
    return user_turn(text, system) + "<|im_end|>\n<|im_start|>assistant\n"


TO_ASSISTANT = "\n<|im_start|>assistant\n"  # what follows the end of a user's turn
TO_USER = "\n<|im_start|>user\n"


def beginnings(encode: Callable[[str], list[int]]) -> list[Beginning]:
    questions = [template.replace("{}", topic) for template in TEMPLATES for topic in TOPICS]
    return [
        Beginning(encode(user_turn("")), "free", False),
        *(Beginning(encode(user_turn("", system)), "system", False) for system in SYSTEMS),
        *(Beginning(encode(user_turn(opening)), "opening", False) for opening in OPENINGS),
        *(Beginning(encode(question(text)), "question", True) for text in questions),
    ]
