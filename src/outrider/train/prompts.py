"""Owns the reading of a file of training prompts, one per line, as text or as JSON.

a line of text                                  a user turn (without a chat template: the start of a text)
{"prompt": "..."}                               the same
{"messages": [{"role": ..., "content": ...}]}   a conversation so far
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.train.errors import TrainingError

Message = dict[str, str]
MIN_PROMPTS = 8  # some of them are held out for evaluation; chosen by hand


def read_prompts(path: Path) -> list[list[Message]]:
    """Each prompt as messages. Raises TrainingError, which names the line, for a line that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"The prompt file {path} cannot be read: {error}.") from error
    numbered = enumerate(lines, 1)
    prompts = [_parse(line, f"{path}, line {number}") for number, line in numbered if line.strip()]
    if len(prompts) < MIN_PROMPTS:
        raise TrainingError(f"{path} holds {len(prompts)} prompts; at least {MIN_PROMPTS} are needed.")
    return prompts


def _parse(line: str, where: str) -> list[Message]:
    if not line.lstrip().startswith("{"):
        return [{"role": "user", "content": line.strip()}]
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where}: not valid JSON ({error}).") from error
    if isinstance(record.get("prompt"), str) and record["prompt"]:
        return [{"role": "user", "content": record["prompt"]}]
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
        raise TrainingError(f'{where}: needs "prompt" (a text) or "messages" (each with role and content).')
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the model answers itself
    if not messages:
        raise TrainingError(f"{where}: there is no message to answer.")
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def _is_message(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
