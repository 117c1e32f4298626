"""Which browser the tests of the web page use: one that is installed, never one that is downloaded."""

from __future__ import annotations

import importlib.util
import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


def browser_path() -> str | None:
    """$OUTRIDER_TEST_BROWSER, else the first that is found."""
    given = os.environ.get("OUTRIDER_TEST_BROWSER")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    return found or (MAC if os.path.exists(MAC) else None)


def reason_to_skip() -> str | None:
    """Why the tests of the web page cannot run; None if they can."""
    for package in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(package) is None:
            return f"the Python package {package} is not installed (it is in outrider[dev])"
    if browser_path() is None:
        return "no Chromium or Chrome was found (apt-get install chromium, or OUTRIDER_TEST_BROWSER=FILE)"
    return None
