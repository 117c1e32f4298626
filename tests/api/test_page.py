"""The files of the web pages: complete, small, from this server only, and readable without a key."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import httpx
import pytest
from fake_backend import Client, FakeBackend, server

from browser.page_files import RECORD, page_files
from outrider.api.page.routes import STATIC, static_files
from patience import PATIENCE_S
from server_process import ServerProcess

MAX_PAGE_BYTES = 500_000  # all files that a browser loads for /
REFERENCE = re.compile(r"""(?:src|href)="(page/[^"]+)"|from "(\.[^"]+)"|import\("(\.[^"]+)"\)""")
OWN = [path for path in sorted(STATIC.rglob("*")) if path.is_file() and "vendor" not in path.parts]
VENDOR = STATIC / "vendor"
HTML = {"accept": "text/html"}
PICTURES = {"chat.png", "live.png", "phone.png", "tokens.png"}


def client(**changes: object) -> Client:
    return Client(server(FakeBackend(), **changes))


def loaded(name: str, found: set[str] | None = None) -> set[str]:
    """A file and all files that it loads, directly or through others."""
    found = set() if found is None else found
    if name in found:
        return found
    found.add(name)
    file = STATIC / name
    if file.suffix not in (".html", ".js") or VENDOR in file.parents:
        return found
    for from_page, *from_module in REFERENCE.findall(file.read_text()):
        relative = next(filter(None, from_module), "")
        target = from_page.removeprefix("page/") or (file.parent / relative).resolve().relative_to(STATIC)
        loaded(str(target), found)
    return found


@pytest.mark.parametrize("start", ["index.html", "docs.html"])
def test_everything_that_a_page_loads_is_there(start: str) -> None:
    names = loaded(start)
    assert len(names) > 4
    page = client()
    for name in names:
        assert page.get(f"/page/{name}").status_code == 200, name


def test_the_page_is_small() -> None:
    files = static_files()
    assert sum(len(files[name].content) for name in loaded("index.html")) <= MAX_PAGE_BYTES


def test_no_file_of_ours_is_unused() -> None:
    used = loaded("index.html") | loaded("docs.html")
    assert {path.relative_to(STATIC).as_posix() for path in OWN} <= used


def test_pages_have_a_strict_policy_and_name_no_other_origin() -> None:
    for path in ("/", "/docs", "/page/js/main.js", "/page/style.css"):
        headers = client().get(path, headers=HTML).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "*" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    for path in OWN:
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name  # a namespace, not a request


def test_scripts_and_styles_are_files_not_parts_of_the_html() -> None:
    for name in ("index.html", "docs.html"):
        html = (STATIC / name).read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", html)
    for path in STATIC.glob("js/*.js"):
        assert "innerHTML" not in path.read_text(), path.name


def test_a_page_that_has_not_changed_is_not_sent_again() -> None:
    first = client().get("/", headers=HTML)
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    again = client().get("/", headers=HTML | {"if-none-match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client().get("/", headers=HTML | {"if-none-match": '"other"'}).status_code == 200
    assert client().request("HEAD", "/", headers=HTML).headers["etag"] == first.headers["etag"]


@pytest.mark.parametrize("name", ["none.js", "", "../routes.py", "%2e%2e/routes.py", "js", "js/"])
def test_other_files_are_not_served(name: str) -> None:
    response = client().get(f"/page/{name}")
    assert response.status_code == 404
    assert b"APIRouter" not in response.content


def test_with_keys_the_pages_are_readable_and_data_is_not() -> None:
    keyed = client(api_key="secret")
    for path in ("/", "/docs", "/page/js/main.js", "/page/vendor/manifest.json", "/openapi.json"):
        assert keyed.get(path).status_code == 200
    for path in ("/v1/models", "/v1/status", "/v1/status/stream", "/metrics"):
        assert keyed.get(path).status_code == 401


def test_a_real_server_names_its_pages_and_serves_them(live: ServerProcess) -> None:
    assert f"{live.url}/docs" in live.banner
    for path in ("/", "/docs"):
        page = httpx.get(f"{live.url}{path}", headers=HTML, timeout=PATIENCE_S)
        assert page.text.startswith("<!doctype html>")


def test_pages_can_be_turned_off() -> None:
    without = client(serves_page=False)
    for path in ("/docs", "/page/js/main.js"):
        assert without.get(path).status_code == 404
    assert without.get("/", headers=HTML).headers["content-type"].startswith("text/plain")
    assert without.get("/openapi.json").status_code == 200


def test_pages_are_not_part_of_the_api_description() -> None:
    paths = client().get("/openapi.json").json()["paths"]
    assert not [path for path in paths if path in ("/", "/docs") or path.startswith("/page")]


def test_libraries_are_those_of_the_manifest() -> None:
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    listed = {}
    for package in manifest:
        assert package["package"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["license"]
        assert package["license_file"] in [file["path"] for file in package["files"]]
        listed |= {file["path"]: file["sha256"] for file in package["files"]}
    present = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert present == listed
    used: set[Path] = {STATIC / name for name in loaded("index.html") if name.startswith("vendor/")}
    assert {STATIC / "vendor" / name for name in present if name.endswith(".js")} == used


def test_the_pictures_in_the_docs_show_this_page() -> None:
    pictures = Path(__file__).parents[2] / "docs" / "pictures"
    made_from = json.loads((pictures / RECORD).read_text())
    assert made_from == page_files(), "the page has changed since its pictures were made: run `make pictures`"
    for name in PICTURES:
        size = (pictures / name).stat().st_size
        assert 10_000 < size < 200_000, name
    assert {path.name for path in pictures.glob("*.png")} == PICTURES
