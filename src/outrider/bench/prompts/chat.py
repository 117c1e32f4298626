"""Everyday questions."""

PROMPTS = (
    "What causes thunder, and why do we see lightning first?",
    "Write a short letter to a neighbour about a fallen branch.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that counts the vowels in a string, and explain it.",
    "What should I pack for three days of hiking in the autumn?",
    "A box holds 12 eggs. How many boxes do I need for 100 eggs? Show your work.",
    "Summarise the story of Robinson Crusoe in one paragraph.",
    "Give me a JSON object that describes a library book.",
    "How do I get candle wax out of a tablecloth?",
    "When does one say that a number is prime, and which is the smallest?",
    "Suggest a quick lunch with rice, eggs and peas.",
    "Why do leaves change colour?",
    "Write a dialogue between a lighthouse keeper and a seagull.",
    "What are the advantages and drawbacks of working from home?",
    "How does a microwave oven heat food?",
    "Describe how bread is made, step by step.",
)
