"""Several API keys: who may do what, what tenants share, and how a file of keys is read again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_backend import USER, Client, FakeBackend, server, settings

from outrider.api import keys
from outrider.api.keys import ApiKey, KeyLimits, KeysFile, api_keys, key_hash, new_key, parse_keys
from outrider.api.middleware import OPEN_PATHS
from outrider.api.require_key import is_operators
from outrider.config import InvalidConfig

CHAT = "/v1/chat/completions"
BODY = {"messages": USER}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    return path


def add(file: Path, name: str, **given: Any) -> str:
    """Add a key to the file and return it."""
    key, table = new_key(name, given.pop("is_operator", False), KeyLimits(**given))
    file.write_text(file.read_text() + table)
    return key


def client(made: Any, key: str = "") -> Client:
    return Client(made, **({"authorization": f"Bearer {key}"} if key else {}))


# -- the file --------------------------------------------------------------------------------------------


def test_a_new_key_is_found_by_its_hash_and_is_not_in_the_file() -> None:
    key, table = new_key("alice", limits=KeyLimits(60, 1000, 4))
    assert key not in table
    assert parse_keys(table) == {key_hash(key): ApiKey("alice", limits=KeyLimits(60, 1000, 4))}
    assert len(key) >= 43  # 256 bits in base64
    assert new_key("alice")[0] != key


GOOD = f'[a]\nsha256 = "{"0" * 64}"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no API keys"),
        ("[a", "cannot be read"),
        ("a = 1", "not a table"),
        ('["a b"]', "a name has"),
        ("[api-key]", "a name has"),
        ("[a]", "64 hexadecimal digits"),
        (GOOD.replace("0", "g"), "64 hexadecimal digits"),
        (GOOD + 'role = "root"', "role must be user or operator"),
        (GOOD + "max-rows = 0", "max-rows must be a whole number of at least 1"),
        (GOOD + "tokens-per-minute = true", "tokens-per-minute must be"),
        (GOOD + 'requests-per-minute = "9"', "requests-per-minute must be"),
        (GOOD + "max-row = 1", "unknown field 'max-row'"),
        (GOOD + GOOD.replace("[a]", "[b]"), "[b] has the same key as [a]"),
        (GOOD + GOOD, "cannot be read"),
        ("#" * (1 << 21), "larger than"),
    ],
)
def test_a_broken_file_is_refused_at_the_start(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        api_keys(settings(api_keys_file=str(file)))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        api_keys(settings(api_keys_file=str(tmp_path / "none")))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_to_is_refused(file: Path, mode: int) -> None:
    add(file, "alice")
    file.chmod(mode)
    with pytest.raises(InvalidConfig, match="other users may write to it"):
        KeysFile(file)


def test_a_file_that_others_may_read_is_used_with_a_warning(file: Path, caplog: Any) -> None:
    add(file, "alice")
    file.chmod(0o644)
    KeysFile(file)
    assert "chmod 600" in caplog.text


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(keys, "CHECK_EVERY_S", 0.0)
    return


@pytest.mark.usefixtures("at_once")
def test_keys_come_and_go_while_the_server_runs(file: Path, caplog: Any) -> None:
    first = add(file, "alice")
    made = server(FakeBackend(), api_keys_file=str(file))
    second = "sk-not-yet"
    assert [client(made, key).post(CHAT, BODY).status_code for key in (first, second)] == [200, 401]
    second = add(file, "bob")
    assert [client(made, key).post(CHAT, BODY).status_code for key in (first, second)] == [200, 200]
    other = file.with_name("other")
    other.touch(mode=0o600)
    third = add(other, "carol")
    os.replace(other, file)  # as an editor does it
    codes = [client(made, key).post(CHAT, BODY).status_code for key in (first, second, third)]
    assert codes == [401, 401, 200]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("damage", ["broken", "empty", "gone", "writable"])
def test_a_file_that_breaks_leaves_the_old_keys(file: Path, caplog: Any, damage: str) -> None:
    key = add(file, "alice")
    made = server(FakeBackend(), api_keys_file=str(file))
    if damage == "gone":
        file.unlink()
    elif damage == "writable":
        file.chmod(0o666)
    else:
        file.write_text({"broken": "[alice", "empty": ""}[damage])
    for _ in range(3):
        assert client(made, key).post(CHAT, BODY).status_code == 200
        assert client(made, "wrong").post(CHAT, BODY).status_code == 401
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1, "one line for one change"
    assert "The keys from before remain valid" in errors[0].getMessage()


def test_the_file_is_looked_at_once_a_second(file: Path) -> None:
    key, now_s = add(file, "alice"), [0.0]
    found = KeysFile(file, clock=lambda: now_s[0])
    other = add(file, "bob")

    def names() -> set[str]:
        asyncio.run(found.refresh())
        return {one.name for one in found.keys.values()}

    now_s[0] = 0.9
    assert names() == {"alice"}
    now_s[0] = 1.1
    assert names() == {"alice", "bob"}
    assert {key_hash(key), key_hash(other)} == set(found.keys)


# -- roles -----------------------------------------------------------------------------------------------


def test_only_an_operator_reads_metrics_and_deletes_caches(file: Path) -> None:
    user, operator = add(file, "alice"), add(file, "ops", is_operator=True)
    made = server(FakeBackend(), api_keys_file=str(file))
    for method, path in (("GET", "/metrics"), ("GET", "/v1/status"), ("DELETE", "/v1/cache")):
        refused = client(made, user).request(method, path)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operator_key_required"
        assert client(made).request(method, path).status_code == 401
        assert client(made, operator).request(method, path).status_code in (200, 404)
    assert client(made, operator).post(CHAT, BODY).status_code == 200


@pytest.mark.parametrize("spelled", ["{}%0A", "{}/", "{}?", "{};", "/.{}", "/health/..{}", "/health{}"])
def test_no_spelling_of_a_path_lets_a_user_in(file: Path, spelled: str) -> None:
    user = add(file, "alice")
    made = server(FakeBackend(), api_keys_file=str(file))
    for method, path in (("GET", "/metrics"), ("GET", "/v1/status"), ("DELETE", "/v1/cache")):
        refused = client(made, user).request(method, spelled.format(path))
        assert refused.status_code in (307, 403, 404)  # 307: to the path without the slash
        assert b"no_prefix_cache" not in refused.content  # the answer of the route itself
        assert client(made).request(method, spelled.format(path)).status_code == 401


def test_every_management_route_is_open_or_the_operators() -> None:
    app: Any = server(FakeBackend()).app
    described = app.openapi()["paths"].items()
    paths = {path for path, ways in described for way in ways.values() if "operations" in way["tags"]}
    assert {"/health", "/metrics", "/v1/cache"} <= paths
    assert [path for path in paths - {*OPEN_PATHS} if not is_operators(path)] == []


def test_the_one_api_key_is_an_operators_too_unless_there_is_another() -> None:
    one = server(FakeBackend(), api_key="k")
    assert client(one, "k").get("/metrics").status_code == 200
    two = server(FakeBackend(), api_key="k", operator_key="o")
    assert [client(two, key).get("/metrics").status_code for key in ("k", "o")] == [403, 200]
    assert [client(two, key).post(CHAT, BODY).status_code for key in ("k", "o", "x")] == [200, 200, 401]


def test_without_any_key_everything_is_open() -> None:
    made = server(FakeBackend())
    assert [Client(made).get(path).status_code for path in ("/metrics", "/v1/status")] == [200, 200]


def test_a_file_and_a_flag_may_both_give_keys(file: Path) -> None:
    key = add(file, "alice")
    made = server(FakeBackend(), api_keys_file=str(file), api_key="k")
    assert [client(made, sent).post(CHAT, BODY).status_code for sent in (key, "k", "x")] == [200, 200, 401]


@pytest.mark.parametrize("change", [{"operator_key": ""}, {"operator_key": "k", "api_key": "k"}])
def test_bad_operator_keys_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        settings(**change)


def test_a_public_address_may_have_a_file_of_keys() -> None:
    settings(host="0.0.0.0", api_keys_file="keys.toml")


# -- tenants ---------------------------------------------------------------------------------------------


def salt_of(key: str, **changes: Any) -> str:
    backend = FakeBackend()
    assert client(server(backend, **changes), key).post(CHAT, BODY).status_code == 200
    salt: str = backend.requests[0].params.cache_salt
    return salt


def test_the_name_of_a_key_separates_caches_and_outlives_the_key(file: Path) -> None:
    alice, bob = add(file, "alice"), add(file, "bob")
    salts = [salt_of(key, api_keys_file=str(file)) for key in (alice, bob)]
    assert salts[0] != salts[1]
    file.write_text("")
    assert salt_of(add(file, "alice"), api_keys_file=str(file)) == salts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_finds_a_response_of_another_key(file: Path, stream: bool) -> None:
    alice, bob = add(file, "alice"), add(file, "bob", is_operator=True)
    made = server(FakeBackend(), api_keys_file=str(file))
    body = {"input": "My secret", "stream": stream}
    assert client(made, alice).post("/v1/responses", body).status_code == 200
    path = "/v1/responses/resp_1"
    assert client(made, alice).get(path).status_code == 200
    follow_up = {"input": "What was it?", "previous_response_id": "resp_1"}
    assert client(made, bob).get(path).status_code == 404
    assert client(made, bob).get(f"{path}/input_items").status_code == 404
    assert client(made, bob).request("DELETE", path).status_code == 404
    assert client(made, bob).post("/v1/responses", follow_up).status_code == 400
    assert client(made, alice).post("/v1/responses", follow_up).status_code == 200
    assert client(made, alice).request("DELETE", path).status_code == 200
