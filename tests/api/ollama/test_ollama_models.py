"""Ollama's routes about models: what is served, loaded and known; pull, delete; and what / answers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import USER, Client, FakeBackend, server
from shared_server import shared_server

from outrider.api.model_card import ModelCard, model_card
from outrider.request import SamplingDefaults

CARD = ModelCard(1234, "abc", 1_700_000_000.5, "{{ messages }}", thinks=True)
DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "135M",
    "quantization_level": "4-bit",
    "context_length": 256,
    "embedding_length": 64,
}


def client(facts: dict[str, Any] | None = None, **changes: Any) -> Client:
    known = {"family": "llama", "num_parameters": 134_515_008, "hidden_size": 64, "weight_bits": (4,)}
    return shared_server(facts=known | (facts or {}), card=CARD, **changes)[0]


def test_tags_list_every_served_name_with_a_tag() -> None:
    """Open WebUI looks for NAME:latest if a name has no tag."""
    found = (
        client(served_model_names=("tiny", "org/other", "third:8b", "tiny:latest")).get("/api/tags").json()
    )
    assert [model["name"] for model in found["models"]] == ["tiny:latest", "org/other:latest", "third:8b"]
    assert found["models"][0] == {
        "name": "tiny:latest",
        "model": "tiny:latest",
        "modified_at": "2023-11-14T22:13:20.500000Z",
        "size": 1234,
        "digest": "abc",
        "details": DETAILS,
        "capabilities": ["completion", "tools", "thinking"],
    }


@pytest.mark.parametrize(
    "name", ["tiny", "tiny:latest", "org/other", "org/other:latest", "third:8b", "x:latest", "x"]
)
def test_every_listed_name_is_served_with_and_without_latest(name: str) -> None:
    names = ("tiny", "org/other", "third:8b", "x:latest")
    body = {"model": name, "messages": USER, "stream": False}
    for path in ("/api/chat", "/v1/chat/completions"):  # clients use the names in /api/tags on both
        assert client(served_model_names=names).post(path, body).json()["model"] == name


@pytest.mark.parametrize(
    "name", ["other", "tiny:8b", "third", "tiny:latest:latest", "a\x00b", "x" * 1000, "../tiny", "Ä"]
)
@pytest.mark.parametrize("route", ["/api/chat", "/api/generate", "/api/show", "/api/embed", "/api/pull"])
def test_other_names_are_a_404(route: str, name: str) -> None:
    response = client(served_model_names=("tiny", "third:8b")).post(
        route, {"model": name, "messages": USER, "prompt": "a"}
    )
    assert response.status_code == 404
    error = response.json()["error"]
    assert error.startswith(f"model '{name[:200]}' not found: this server has 'tiny:latest', 'third:8b'")


@pytest.mark.parametrize("route", ["/api/chat", "/api/show", "/api/pull"])
@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": ""}])
def test_a_model_is_required(route: str, body: dict[str, Any]) -> None:
    response = client().post(route, body | {"messages": USER})
    assert response.status_code in (400, 404)
    assert "model" in response.json()["error"]


def test_ps_shows_the_loaded_model() -> None:
    (loaded,) = client().get("/api/ps").json()["models"]
    expires = datetime.fromisoformat(loaded.pop("expires_at"))
    assert expires.year > 2200
    assert loaded == {
        "name": "tiny:latest",
        "model": "tiny:latest",
        "size": 1234,
        "size_vram": 1234,
        "digest": "abc",
        "details": DETAILS,
        "context_length": 256,
    }
    assert client({"device": "cpu"}).get("/api/ps").json()["models"][0]["size_vram"] == 0


def test_show() -> None:
    sampling = SamplingDefaults(temperature=0.5, repetition_penalty=1.1)
    for body in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": True}):
        shown = client(sampling=sampling).post("/api/show", body).json()
        assert "temperature                    0.5\n" in shown["parameters"]
        assert shown.pop("parameters").endswith("repeat_penalty                 1.1")
        assert shown == {
            "modelfile": "FROM tiny\n",
            "template": "{{ messages }}",
            "details": DETAILS,
            "model_info": {
                "general.architecture": "llama",
                "general.basename": "tiny",
                "general.parameter_count": 134_515_008,
                "llama.context_length": 256,
                "llama.embedding_length": 64,
                "llama.vocab_size": 113,
            },
            "capabilities": ["completion", "tools", "thinking"],
            "modified_at": "2023-11-14T22:13:20.500000Z",
        }


@pytest.mark.parametrize(
    ("facts", "field", "value"),
    [
        ({"num_parameters": 8_030_000_000}, "parameter_size", "8.03B"),
        ({"num_parameters": 0}, "parameter_size", ""),
        ({"num_parameters": 5_000}, "parameter_size", "5K"),
        ({"weight_bits": ()}, "quantization_level", "F32"),
        ({"weight_bits": (), "dtype": "bfloat16"}, "quantization_level", "BF16"),
        ({"weight_bits": (4, 8)}, "quantization_level", "4-bit/8-bit"),
        ({"family": ""}, "families", []),
    ],
)
def test_details(facts: dict[str, Any], field: str, value: Any) -> None:
    assert client(facts).get("/api/tags").json()["models"][0]["details"][field] == value


def test_a_model_that_sees_says_so() -> None:
    capabilities = client({"reads_images": True}).post("/api/show", {"model": "tiny"}).json()["capabilities"]
    assert capabilities == ["completion", "tools", "thinking", "vision"]


def test_pull_of_a_served_model_succeeds_at_once() -> None:
    """Clients pull a model before they use it."""
    response = client().post("/api/pull", {"model": "tiny"})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text == '{"status": "success"}\n'
    assert client().post("/api/pull", {"name": "tiny", "stream": False}).json() == {"status": "success"}
    error = client().post("/api/pull", {"model": "llama3.2"}).json()["error"]
    assert "This server downloads no models: run `outrider models pull NAME`" in error


def test_delete_is_refused() -> None:
    for body in ({"model": "tiny"}, {"name": "tiny:latest"}):
        response = client().request("DELETE", "/api/delete", json=body)
        assert response.status_code == 403
        assert "this server deletes no models" in response.json()["error"]
    assert client().request("DELETE", "/api/delete", json={"model": "none"}).status_code == 404


def test_version_is_one_of_ollamas() -> None:
    """Clients ask for a least version, such as 0.6.4."""
    found = client().get("/api/version").json()
    assert tuple(map(int, found["version"].split("."))) >= (0, 12, 11)
    assert found["outrider"]
    for path in ("/api/version", "/api/tags"):
        assert client().request("HEAD", path).status_code == 200


def test_a_405_names_all_methods_of_the_path() -> None:
    response = client().post("/api/tags", {})
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD"
    assert list(response.json()) == ["error"]


# -- the card --------------------------------------------------------------------------------------------


def test_a_card_follows_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mtp").mkdir()
    (tmp_path / "mtp" / "weights.safetensors").write_bytes(b"x" * 10)
    card = model_card(tmp_path, "t", thinks=True)
    assert (card.num_bytes, card.template, card.thinks) == (12, "t", True)
    assert card.modified_s == max(file.stat().st_mtime for file in tmp_path.rglob("*.*") if file.is_file())
    assert model_card(tmp_path, "t", thinks=True).digest == card.digest
    (tmp_path / "config.json").write_text("[]")
    other = model_card(tmp_path, "t", thinks=True)
    assert (other.num_bytes, len(other.digest)) == (12, 64)
    assert other.digest != card.digest


# -- / ---------------------------------------------------------------------------------------------------

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("serves_page", [True, False])
@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/plain", ""])
def test_clients_of_ollama_find_their_line_at_the_root(accept: str, serves_page: bool) -> None:
    for method in ("GET", "HEAD"):
        response = client(serves_page=serves_page).request(method, "/", headers={"accept": accept})
        assert response.status_code == 200
        assert response.text == ("Ollama is running" if method == "GET" else "")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        assert response.headers["vary"] == "accept"


def test_browsers_find_the_page_at_the_root() -> None:
    response = client().get("/", headers={"accept": BROWSER})
    assert response.text.startswith("<!doctype html>")
    assert response.headers["vary"] == "accept"
    assert client(serves_page=False).get("/", headers={"accept": BROWSER}).text == "Ollama is running"
    assert client(api_key="k").get("/").status_code == 200


# -- errors of the layers before the routes have Ollama's form too ---------------------------------------


def assert_ollamas(response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert words in response.json()["error"]


def test_errors_have_ollamas_form() -> None:
    body = {"model": "tiny", "messages": USER, "stream": False}
    keyed = client(api_key="secret")
    assert_ollamas(keyed.post("/api/chat", body), 401, "API key")
    assert_ollamas(keyed.get("/api/tags"), 401, "API key")
    bearer = {"authorization": "Bearer secret"}  # as Ollama's clients send it
    assert keyed.post("/api/chat", body, headers=bearer).status_code == 200
    assert_ollamas(client().post("/api/chat", body, headers={"host": "evil.example"}), 403, "Host header")
    assert_ollamas(client().get("/api/none"), 404, "Not Found")
    assert_ollamas(client(max_body_bytes=10).post("/api/chat", body), 413, "larger than 10 bytes")
    full = server(FakeBackend(), max_rows=1, max_queue=0)
    full.context.live.admission.open()
    busy = Client(full).post("/api/chat", body)
    assert_ollamas(busy, 429, "the server is busy")
    assert busy.headers["retry-after"]
    full.context.live.drain()
    assert_ollamas(Client(full).post("/api/chat", body), 503, "shutting down")
    anthropic = {"anthropic-version": "2023-06-01"}
    assert_ollamas(
        client().post("/api/chat", body | {"model": "x"}, headers=anthropic), 404, "model 'x' not found"
    )


def test_curl_need_not_name_the_content_type() -> None:
    """Ollama's documentation calls `curl -d` without it. A web page may not leave it out."""
    data = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": false}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (form, {}, {"content-type": "text/plain"}):
        response = client().request("POST", "/api/chat", content=data, headers=headers)
        assert response.json()["message"]["content"] == "Hello wörld"
    deleted = client().request("DELETE", "/api/delete", content=b'{"model": "tiny"}', headers=form)
    assert deleted.status_code == 403
    for mark in ({"origin": "http://test"}, {"sec-fetch-site": "same-origin"}, {"referer": "http://test/x"}):
        response = client().request("POST", "/api/chat", content=data, headers=form | mark)
        assert_ollamas(response, 415, "Content-Type must be application/json")
    foreign = client().request(
        "POST", "/api/chat", content=data, headers=form | {"origin": "http://evil.example"}
    )
    assert foreign.status_code == 403


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b"NaN", b'{"model": "\\ud800"}'])
def test_bodies_that_are_no_json_object_are_refused(data: bytes) -> None:
    for path in ("/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed", "/api/embeddings"):
        response = client().request("POST", path, content=data)
        assert response.status_code == 400
        assert list(response.json()) == ["error"]
