"""MkDocs calls these functions. Files outside of docs/ become pages of the site, and links lead there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
CARDS = "src/outrider/models/files/data"
PAGES = {  # file, from the root of the repository: page, from docs/
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
    f"{CARDS}/smollm2-135m-instruct/MODEL_CARD.md": "smollm2-head.md",
    f"{CARDS}/outrider-vision-135m/MODEL_CARD.md": "outrider-vision.md",
}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links are written for a reader of the repository: from the file to the file."""
    sources = {target: source for source, target in PAGES.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def to_page(match: re.Match[str]) -> str:
        if "://" in match.group(1):
            return match.group(1)
        file = posixpath.normpath(posixpath.join(posixpath.dirname(here), match.group(1)))
        return PAGES.get(file, file.removeprefix("docs/"))

    return LINK.sub(to_page, markdown)
