"""How `outrider serve` loads an embedding model or a reranker: beside `model_source`, for text models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.api.logprobs import TokenText
from outrider.api.no_chat import NoChat
from outrider.api.served_model import RequestDefaults, ServedModel
from outrider.api.settings import ServerSettings
from outrider.build_embedder import Embedder, build_embedder
from outrider.cli.serve_options import GROUPS, OPTIONS
from outrider.config import InvalidConfig
from outrider.engine.device_turns import EngineTurns
from outrider.engine.validation import ModelFacts
from outrider.pooling import PoolingFacts

# Options that only models that generate text have: groups of them, and single ones.
TEXT_GROUPS = ("drafts", "sampling defaults", "chat", "prefix cache", "images", "adapters")
TEXT_OPTIONS = ("max_rows", "memory_budget", "prefill_step_size", "max_stall_ms", "max_tokens")


def load_embedder(
    folder: Path,
    path: str,
    options: dict[str, Any],
    turns: EngineTurns,
    is_outlived: bool,
    check_wanted: Callable[[], None],
    cache_bytes: int | None,
) -> Embedder:
    """`path`: the model as the operator named it. Each part of a pass is a turn on the device."""
    given = folder, path, options["dtype"], options["max_context"]
    return build_embedder(*given, partial(_turn, turns), is_outlived, check_wanted, cache_bytes)


@contextmanager
def _turn(turns: EngineTurns) -> Iterator[None]:
    turns.take()
    try:
        yield
    finally:
        turns.give_back()


def served_embedder(embedder: Embedder, name: str) -> ServedModel:
    return ServedModel(
        NoChat(embedder.service, name),
        model_facts(embedder.engine.facts),
        TokenText(embedder.tokenizer),
        RequestDefaults(),
        max_rows=1,
        embedder=embedder.service,
    )


def check_options(options: dict[str, Any], model: str) -> None:
    """Raise InvalidConfig for an option that has no meaning without text generation."""
    keys = [option.key for group in TEXT_GROUPS for option in GROUPS[group]]
    for key in (*keys, *TEXT_OPTIONS):
        option = OPTIONS[key]
        default = () if option.is_list else False if option.is_switch else option.default
        if options[key] != default:
            raise InvalidConfig(
                f"{option.flag} is for models that generate text, and {model} makes embeddings or scores: "
                f"leave {option.flag} out"
            )


def model_facts(facts: PoolingFacts) -> ModelFacts:
    """As the routes that all servers have show them."""
    return ModelFacts(
        name=facts.name,
        vocab_size=facts.vocab_size,
        max_context=facts.max_tokens,
        eos_ids=frozenset(),
        drafter="none",
        dtype=facts.dtype,
        device=facts.device,
    )


def embedder_banner(facts: PoolingFacts, settings: ServerSettings, url: str) -> str:
    length = "normalised" if facts.is_normalised else "not normalised"
    makes = f"embeddings of {facts.dimensions} values, {length}; {facts.pooling} pooling"
    lines = {
        "model": f"{facts.name} (as {', '.join(settings.served_model_names)})",
        "runs": f"{facts.dtype} on {facts.device}",
        "makes": makes if facts.kind == "embedding" else "rerank scores",
        "inputs": f"up to {facts.max_tokens:,} tokens each",
        "queue": f"{settings.max_queue} requests may wait",
        "APIs": f"{url}/v1/embeddings, {url}/v1/rerank" if facts.kind == "embedding" else f"{url}/v1/rerank",
    }
    body = "\n".join(f"  {name:<8} {value}" for name, value in lines.items())
    return f"Outrider {__version__}\n{body}\nReady: {url}"
