"""OpenCode: OpenAI's chat completions, set up by a configuration that is merged over the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.cli.launch.tool import Plan, Target, Tool

PROVIDER = "outrider"
MAX_ANSWER = 32_000  # tokens; OpenCode's own limit


def plan(target: Target, folder: Path) -> Plan:
    model: dict[str, Any] = {"name": target.model, "attachment": target.reads_images}
    answer = target.max_answer(MAX_ANSWER)
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": answer}
    options = {"baseURL": target.openai_url, "apiKey": target.api_key, "timeout": False}
    name = f"{PROVIDER}/{target.model}"
    config = {
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Outrider",
                "options": options,
                "models": {target.model: model},
            }
        },
        "model": name,
        "small_model": name,  # titles: else a model of another provider, if the user has one
    }
    return Plan(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


TOOL = Tool(
    title="OpenCode",
    program="opencode",
    install="npm install -g opencode-ai",
    plan=plan,
    prompt_tokens=7_700,
)
