"""Web pages cannot use a browser to reach the server: neither by DNS rebinding nor across sites."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from fake_backend import USER, Client, FakeBackend, server, settings

from outrider.api.host_check import HostNames, host_names
from outrider.config import InvalidConfig
from patience import PATIENCE_S
from server_process import ServerProcess

CHAT = "/v1/chat/completions"
BODY = {"messages": USER}


def post(headers: dict[str, str], **changes: Any) -> httpx.Response:
    return Client(server(FakeBackend(), **changes), **headers).post(CHAT, BODY)


PATHS = ["/", "/page/js/main.js", "/docs", "/openapi.json", "/v1/models", "/v1/status/stream", "/metrics"]


@pytest.mark.parametrize("path", PATHS)
def test_a_rebound_name_reads_nothing(path: str) -> None:
    response = Client(server(FakeBackend()), host="evil.example").get(path)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in response.json()["error"]["message"]


def test_a_rebound_name_changes_nothing_on_a_real_server(live: ServerProcess) -> None:
    rebound = {
        "host": "evil.example:8000",
        "origin": "http://evil.example:8000",
        "sec-fetch-site": "same-origin",
    }
    foreign = {"origin": "http://evil.example"}
    for headers in (rebound, foreign):
        chat = live.post(CHAT, BODY | {"max_tokens": 1}, headers=headers)
        deleted = httpx.delete(f"{live.url}/v1/cache", headers=headers, timeout=PATIENCE_S)
        assert (chat.status_code, deleted.status_code) == (403, 403)
    assert live.post(CHAT, BODY | {"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "a.localhost:1",
        "localhost.",
        "127.0.0.1",
        "[::1]:8000",
        "10.1.2.3:80",
        "",
    ],
)
def test_loopback_names_and_addresses_are_answered(host: str) -> None:
    assert post({"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:80@evil.example",
        "notlocalhost",
        "[evil]",
        "localhost:8000:9",
        "local host",
        "test.evil",
        "*",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert post({"host": host}).status_code == 403


def test_health_is_answered_under_any_name() -> None:
    client = Client(server(FakeBackend()), host="balancer.example")
    assert client.get("/health").status_code == 200
    assert client.get("/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (("api.example.org",), "API.example.org:443", 200),
        (("api.example.org",), "example.org", 403),
        (("*.example.org",), "a.b.example.org", 200),
        (("*.example.org",), "example.org", 403),
        (("*.example.org",), "evilexample.org", 403),
        (("*",), "anything.example", 200),
    ],
)
def test_names_that_the_operator_allows(allowed: tuple[str, ...], host: str, status: int) -> None:
    assert post({"host": host}, allowed_hosts=allowed).status_code == status


@pytest.mark.parametrize("name", ["http://example.org", "example.org:80", "", "a/b", "*x", "[::1]"])
def test_what_is_no_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidConfig, match="--allowed-hosts"):
        settings(allowed_hosts=(name,))


def test_the_machines_own_name_counts_if_others_can_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    public = host_names(settings(host="0.0.0.0", api_key="k"))
    assert all(name in public for name in ("box.lan:8000", "box", "box.local"))
    assert "other.lan" not in public
    assert "box.lan" not in host_names(settings(host="127.0.0.1"))
    assert "given.lan" in host_names(settings(host="given.lan", api_key="k"))


def test_two_host_headers_must_both_be_allowed() -> None:
    names = HostNames(["localhost"])
    assert "localhost" in names
    headers = [("host", "localhost"), ("host", "evil.example")]
    response = Client(server(FakeBackend())).request("POST", CHAT, json=BODY, headers=headers)
    assert response.status_code == 403


# -- pages of other sites --------------------------------------------------------------------------------

PAGE = "http://app.test"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # curl and the SDKs
        ({"origin": "http://test"}, 200),  # the server's own page, such as /docs
        ({"origin": "https://test"}, 200),  # the same behind a proxy with TLS
        ({"origin": "http://test:9"}, 403),
        ({"origin": PAGE}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://test.evil.example"}, 403),
        ({"origin": "http://test", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://public.example", "sec-fetch-site": "same-origin"}, 200),  # a proxy changed Host
        ({"origin": "http://test", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": PAGE, "sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
    ],
)
def test_a_foreign_page_cannot_post(headers: dict[str, str], status: int) -> None:
    response = post(headers)
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "origin_not_allowed"
        assert "--cors-origin" in response.json()["error"]["message"]


def test_a_page_that_the_operator_allows_can_post() -> None:
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    assert post(headers, cors_origins=(PAGE,)).status_code == 200
    assert post(headers, cors_origins=("*",)).status_code == 200
    assert post(headers, cors_origins=("http://other.test",)).status_code == 403


def test_a_refusal_has_the_shape_of_its_api() -> None:
    body = {"messages": USER, "max_tokens": 5}
    response = Client(server(FakeBackend()), host="evil.example").post("/v1/messages", body)
    assert response.json()["error"]["type"] == "permission_error"
