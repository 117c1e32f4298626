"""A newcomer's first minutes, with the real default model: ask, see how tokens were won, watch the batch.

The pictures of the docs are made here: `make pictures`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from page_actions import PHONE, PICTURES, OpenPage, answers, asked, picture, until_done

from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model
from patience import wait_until
from server_process import ServerProcess, serving

NUM_LONG_ROWS = """[...document.querySelectorAll(".lane-text")]
    .filter((lane) => parseInt(lane.textContent) >= 80).length"""
FOR_PICTURES = {"viewport": {"width": 1200, "height": 660}}
CODE = "Write a Python function that checks whether a word is a palindrome."
NUM_CODE_TOKENS = "64"  # the function is whole; what follows is for the pictures only


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[ServerProcess]:
    try:
        folder = default_model.ensure()
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    with serving(folder, "--log-level", "warning") as running:
        yield running


def set_up(page: Any, **values: str) -> None:
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("Seed").fill(values.get("seed", ""))
    page.get_by_label("Draft depth").select_option(values.get("depth", "auto"))
    if not PICTURES:
        page.get_by_label("Max tokens").fill(NUM_CODE_TOKENS)


def test_the_first_question_of_the_page_is_answered_without_any_setting(
    server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(server.url)
    page.get_by_role("button", name="What is the capital of Japan?").click()
    answers(page).last.wait_for()
    until_done(page)
    assert "Tokyo" in answers(page).last.inner_text()


def test_code_is_written_and_each_token_says_how_it_was_won(
    server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(server.url, **FOR_PICTURES)
    set_up(page, seed="1", depth="3")
    page.get_by_label("Close the settings").click()
    answer = asked(page, CODE)
    assert "def is_palindrome" in answer.locator("pre").first.inner_text()
    assert re.search(r"\d+ % of drafts accepted", answer.inner_text())
    picture(page, "chat")
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("Show how each token was won").check()
    page.get_by_label("Close the settings").click()
    answers(page).last.get_by_label("Answer again").click()
    page.locator(".token-text .token").first.wait_for()
    until_done(page)
    kinds = answers(page).last.locator(".legend").inner_text()
    assert re.search(r"head [1-9]\d* %", kinds)
    page.locator(".token-text .token", has_text="return").first.hover()
    picture(page, "tokens")


def test_the_live_batch_shows_drafts_of_rows_side_by_side(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/#live", viewport={"width": 1200, "height": 860})
    page.locator("#demo:not([disabled])").click()
    wait_until(lambda: page.locator(".lane").count() >= 6)
    wait_until(lambda: "% accepted" in page.locator(".lanes").inner_text())
    if PICTURES:  # when there is more to see
        wait_until(lambda: page.evaluate(NUM_LONG_ROWS) >= 3)
    picture(page, "live")
    page.keyboard.press("Alt+3")
    page.get_by_text("Drafts accepted, by place").wait_for()
    page.keyboard.press("Alt+2")
    page.get_by_role("heading", name="Live batch").wait_for()
    if page.get_by_role("button", name="Start demo requests").is_visible():  # all have ended meanwhile
        page.locator("#demo").click()
    page.get_by_role("button", name=re.compile(r"Stop \d demo requests")).click()
    page.get_by_role("button", name="Start demo requests").wait_for()
    wait_until(lambda: server.get("/v1/status")["live_requests"] == 0)


def test_on_a_phone(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url, **PHONE)
    set_up(page, seed="1")
    page.get_by_label("Close the settings").click()
    assert "def is_palindrome" in asked(page, CODE).inner_text()
    picture(page, "phone")
