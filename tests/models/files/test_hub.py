"""Downloads from a hub: a fake one on loopback, which cuts a file in the middle, and none at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from outrider.cli.main import main
from outrider.models.files.hub import DownloadFailed, download

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
OLD_COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 400}


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.cuts: list[str] = []  # files whose next download ends in the middle
        self.asked: list[tuple[str, str | None]] = []  # (path, Range) of each GET of a file

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which holds each answer back for 40 ms
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for revision, commit in (("main", COMMIT), ("v1", OLD_COMMIT)):
            if path == f"/api/models/owner/name/revision/{revision}":
                return self._json({"_id": "1", "id": "owner/name", "sha": commit, "siblings": []})
        if path.startswith("/api/models/owner/name/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040d}"}
                for name, data in FILES.items()
            ]
            return self._json(listed)
        if path.startswith("/api/models/owner/name/revision/"):
            return self._json({"error": "Invalid rev"}, 404, "RevisionNotFound")
        if path.startswith("/api/"):
            return self._json({"error": "Repository not found"}, 404, "RepoNotFound")
        return self._file(with_body=True)

    def _json(self, value: Any, status: int = 200, code: str | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(body)

    def _file(self, with_body: bool) -> None:
        *_, commit, name = self.path.split("/")
        data, asked = FILES[name], self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if with_body:
            self.server.asked.append((self.path, asked))
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{len(data):040d}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        if name in self.server.cuts:
            self.server.cuts.remove(name)
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[start:])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        _point_at(server.url, tmp_path, monkeypatch)
        yield server
        server.shutdown()


def _point_at(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what is stored at once
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_pull_goes_on_where_it_was_cut_off_and_fetches_nothing_twice(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cuts.append("model.safetensors")
    assert main(["pull", "owner/name"]) == 0
    printed = capsys.readouterr().out
    assert f"commit {COMMIT}" in printed
    folder = Path(printed.split(" is in ")[1].split(" (commit")[0])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    half = len(FILES["model.safetensors"]) // 2
    ranges = [asked for path, asked in hub.asked if path.endswith(".safetensors")]
    assert (ranges[0], ranges[1:]) == (None, [f"bytes={half}-"])
    num_asked = len(hub.asked)
    assert main(["pull", "owner/name"]) == 0
    assert len(hub.asked) == num_asked


def test_revision_pins_a_commit(hub: Hub) -> None:
    assert download("owner/name", "v1").name == OLD_COMMIT
    assert download("owner/name", OLD_COMMIT).name == OLD_COMMIT
    assert download("owner/name").name == COMMIT


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("owner/other", None, "has no such model, or it is private"),
        ("owner/name", "v9", "at revision v9: the model has no such commit, tag or branch"),
    ],
)
def test_what_the_hub_does_not_have_is_told(hub: Hub, name: str, revision: str | None, words: str) -> None:
    with pytest.raises(DownloadFailed, match=words):
        download(name, revision)


def test_no_hub_is_one_plain_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Hub() as closed:
        url = closed.url
    _point_at(url, tmp_path, monkeypatch)
    assert main(["pull", "owner/name"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no hub can be reached at {url}" in line
    assert "set HF_ENDPOINT to a mirror, or give the path of a model folder" in line
