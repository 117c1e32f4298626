"""The page of a server with several models: what can be picked, and what it says while one is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_backend import FACTS, FakeBackend, FakeTokenizer, settings
from fake_embedder import FakeEmbedder
from page_actions import PHONE, OpenPage, answers, ask, asked, screenshot, until_done
from page_server import PageServer, answer, served, short_pause
from test_live_page import findings

from outrider.api.app import create_pool_server
from outrider.api.logprobs import TokenText
from outrider.api.no_chat import NoChat
from outrider.api.served_model import ExpectedModel, RequestDefaults, ServedModel
from outrider.pool.model_entry import MemoryNeed, ModelEntry, ModelLoad
from outrider.pool.model_pool import ModelPool
from patience import Hurdle, wait_until

GB = 1_000_000_000
LIMIT = 20 * GB  # two of the three models fit
CODER, WRITER, EMBEDDER = "qwen3-coder-30b-a3b-instruct-4bit", "writer", "all-minilm-l6-v2"


@dataclass
class FakeSource:
    model: ServedModel
    num_bytes: int
    hurdle: Hurdle = field(default_factory=Hurdle)

    def measure(self, load: ModelLoad) -> MemoryNeed:
        return MemoryNeed(self.num_bytes, self.num_bytes)

    def load(self, num_bytes: int | None, load: ModelLoad) -> ServedModel:
        load.note("loading the weights", 0.4)
        self.hurdle.stop()
        load.check_wanted()
        return self.model


def chat_model(backend: FakeBackend) -> ServedModel:
    facts = replace(FACTS, max_context=8192)
    return ServedModel(backend, facts, TokenText(FakeTokenizer()), RequestDefaults())


@dataclass
class Models:
    """A server with two chat models, of which the first is loaded, and an embedding model."""

    backends: dict[str, FakeBackend]
    sources: dict[str, FakeSource]
    site: PageServer


@pytest.fixture
def models(browser: Any) -> Iterator[Models]:
    backends = {name: FakeBackend(answer=answer, gate=short_pause) for name in (WRITER, CODER)}
    embedder = FakeEmbedder()
    embedding = ServedModel(
        NoChat(embedder, EMBEDDER), FACTS, TokenText(FakeTokenizer()), RequestDefaults(), embedder=embedder
    )
    sources = {
        WRITER: FakeSource(chat_model(backends[WRITER]), 8 * GB),
        CODER: FakeSource(chat_model(backends[CODER]), 11 * GB),
        EMBEDDER: FakeSource(embedding, GB // 10),
    }
    sources[WRITER].hurdle.open()
    pool = ModelPool([ModelEntry(name, source) for name, source in sources.items()], LIMIT)
    pool.load_now(pool.find(WRITER))
    expected = {EMBEDDER: ExpectedModel(RequestDefaults(), 256, kind="embedding")}
    made = create_pool_server(pool, settings(served_model_names=(WRITER,)), expected=expected)
    with served(PageServer(made, backends[WRITER])) as site:
        yield Models(backends, sources, site)
        for source in sources.values():
            source.hurdle.open()


def picker(page: Any) -> Any:
    return page.get_by_role("combobox", name="Model", exact=True)


def options(page: Any) -> list[str]:
    found: list[str] = picker(page).locator("option").all_inner_texts()
    return found


def test_a_model_is_picked_and_the_page_says_that_it_is_being_loaded(
    models: Models, open_page: OpenPage
) -> None:
    page = open_page(models.site.url)
    wait_until(lambda: options(page) == [WRITER, f"{CODER} (not loaded)"])
    page.get_by_text(f"{WRITER} is ready.").wait_for()
    screenshot(page, "picker")
    picker(page).select_option(CODER)
    page.get_by_text(f"{CODER} is loaded when you ask the first question.").wait_for()
    ask(page, "hello")
    page.get_by_text(f"{CODER} is being loaded").wait_for()
    wait_until(lambda: models.sources[CODER].hurdle.reached.is_set())
    screenshot(page, "picker-loading", after_s=0.5)
    page.goto(f"{models.site.url}#model")
    page.get_by_role("cell", name="loading the weights, 40 %").wait_for()
    screenshot(page, "picker-model-page", after_s=0.5)
    page.goto(f"{models.site.url}#chat")
    models.sources[CODER].hurdle.open()
    page.get_by_text("Answer 1 to: hello").wait_for()
    until_done(page)
    assert answers(page).last.locator(".message-tools").inner_text().startswith(CODER)
    wait_until(lambda: options(page) == [WRITER, CODER])
    assert (len(models.backends[CODER].requests), len(models.backends[WRITER].requests)) == (1, 0)
    page.reload()  # the choice stays
    wait_until(lambda: picker(page).input_value() == CODER)
    picker(page).select_option(WRITER)
    asked(page, "again")
    assert len(models.backends[WRITER].requests) == 1


def test_a_question_goes_to_the_model_that_was_picked_before_the_page_knows_more_of_it(
    models: Models, open_page: OpenPage
) -> None:
    page = open_page(models.site.url)
    page.get_by_text(f"{WRITER} is ready.").wait_for()
    models.sources[CODER].hurdle.open()
    held: list[Any] = []
    page.route(f"**/v1/models/{CODER}", lambda route: held.append(route))
    picker(page).select_option(CODER)
    ask(page, "hello")
    page.get_by_text("Answer 1 to: hello").wait_for()
    until_done(page)
    assert (len(models.backends[CODER].requests), len(models.backends[WRITER].requests)) == (1, 0)
    assert held
    for route in held:
        route.continue_()


def test_stop_ends_the_load_of_a_model_that_nobody_else_waits_for(
    models: Models, open_page: OpenPage
) -> None:
    page = open_page(models.site.url)
    picker(page).select_option(CODER)
    page.get_by_text(f"{CODER} is loaded when").wait_for()
    ask(page, "hello")
    wait_until(lambda: models.sources[CODER].hurdle.reached.is_set())
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped.").wait_for()
    entry = models.site.made.context.models.find(CODER)
    wait_until(lambda: not entry.is_wanted)  # the server hears of it after the page has said so
    models.sources[CODER].hurdle.open()
    wait_until(lambda: entry.state == "not_loaded")
    assert entry.num_loads == 0


@pytest.mark.parametrize("screen", ["wide", "phone"])
def test_the_picker_leaves_room_for_the_rest_and_keeps_nobody_from_using_it(
    models: Models, open_page: OpenPage, screen: str
) -> None:
    page = open_page(models.site.url, **(PHONE if screen == "phone" else {}))
    picker(page).select_option(CODER)
    page.get_by_text(f"{CODER} is loaded when").wait_for()
    area, box = (page.locator(part).bounding_box() for part in (".composer-area", ".model-picker"))
    assert box["width"] < 0.75 * area["width"]
    assert box["height"] < 44
    hint = page.locator(".composer-hint").bounding_box()
    assert hint["height"] < 48, "one line"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert findings(page) == []
    screenshot(page, f"picker-{screen}")
    page.goto(f"{models.site.url}#model")
    page.get_by_text("Models of this server").wait_for()
    assert page.locator(".facts dd").first.inner_text() == CODER
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert findings(page) == []
    screenshot(page, f"picker-models-{screen}")
