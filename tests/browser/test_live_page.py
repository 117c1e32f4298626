"""The live batch and the model's figures, and what holds for all views: accessibility, weight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from page_actions import PHONE, OpenPage, asked, screenshot
from page_server import PageServer, page_server
from step_rows import row, step

from patience import wait_until

SERIOUS = ("serious", "critical")


@contextmanager
def busy_engine(site: PageServer, num_rows: int = 12) -> Iterator[None]:
    """Steps of rows with different depths and luck. The last two rows read their prompts."""
    reservation = site.made.context.live.admission.open()  # rows are shown only while a request lives
    metrics, is_over = site.made.context.live.metrics.steps, threading.Event()

    def run() -> None:
        number = 0
        while not is_over.wait(0.02):
            number += 1
            decoding = []
            for i in range(num_rows - 2):
                depth = (i * 2) % 9
                committed = 1 + (number * (i + 3)) % (depth + 1)
                decoding.append(
                    (row(100 + i, 1 + depth, depth, start=200 + number, num_prompt=120 + i), committed)
                )
            reading = [(row(200 + i, 16, start=16 * (number % 20), num_prompt=400), 0) for i in range(2)]
            step(metrics, *decoding, *reading, waiting=3, cache=300 << 20)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        reservation.release()


def test_twelve_rows_run_in_lanes(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(f"{site.url}#live")
    page.get_by_text("No request runs.").wait_for()
    with busy_engine(site):
        wait_until(lambda: page.locator(".lane").count() == 12)
        wait_until(lambda: "12 of 16" in page.locator(".figures").inner_text())
        assert page.locator(".lane.is-prompt").count() == 2
        text = page.locator(".figures").inner_text()
        assert "tokens a second" in text
        lane = page.locator(".lane").nth(1)
        wait_until(lambda: "% accepted" in lane.inner_text())
        painted = """(canvas) => canvas.getContext("2d")
            .getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"""
        wait_until(lambda: lane.locator("canvas").evaluate(painted))
        screenshot(page, "live", after_s=3)
        page.emulate_media(color_scheme="dark")
        screenshot(page, "live-dark", after_s=0.5)
    wait_until(lambda: page.locator(".lane").count() == 0)


def test_figures_of_the_model(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(f"{site.url}#model")
    page.get_by_text("models/tiny").wait_for()
    page.get_by_text("text and image").wait_for()
    with busy_engine(site):
        page.get_by_text("Drafts accepted, by place").wait_for()
        wait_until(lambda: page.locator(".places .memory").count() == 8)
        wait_until(lambda: page.locator(".chart .line").first.get_attribute("points"))
        wait_until(lambda: "running 12" in page.locator(".chart").nth(1).inner_text())
        assert "of 1.07 GB" in page.locator(".bars.card").inner_text()
        screenshot(page, "model")


def test_demo_requests_are_started_and_stopped(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(f"{site.url}#live")
    before = len(site.backend.requests)
    wait_until(lambda: site.made.context.live.num_live == 0)
    button = page.locator("#demo")
    button.click()  # as soon as the page knows the model
    wait_until(lambda: len(site.backend.requests) == before + 7)
    wait_until(lambda: "Start demo requests" in button.inner_text())
    kinds = site.backend.requests[before:]
    assert any(request.grammar for request in kinds)
    assert any(request.params.draft_depth == 0 for request in kinds)


def test_a_users_key_sees_no_live_figures_and_can_chat(
    browser: Any, open_page: OpenPage, errors: list[str]
) -> None:
    with page_server(api_key="user", operator_key="operator") as site:
        page = open_page(site.url)
        page.get_by_label("API key", exact=True).fill("user")
        page.keyboard.press("Enter")
        page.get_by_text("no live figures").wait_for()
        assert asked(page, "hello").inner_text().startswith("Answer 1 to: hello")
        page.goto(f"{site.url}#live")
        page.get_by_text("needs an operator's key").first.wait_for()
        page.close()
    assert all("401" in error or "403" in error for error in errors)
    errors.clear()


def findings(page: Any, **options: Any) -> list[str]:
    """What axe finds. Options: of axe.run."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page, options={"resultTypes": ["violations"]} | options).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for one in violations
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_from_using_the_page(site: PageServer, open_page: OpenPage, scheme: Any) -> None:
    rules: dict[str, Any] = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
    page = open_page(site.url, color_scheme=scheme, reduced_motion="reduce")
    assert findings(page, **rules) == []
    asked(page, "markdown")
    asked(page, "call")
    page.get_by_label("Settings of this conversation").click()
    assert findings(page, **rules) == []
    page.get_by_label("Show how each token was won").check()
    asked(page, "count")
    assert findings(page, **rules) == []
    with busy_engine(site):
        for view, part in (("live", ".lane"), ("model", ".places .memory")):
            page.goto(f"{site.url}#{view}")
            wait_until(lambda part=part: page.locator(part).count() > 3)
            assert findings(page, **rules) == []
    page.goto(f"{site.url}docs")
    page.locator("details summary").first.click()
    assert findings(page, **rules) == []


def test_nothing_keeps_people_from_using_the_page_on_a_phone(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url, **PHONE)
    asked(page, "markdown")
    assert findings(page) == []
