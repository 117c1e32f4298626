"""Claude Code: Anthropic's API, set up by environment variables.

The variables are given as settings too: `env` in the user's own settings overrides the environment.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.launch.tool import Plan, Target, Tool, without_unknown

MODELS = ("OPUS", "SONNET", "HAIKU", "FABLE")  # aliases, all of which mean the one model here
TIMEOUT_MS = 3_600_000  # of a request, in which a long prompt is read; Claude Code's own is ten minutes
MAX_ANSWER = 32_000  # tokens; Claude Code's own default for models that it does not know


def plan(target: Target, folder: Path) -> Plan:
    aliases = {f"ANTHROPIC_DEFAULT_{alias}_MODEL": target.model for alias in MODELS}
    variables = without_unknown(
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.api_key,
            "ANTHROPIC_MODEL": target.model,
            **aliases,
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": target.context,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": target.max_answer(MAX_ANSWER),
            # The header changes with every request and stands at the front of the prompt: nothing after it
            # could be taken from the prefix cache. (Outrider removes it; other servers on the way may not.)
            "CLAUDE_CODE_ATTRIBUTION_HEADER": 0,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": 1,
            "API_TIMEOUT_MS": TIMEOUT_MS,
        }
    )
    settings = folder / "claude-settings.json"
    files = {settings: json.dumps({"env": variables}, indent=2)}
    return Plan(("--settings", str(settings)), variables, ("ANTHROPIC_API_KEY",), files)


TOOL = Tool(
    title="Claude Code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    plan=plan,
    prompt_tokens=12_000,
)
