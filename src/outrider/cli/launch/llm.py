"""Simon Willison's llm: OpenAI's chat completions, set up by a user folder of its own.

llm has no variable for the address of a server, only a file in its user folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.launch.tool import Plan, Target, Tool


def plan(target: Target, folder: Path) -> Plan:
    model = {
        "model_id": target.model,
        "model_name": target.model,
        "api_base": target.openai_url,
        "api_key_name": "outrider",
        "can_stream": True,
        "supports_tools": True,
        "supports_schema": True,
        "vision": target.reads_images,
    }
    home = folder / "llm"
    files = {
        home / "extra-openai-models.yaml": json.dumps([model], indent=2),  # JSON is YAML too
        home / "keys.json": json.dumps({"outrider": target.api_key}),
        home / "default_model.txt": target.model,
    }
    note = "llm's own folder is not used: its keys and templates are not seen, and nothing is logged."
    return Plan(environment={"LLM_USER_PATH": str(home)}, files=files, notes=(note,))


TOOL = Tool(
    title="llm",
    program="llm",
    install="python -m pip install llm",
    plan=plan,
    prompt_tokens=0,
)
