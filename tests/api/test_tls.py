"""A real server process with TLS, JSON logs and a queue in which nobody waits for long."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.chat_client import ChatClient
from outrider.cli.connection_setup import tls_context
from outrider.config import InvalidConfig
from outrider.server_address import ServerAddress
from patience import PATIENCE_S
from server_process import ServerProcess, serving

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tiny_folder: Path, certificate: tuple[str, str]) -> Iterator[ServerProcess]:
    cert, key = certificate
    flags = ("--tls-cert", cert, "--tls-key", key, "--log-format", "json", "--api-key", "secret")
    limits = ("--max-rows", "1", "--max-queue", "5", "--queue-timeout", "5")
    with serving(tiny_folder, *flags, *limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess, certificate: tuple[str, str]) -> Iterator[httpx.Client]:
    trust, headers = ssl.create_default_context(cafile=certificate[0]), {"x-api-key": "secret"}
    with httpx.Client(base_url=server.url, verify=trust, headers=headers, timeout=PATIENCE_S) as client:
        yield client


def access_entry(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The entry of a request in the access log. Every line up to it is a JSON object."""
    assert server.process.stdout is not None
    for line in server.process.stdout:
        entry = json.loads(line)
        if entry["request_id"] == request_id and entry["logger"] == "outrider.access":
            return dict(entry)
    raise AssertionError("the log ended")


def test_server_speaks_https_and_logs_json(server: ServerProcess, client: httpx.Client) -> None:
    assert server.url.startswith("https://")
    path = f"/v1/models/{server.model}"
    response = client.get(path)
    assert response.json()["id"] == server.model
    entry = access_entry(server, response.headers["x-request-id"])
    assert entry.pop("duration_s") >= 0
    assert entry.pop("time")
    assert entry.pop("message").startswith(f"GET {path} 200 ")
    assert entry == {
        "level": "info",
        "logger": "outrider.access",
        "request_id": response.headers["x-request-id"],
        "method": "GET",
        "path": path,
        "route": "/v1/models/{name:path}",
        "status": 200,
        "key": "api-key",
        "reason": None,
    }


def test_refusal_has_its_reason_in_the_log(server: ServerProcess, client: httpx.Client) -> None:
    response = client.get("/v1/models/a%0Ab", headers={"x-api-key": "wrong"})
    assert response.status_code == 401
    entry = access_entry(server, response.headers["x-request-id"])
    assert (entry["status"], entry["reason"], entry["path"]) == (401, "api_key", "/v1/models/a\nb")
    assert 'outrider_refusals_total{reason="api_key"} 1.0' in client.get("/metrics").text


def test_client_of_a_private_authority(
    server: ServerProcess, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `outrider chat` and `outrider bench` connect."""
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])

    async def first_model() -> str:
        return await ChatClient(ServerAddress.parse(server.url, "secret"), "test", PATIENCE_S).first_model()

    assert asyncio.run(first_model()) == server.model


def test_request_that_waits_too_long_for_a_row_is_a_503(server: ServerProcess, client: httpx.Client) -> None:
    endless = {"messages": USER, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with client.stream("POST", CHAT, json=endless) as running:
        chunks = running.iter_lines()
        assert next(line for line in chunks if '"content":"' in line)
        response = client.post(CHAT, json={"messages": USER})
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "--queue-timeout" in response.json()["error"]["message"]
        assert next(line for line in chunks if '"content":"' in line)  # the request with a row goes on
    assert 'outrider_refusals_total{reason="queue_timeout"} 1.0' in client.get("/metrics").text


def test_bad_certificates_are_errors_with_the_file(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    assert tls_context(None, None) is None
    with pytest.raises(InvalidConfig, match="--tls-key needs --tls-cert"):
        tls_context(None, key)
    with pytest.raises(InvalidConfig, match=r"missing\.pem cannot be read: No such file"):
        tls_context(str(tmp_path / "missing.pem"), key)
    with pytest.raises(InvalidConfig, match="not a certificate chain"):
        tls_context(key, cert)
    encrypted = str(tmp_path / "encrypted.pem")
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", encrypted]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InvalidConfig, match="is encrypted"):
        tls_context(cert, encrypted)
