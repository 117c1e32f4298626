"""Codex: OpenAI's Responses API, set up by overrides of its configuration."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.launch.tool import Plan, Target, Tool

PROVIDER = "outrider"
KEY = "OUTRIDER_LAUNCH_KEY"  # the variable in which Codex finds the key
SILENCE_MS = 3_600_000  # without an event: a long prompt is read. Codex's own is five minutes
COMPACT_AT = 0.8  # of the context; chosen by hand: an answer and a tool's result must still fit


def plan(target: Target, folder: Path) -> Plan:
    provider = {
        "name": "Outrider",
        "base_url": target.openai_url,
        "env_key": KEY,
        "wire_api": "responses",
        "stream_idle_timeout_ms": SILENCE_MS,
    }
    settings: dict[str, object] = {
        "model": target.model,
        "model_provider": PROVIDER,
        f"model_providers.{PROVIDER}": provider,
    }
    if target.context is not None:
        settings["model_context_window"] = target.context
        settings["model_auto_compact_token_limit"] = int(target.context * COMPACT_AT)
    settings["web_search"] = "disabled"  # it would be run by OpenAI's server
    overrides = [word for key, value in settings.items() for word in ("-c", f"{key}={_toml(value)}")]
    return Plan(overrides, {KEY: target.api_key})


def _toml(value: object) -> str:
    """Texts, numbers and tables of them, which TOML writes as JSON does but for the tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


TOOL = Tool(
    title="Codex",
    program="codex",
    install="npm install -g @openai/codex",
    plan=plan,
    prompt_tokens=9_200,
)
