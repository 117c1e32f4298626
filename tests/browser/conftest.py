"""A browser for the tests of the web page. A page must not write an error into its console."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from page_actions import OpenPage
from page_server import PageServer, page_server

from browser.browsers import browser_path, reason_to_skip
from patience import PATIENCE_S


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of one module: Playwright runs an event loop on this thread, and later tests need their own."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
        chromium = playwright.chromium.launch(executable_path=browser_path(), args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(browser: Any) -> Iterator[PageServer]:
    with page_server() as running:
        yield running


@pytest.fixture
def errors() -> list[str]:
    """What the pages of a test wrote into their consoles. A test that expects an error clears the list."""
    return []


@pytest.fixture
def open_page(browser: Any, errors: list[str]) -> Iterator[OpenPage]:
    """Opens a page in a context of its own: an empty storage. Options: of Playwright's new_context."""
    contexts = []

    def open_(url: str, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 800}} | options
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_S * 1000)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []
