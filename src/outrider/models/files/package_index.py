"""Where a package index keeps a wheel. For a Python without pip, as `uv tool install` makes it.

Owns the address of the index and the reading of its page (PEP 503, the form that every index has). Must not
know what is in the wheel.
"""

from __future__ import annotations

import os
import urllib.parse
from html.parser import HTMLParser

DEFAULT_INDEX = "https://pypi.org/simple"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")  # the first that is set


class NotInIndex(Exception):
    """The index has no such wheel. The message is the reason."""


def page_url(package: str) -> str:
    """The page that lists the files of a package."""
    index = next((os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)), DEFAULT_INDEX)
    if "://" not in index:
        raise NotInIndex(f"the package index {index!r} is no address (UV_DEFAULT_INDEX, PIP_INDEX_URL)")
    return f"{index.rstrip('/')}/{package}/"


def wheel_url(page: str, html: str, package: str, version: str) -> str:
    """The address of the wheel for any platform. Raises NotInIndex."""
    wanted = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    links = _Links()
    links.feed(html)
    for link in links.found:
        url = urllib.parse.urljoin(page, link)
        if urllib.parse.urlsplit(url).path.rpartition("/")[2] == wanted:
            return url
    raise NotInIndex(f"{page} has no {wanted}")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]
