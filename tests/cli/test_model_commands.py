"""`outrider list`, `show`, `rm`: the models on this machine; `ps` and `stop`: those of a running server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

from outrider.cli.main import main
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, serving
from tiny_models import write_checkpoint


@pytest.fixture
def no_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_list_and_rm_are_those_of_models(no_caches: None, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["list", "--json"], ["ls", "--json"], ["models", "--json"]):
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out) == []
    assert main(["rm", "../x", "--yes"]) == 2
    assert "is not in the cache" in capsys.readouterr().err


def test_show_reads_a_models_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "generation_config.json").write_text('{"temperature": 0.5}')
    assert main(["show", str(tmp_path / "tiny"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["sampling"], facts["head"]) == ("llama", {"temperature": 0.5}, None)
    assert 0 < facts["loaded_bytes"] <= facts["file_bytes"]  # float32 stays float32
    assert main(["show", str(tmp_path / "tiny")]) == 0
    assert "temperature 0.5" in capsys.readouterr().out


def test_show_of_what_is_not_here(
    no_caches: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "owner/name"]) == 2
    assert "is not in the cache" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["show", str(tmp_path / "folder")]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_ps_and_stop_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ps"], ["stop", "x"]):
        assert main([*command, "--url", "http://127.0.0.1:1"]) == 2
        assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


# -- with a real server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        write_checkpoint(folder / name, "llama")
    keys = {"OUTRIDER_API_KEY": "user", "OUTRIDER_OPERATOR_KEY": "boss"}
    flags = ("--models-dir", str(folder), "--draft-depth", "0", "--log-level", "warning")
    with serving(folder / "one", *flags, **keys) as server:
        yield server


def ask(live: ServerProcess, model: str, key: str = "user") -> httpx.Response:
    body = {"model": model, "prompt": "Hi", "max_tokens": 4}
    return httpx.post(
        f"{live.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE_S,
    )


def test_ps_and_stop(live: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert "one: loaded on first use" in live.banner
    assert ask(live, "two").json()["model"] == "two"
    at = ("--url", live.url, "--api-key", "boss")
    assert main(["ps", *at]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["NAME", "STATE"], ["one", "not"], ["two", "loaded"]]
    assert main(["stop", "two", *at]) == 0
    assert "two is not loaded now" in capsys.readouterr().out
    assert main(["ps", "--json", *at]) == 0
    assert [model["state"] for model in json.loads(capsys.readouterr().out)] == ["not_loaded"] * 2
    assert main(["stop", "../two", *at]) == 2
    assert "does not exist on this server" in capsys.readouterr().err


def test_only_an_operator_loads_and_unloads(live: ServerProcess) -> None:
    for verb in ("load", "unload"):
        for url in (f"/v1/models/one/{verb}", f"/v1/models/%6fne/{verb}"):
            answers = [
                httpx.post(live.url + url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)
                for key in ("wrong", "user", "boss")
            ]
            assert [answer.status_code for answer in answers] == [401, 403, 200]


def test_worker_that_dies_comes_back_with_the_same_models(live: ServerProcess) -> None:
    assert ask(live, "one").status_code == 200
    children = Path(f"/proc/{live.process.pid}/task/{live.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)

    def answers() -> bool:
        try:
            return ask(live, "two").status_code == 200 and ask(live, "one").status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers)
    status = httpx.get(
        f"{live.url}/v1/status", headers={"Authorization": "Bearer boss"}, timeout=PATIENCE_S
    ).json()
    assert [model["name"] for model in status["models"]] == ["one", "two"]
