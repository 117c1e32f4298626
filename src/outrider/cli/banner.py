"""What the server says when it is ready: what is really on, not what was asked for."""

from __future__ import annotations

from outrider import __version__
from outrider.api.settings import ServerSettings
from outrider.cpu import blas
from outrider.engine.validation import ModelFacts
from outrider.request import DraftDepth


def banner(
    facts: ModelFacts,
    settings: ServerSettings,
    budget_bytes: int,
    auto_depth: DraftDepth,
    url: str,
    prefixes: str,
) -> str:
    lines = {
        "model": f"{facts.name} (as {', '.join(settings.served_model_names)})",
        "runs": f"{facts.dtype} on {facts.device}",
        "BLAS": str(blas.report()) if facts.device == "cpu" else None,
        "drafts": _drafts(facts, auto_depth),
        "rows": f"{settings.max_rows} at once, {settings.max_queue} may wait",
        "pictures": "read, and remembered by content" if facts.reads_images else facts.no_images_reason,
        "context": f"{facts.max_context:,} tokens",
        "caches": f"up to {budget_bytes / 1e9:.2f} GB",
        "prefixes": prefixes,
        "access": _access(settings),
        "APIs": f"{url}/v1 (OpenAI), {url} (Anthropic), {url}/docs",
    }
    body = "\n".join(f"  {name:<8} {value}" for name, value in lines.items() if value is not None)
    return f"Outrider {__version__}\n{body}\nReady: {url}"


def _drafts(facts: ModelFacts, auto_depth: DraftDepth) -> str:
    num = "as many a step as pay for themselves" if auto_depth == "auto" else f"{auto_depth} a step"
    depth = f"{num}, unless a request says otherwise"
    if facts.drafter == "mtp":
        return f"MTP head {facts.head}, {depth}"
    if facts.drafter == "ngram":
        return f"n-gram lookup, {depth}"
    return "none of its own (no MTP head beside the model); predictions and grammars still draft"


def _access(settings: ServerSettings) -> str:
    who = "this machine" if settings.is_loopback else "anyone who reaches it"
    key = "with the API key" if settings.api_key else "without a key"
    origins = f", browsers on {', '.join(settings.cors_origins)}" if settings.cors_origins else ""
    return f"{who}, {key}{origins}"
