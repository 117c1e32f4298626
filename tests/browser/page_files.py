"""Which files of the page the pictures in the docs show: python -m tests.browser.page_files docs/pictures

Writes their hashes beside the pictures. A test compares them, so that no picture shows an earlier page.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from outrider.api.page.routes import STATIC

RECORD = "made_from.json"


def page_files() -> dict[str, str]:
    """The sha256 of each file that decides how the page looks: all but the libraries."""
    files = [path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts]
    return {
        path.relative_to(STATIC).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
        if path.name not in ("docs.html", "docs.js")  # another page
    }


if __name__ == "__main__":
    Path(sys.argv[1], RECORD).write_text(json.dumps(page_files(), indent=1) + "\n")
