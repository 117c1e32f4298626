"""Ollama's Python client with two tools: python ollama_agent.py URL MODEL TASK."""

import sys
from pathlib import Path

from ollama import Client


def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: The file.
    """
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replaces a text in a file.

    Args:
        path: The file.
        old: The text that is replaced.
        new: The text in its place.
    """
    file = Path(path)
    file.write_text(file.read_text().replace(old, new))
    return "replaced"


TOOLS = {"read_file": read_file, "edit_file": edit_file}
url, name, task = sys.argv[1:]
client = Client(host=url)
messages = [{"role": "user", "content": task}]
while True:
    text, calls = "", []
    for part in client.chat(name, messages, tools=list(TOOLS.values()), stream=True):
        text += part.message.content or ""
        calls += part.message.tool_calls or []
    messages.append({"role": "assistant", "content": text, "tool_calls": calls})
    if not calls:
        break
    for call in calls:
        result = TOOLS[call.function.name](**call.function.arguments)
        messages.append({"role": "tool", "content": result, "tool_name": call.function.name})
print(text)
