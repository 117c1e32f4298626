"""The text that the server prints when it is ready. It shows the effective settings, not the given ones."""

from __future__ import annotations

from outrider import __version__, fallbacks
from outrider.api.served_model import Entry, Models
from outrider.api.settings import ServerSettings
from outrider.cpu import blas
from outrider.engine.validation import ModelFacts
from outrider.request import DraftDepth, SamplingDefaults, SamplingParams


def banner(
    facts: ModelFacts,
    settings: ServerSettings,
    budget_bytes: int,
    auto_depth: DraftDepth,
    url: str,
    prefix_cache: str,
) -> str:
    lines = {
        "model": f"{facts.name} (as {_names(settings)})",
        "runs": f"{facts.dtype} on {facts.device}{_weights(facts)}",
        "BLAS": str(blas.report()) if facts.device == "cpu" else None,
        "drafts": _drafts(facts, auto_depth),
        "sampling": _sampling(settings.sampling),
        "rows": f"{settings.max_rows} at once, {settings.max_queue} may wait",
        "images": "read, and cached by content" if facts.reads_images else facts.no_images_reason,
        "context": f"{facts.max_context:,} tokens",
        "caches": f"up to {budget_bytes / 1e9:.2f} GB{_cells(facts)}",
        "prefixes": prefix_cache,
        "access": _access(settings),
        "APIs": f"{url}/v1 (OpenAI), {url} (Anthropic, Ollama)",
        "slower": _switched_off(),
        "pages": f"{url}/ (chat, live batch), {url}/docs (the API)" if settings.serves_page else None,
    }
    body = "\n".join(f"  {name:<8} {value}" for name, value in lines.items() if value is not None)
    return f"Outrider {__version__}\n{body}\nReady: {url}"


def pool_banner(models: Models, settings: ServerSettings, url: str) -> str:
    """Of a server with several models."""
    limit = models.limit_bytes
    lines = {
        "models": "".join(f"\n    {_model_line(entry)}" for entry in models.entries),
        "memory": "" if limit is None else f"up to {limit / 1e9:.2f} GB for all models",
        "rows": f"{settings.max_queue} requests may wait",
        "access": _access(settings),
        "APIs": f"{url}/v1 (OpenAI), {url} (Anthropic, Ollama)",
        "slower": _switched_off(),
        "pages": f"{url}/ (chat, live batch), {url}/docs (the API)" if settings.serves_page else None,
    }
    body = "\n".join(f"  {name:<8} {value}" for name, value in lines.items() if value)
    return f"Outrider {__version__}\n{body}\nReady: {url}"


def _model_line(entry: Entry) -> str:
    also = f" (also {', '.join(entry.aliases)})" if entry.aliases else ""
    pinned = ", pinned" if entry.is_pinned else ""
    state = {"loaded": "loaded", "failed": f"failed: {entry.failure}"}.get(entry.state, "loaded on first use")
    return f"{entry.name}{also}: {state}{pinned}"


def _switched_off() -> str | None:
    parts = [f"without {one}" for one in fallbacks.noted()]
    return "; ".join([*parts, "`outrider doctor` tells more"]) if parts else None


def _names(settings: ServerSettings) -> str:
    others = ("any other name",) if settings.any_model_name else ()
    return ", ".join((*settings.served_model_names, *others))


def _weights(facts: ModelFacts) -> str:
    bits = " and ".join(map(str, facts.weight_bits))
    return f", weights in {bits} bits" if bits else ""


def _cells(facts: ModelFacts) -> str:
    return f", keys and values in {facts.kv_bits} bits" if facts.kv_bits is not None else ""


def _drafts(facts: ModelFacts, auto_depth: DraftDepth) -> str:
    num = "as many per step as make it faster" if auto_depth == "auto" else f"{auto_depth} per step"
    depth = f"{num}, unless a request sets draft_depth"
    if facts.drafter == "mtp":
        where = "" if facts.rank_head is None else f" ({facts.rank_head}; {facts.rank_head_reason})"
        return f"MTP head {facts.head}{where}, {depth}"
    if facts.drafter == "model":
        return f"draft model {facts.draft_model}, {depth}"
    if facts.drafter == "ngram":
        return f"n-gram lookup, {depth}"
    return "none (no MTP head found); predicted outputs and grammars still draft"


def _sampling(defaults: SamplingDefaults) -> str:
    shown = {"temperature": SamplingParams.temperature} | defaults.given
    values = ", ".join(f"{name} {value:g}" for name, value in shown.items())
    return f"{values}, unless a request sets {'it' if len(shown) == 1 else 'them'}"


def _access(settings: ServerSettings) -> str:
    machines = "this machine only" if settings.is_loopback else "all machines that reach the address"
    key = "with an API key" if settings.needs_key else "without an API key"
    origins = f", web pages of {', '.join(settings.cors_origins)}" if settings.cors_origins else ""
    return f"{machines}, {key}{origins}"
