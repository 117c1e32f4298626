"""How soon the page is seen: python -m benchmarks.first_paint /usr/bin/chromium [--rounds 9]

Opens the page of a real server again and again, each time with an empty browser cache. First paint: the page
is seen. Ready: the page knows the model, and a question can be asked.
"""

from __future__ import annotations

import argparse
import os
import statistics

from playwright.sync_api import Browser, sync_playwright

from benchmarks.live_view import serving

PAINT_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def open_once(browser: Browser, url: str) -> tuple[float, float]:
    """Milliseconds from the request to the first paint, and until the page is ready."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.goto(url)
        page.get_by_text("is ready.").wait_for()
        ready_ms = page.evaluate("performance.now()")
        return page.evaluate(PAINT_MS), ready_ms


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the first paint of the page.")
    parser.add_argument("browser", help="file of Chromium or Chrome")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    args = parser.parse_args()
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with serving() as (url, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=flags)
        found = [open_once(browser, url) for _ in range(args.rounds)]
        browser.close()
    for name, values in zip(("first paint", "ready"), zip(*found, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.0f} ms ({min(values):.0f}-{max(values):.0f})")


if __name__ == "__main__":
    main()
