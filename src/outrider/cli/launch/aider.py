"""aider: OpenAI's chat completions through litellm, set up by environment variables and a file of limits."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.launch.tool import Plan, Target, Tool

MAX_ANSWER = 16_000  # tokens; chosen by hand
TIMEOUT_S = 3600  # of a request; litellm's own is ten minutes


def plan(target: Target, folder: Path) -> Plan:
    name = f"openai/{target.model}"
    variables = {
        "OPENAI_API_BASE": target.openai_url,
        "OPENAI_API_KEY": target.api_key,
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_EDITOR_MODEL": name,
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "AIDER_TIMEOUT": str(TIMEOUT_S),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # prices are no matter here: nothing is fetched
    }
    if target.context is None:
        return Plan(environment=variables)
    limits = {
        "max_input_tokens": target.context,
        "max_tokens": target.max_answer(MAX_ANSWER),
        "max_output_tokens": target.max_answer(MAX_ANSWER),
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    file = folder / "aider-model.json"
    variables["AIDER_MODEL_METADATA_FILE"] = str(file)
    return Plan(environment=variables, files={file: json.dumps({name: limits}, indent=2)})


TOOL = Tool(
    title="aider",
    program="aider",
    install="python -m pip install aider-install && aider-install",
    plan=plan,
    prompt_tokens=800,
)
