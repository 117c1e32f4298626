"""What a visitor does on the page, and pictures of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Pictures of the page, to look at: OUTRIDER_SCREENSHOTS=FOLDER. Those in the docs: OUTRIDER_PICTURES=FOLDER.
SCREENSHOTS = os.environ.get("OUTRIDER_SCREENSHOTS")
PICTURES = os.environ.get("OUTRIDER_PICTURES")
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
OpenPage = Callable[..., Any]
# A transaction after all others: a page that is left drops those that have not ended.
STORED = """() => new Promise((resolve, reject) => {
    const opening = indexedDB.open("outrider", 1);
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
        const last = opening.result.transaction("conversations", "readwrite");
        last.oncomplete = () => resolve(opening.result.close());
        last.objectStore("conversations").count();
    };
})"""


def screenshot(page: Any, name: str, after_s: float = 0, folder: str | None = SCREENSHOTS) -> None:
    if folder:
        page.wait_for_timeout(after_s * 1000)
        page.screenshot(path=Path(folder) / f"{name}.png")


def picture(page: Any, name: str, after_s: float = 0) -> None:
    """One of the docs: of the real server with the default model."""
    screenshot(page, name, after_s, PICTURES)


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


def reload(page: Any) -> None:
    """Once the conversations are stored: a visitor is not as quick as a test."""
    page.evaluate(STORED)
    page.reload()
