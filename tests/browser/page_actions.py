"""What a visitor does on the page, and pictures of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Pictures of the page, for the docs: OUTRIDER_SCREENSHOTS=FOLDER.
SCREENSHOTS = os.environ.get("OUTRIDER_SCREENSHOTS")
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
OpenPage = Callable[..., Any]


def screenshot(page: Any, name: str, after_s: float = 0) -> None:
    if SCREENSHOTS:
        page.wait_for_timeout(after_s * 1000)
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Any) -> Any:
    return page.locator(".message.assistant")


def until_done(page: Any) -> None:
    page.get_by_role("button", name="Send", exact=True).wait_for()


def asked(page: Any, text: str) -> Any:
    """Ask, wait for the end of the answer, and return its element."""
    ask(page, text)
    answers(page).last.wait_for()
    until_done(page)
    return answers(page).last
