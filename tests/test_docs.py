"""Files that the docs name exist, relative links lead somewhere, and no flag of the server is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.api import limits
from outrider.chat.prompt_limit import MAX_CHARACTERS_PER_TOKEN
from outrider.cli.foreign_flags import ALIASES, REFUSED, SWITCH_ALIASES, UNNEEDED
from outrider.cli.serve_options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "outrider"
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")]
DOCS += sorted((ROOT / "docs").glob("*.md"))

QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|lock|svg|c|h)")
CITED = re.compile(r'docs/LOG\.md,\s*(?:#\s*)?"([^"]+)"')
LOADED = re.compile(r"<(?:script|img|iframe|link)[^>]*\s(?:src|href)=\"(?:\w+:)?//")
IMPORTED = re.compile(r"(?:@import|url\()\s*['\"]?(?:\w+:)?//")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?|[\w-]+/")
FOLDERS = {path.name for base in (ROOT, PACKAGE) for path in base.iterdir() if path.is_dir()}


def exists(path: str) -> bool:
    """From the root or from src/outrider. A bare file name may be anywhere: its folder was named before."""
    if any((base / path).exists() for base in (ROOT, PACKAGE)):
        return True
    return "/" not in path and any(
        any(folder.rglob(path)) for folder in (PACKAGE, ROOT / "tests", ROOT / "recipes", ROOT / "benchmarks")
    )


def named_paths(text: str) -> set[str]:
    """Files by their endings; folders if they begin with a folder of the repository or of the package."""
    quoted = set(QUOTED.findall(text))
    files = {name for name in quoted if FILE.fullmatch(name)}
    return files | {name for name in quoted if FOLDER.fullmatch(name) and name.split("/")[0] in FOLDERS}


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_paths_in_the_docs_exist(file: Path) -> None:
    assert [name for name in sorted(named_paths(file.read_text())) if not exists(name)] == []


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_relative_links_in_the_docs_lead_to_files(file: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(file.read_text()) if "://" not in link]
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_entries_of_the_log_that_the_code_cites_exist() -> None:
    cited = {title for file in PACKAGE.rglob("*.py") for title in CITED.findall(file.read_text())}
    log = (ROOT / "docs" / "LOG.md").read_text()
    assert [title for title in sorted(cited) if f"- **{title}" not in log] == []


def test_every_flag_of_the_server_is_documented() -> None:
    foreign = [f"--{name}" for table in (ALIASES, SWITCH_ALIASES, UNNEEDED, REFUSED) for name in table]
    flags = [option.flag for option in OPTIONS.values() if option.key != "model"] + foreign
    serving = (ROOT / "docs" / "SERVING.md").read_text()
    assert [flag for flag in flags if not re.search(rf"`{flag}[` ]", serving)] == []


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_anchors_in_the_docs_are_headings(file: Path) -> None:
    """Links within one file: the heading in lower case, without punctuation, with hyphens for spaces."""
    text = file.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_limits_in_the_docs_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "SERVING.md").read_text()
    table = text.partition("**Limits of a request.**")[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+) \| ([\d,]+) \|$", table, re.MULTILINE)
    documented = {what: int(most.replace(",", "")) for what, most in rows}
    in_code = {limit.what: limit.most for limit in vars(limits).values() if isinstance(limit, limits.Limit)}
    (characters,) = (what for what in documented if what.startswith("characters of a prompt"))
    assert documented == in_code | {characters: MAX_CHARACTERS_PER_TOKEN}


def test_the_site_loads_nothing_from_other_servers(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (it is in outrider[dev])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 10
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    assert [file.name for file in tmp_path.rglob("*.css") if IMPORTED.search(file.read_text())] == []
