"""A real server with a file of keys: made by the command, limited, revoked while the server runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.cli.main import main
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, serving

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
KEYS: dict[str, dict[str, str]] = {}  # header by name


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def keyed(tiny_folder: Path, keys_file: Path) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patched:
        for name, *flags in (
            ["alice"],
            ["bob"],
            ["frugal", "--tokens-per-minute", "1"],
            ["ops", "--operator"],
        ):
            printed: list[str] = []
            patched.setattr("builtins.print", lambda text, into=printed, **_: into.append(text))
            assert main(["keys", "new", name, "--file", str(keys_file), *flags]) == 0
            KEYS[name] = {"authorization": f"Bearer {printed[0]}"}
    flags = ("--api-keys-file", str(keys_file), "--prefix-cache-dir", str(keys_file.parent / "blocks"))
    with serving(tiny_folder, *flags) as server:
        yield server


def live_requests(keyed: ServerProcess) -> int:
    status = httpx.get(f"{keyed.url}/v1/status", headers=KEYS["ops"], timeout=PATIENCE_S).json()
    return int(status["live_requests"])


def test_the_roles_of_keys(keyed: ServerProcess) -> None:
    assert keyed.post(CHAT, BODY).status_code == 401
    assert keyed.post(CHAT, BODY, headers=KEYS["alice"]).status_code == 200
    for name, status in (("alice", 403), ("ops", 200)):
        answer = httpx.get(f"{keyed.url}/metrics", headers=KEYS[name], timeout=PATIENCE_S)
        assert answer.status_code == status


def test_keys_share_no_prefixes(keyed: ServerProcess) -> None:
    long = BODY | {"messages": [{"role": "user", "content": "all the same words again " * 40}]}

    def num_cached(name: str) -> int:
        usage = keyed.post(CHAT, long, headers=KEYS[name]).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached("alice") == 0
    assert num_cached("alice") > 0
    assert num_cached("bob") == 0


def test_who_leaves_in_mid_answer_pays_for_the_tokens(keyed: ServerProcess) -> None:
    body = BODY | {"max_tokens": 8000, "ignore_eos": True, "stream": True}
    num_chunks = 0
    with httpx.stream(
        "POST", keyed.url + CHAT, json=body, headers=KEYS["frugal"], timeout=PATIENCE_S
    ) as response:
        for line in response.iter_lines():
            num_chunks += line.startswith("data: ")
            if num_chunks == 200:
                break
    wait_until(lambda: not live_requests(keyed))
    refused = keyed.post(CHAT, BODY, headers=KEYS["frugal"])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 150 * 60  # a token a minute; the prompt has far fewer
    assert keyed.post(CHAT, BODY, headers=KEYS["bob"]).status_code == 200


def test_a_revoked_key_is_refused_while_the_server_runs(keyed: ServerProcess, keys_file: Path) -> None:
    keys_file.write_text(re.sub(r"\[bob\][^\[]*", "", keys_file.read_text()))
    wait_until(lambda: keyed.post(CHAT, BODY, headers=KEYS["bob"]).status_code == 401)
    assert keyed.post(CHAT, BODY, headers=KEYS["alice"]).status_code == 200
