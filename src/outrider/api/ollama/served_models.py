"""The models that Ollama's clients name: their names, which are served, loading and unloading them."""

from __future__ import annotations

from starlette.types import Receive

from outrider.api import sse
from outrider.api.context import LATEST, ServerContext
from outrider.api.errors import ApiError
from outrider.api.keep_alive import KeepAlive
from outrider.api.model_card import ModelCard
from outrider.api.served_model import Entry, RequestedModel
from outrider.engine.validation import ModelFacts

MAX_SHOWN_NAME = 200  # characters of a client's name in an error; chosen by hand


def tagged(name: str) -> str:
    """As Ollama lists names. Open WebUI, for one, finds a model only by a name with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def listed(context: ServerContext) -> dict[str, Entry]:
    """The models under each of their names, and their adapters."""
    found = {tagged(name): entry for entry in context.models.entries for name in entry.names}
    for entry in context.models.entries:
        found |= {f"{entry.name}:{adapter}": entry for adapter in context.adapters_of(entry) or ()}
    return found


def find(
    context: ServerContext, requested: str, keep_alive: KeepAlive | None = None, adapter: str | None = None
) -> RequestedModel:
    """Raises a 404 for a name that is not served, in Ollama's words."""
    try:
        return context.find_model(requested, keep_alive, adapter)
    except ApiError as error:
        if error.status_code != 404:
            raise
    known = ", ".join(f"'{name}'" for name in listed(context))
    raise ApiError(
        404,
        f"model '{requested[:MAX_SHOWN_NAME]}' not found: this server has {known}",
        param="model",
        code="model_not_found",
    )


def known(context: ServerContext, entry: Entry) -> tuple[ModelFacts, ModelCard]:
    """What is known of a model, loaded or not."""
    expected = context.expected_of(entry)
    facts = expected.facts or ModelFacts(  # it was never loaded
        entry.name,
        vocab_size=0,
        max_context=expected.max_context or 0,
        eos_ids=frozenset(),
        drafter="none",
        reads_images=expected.reads_images,
    )
    return facts, expected.card


async def load_or_unload(context: ServerContext, model: RequestedModel, receive: Receive) -> str:
    """A request without a prompt loads the model, or with keep_alive 0 unloads it. Returns Ollama's word."""
    if model.keep_alive_s == 0:
        await context.models.unload(model.entry)
        return "unload"

    async def load() -> None:
        async with model.use():
            pass

    await sse.until_disconnected(receive, load())
    return "load"
