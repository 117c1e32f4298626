"""`outrider launch`, without the tools: programs of our own stand in for them."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.launch import TOOLS
from outrider.cli.launch.command import environment_of, run_tool, split_arguments
from outrider.cli.launch.server import OtherServer, served_models, started
from outrider.cli.launch.tool import Plan, Target, Tool
from outrider.cli.main import main
from outrider.config import InvalidConfig
from outrider.server_address import ServerAddress
from patience import PATIENCE_S, wait_until
from scripted_server import Reply, ScriptedServer, scripted
from server_process import environment, write_tiny_model

TARGET = Target("http://127.0.0.1:8123", "m-1", 40_000, "secret", reads_images=True)
UNKNOWN = Target("http://127.0.0.1:8123", "m-1", None)
MODEL = {"id": "m-1", "owned_by": "outrider", "max_model_len": 40_000, "input_modalities": ["text"]}


def plan(name: str, folder: Path, target: Target = TARGET) -> Plan:
    return TOOLS[name].plan(target, folder)


# -- each tool -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("target", [TARGET, UNKNOWN])
def test_a_plan_names_the_server_and_writes_into_its_folder_only(
    name: str, target: Target, tmp_path: Path
) -> None:
    found = plan(name, tmp_path, target)
    everything = json.dumps([*found.arguments, *found.environment.values(), *found.files.values()])
    assert "127.0.0.1:8123" in everything
    assert "m-1" in everything
    assert all(file.is_relative_to(tmp_path) for file in found.files)
    assert list(tmp_path.iterdir()) == []  # a plan does nothing


@pytest.mark.parametrize("name", TOOLS)
def test_the_key_is_in_no_argument(name: str, tmp_path: Path) -> None:
    """Arguments can be read by every user of the machine."""
    found = plan(name, tmp_path)
    assert "secret" in json.dumps([*found.environment.values(), *found.files.values()])
    assert "secret" not in " ".join(found.arguments)


def test_claude_code(tmp_path: Path) -> None:
    found = plan("claude", tmp_path)
    (flag, file), variables = found.arguments, found.environment
    assert flag == "--settings"
    assert json.loads(found.files[Path(file)]) == {"env": variables}  # over the user's own settings
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8123"
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert {value for name, value in variables.items() if name.endswith("_MODEL")} == {"m-1"}
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"
    assert int(variables["API_TIMEOUT_MS"]) > 600_000
    assert "ANTHROPIC_API_KEY" not in environment_of(found, {"ANTHROPIC_API_KEY": "of the user"})
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in plan("claude", tmp_path, UNKNOWN).environment


def test_codex(tmp_path: Path) -> None:
    found = plan("codex", tmp_path)
    assert set(found.arguments[::2]) == {"-c"}
    settings = tomllib.loads("\n".join(found.arguments[1::2]))
    provider = settings["model_providers"]["outrider"]
    assert (settings["model"], settings["model_provider"]) == ("m-1", "outrider")
    assert settings["model_context_window"] == 40_000
    assert settings["model_auto_compact_token_limit"] == 32_000
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8123/v1", "responses")
    assert found.environment[provider["env_key"]] == "secret"
    unknown = tomllib.loads("\n".join(plan("codex", tmp_path, UNKNOWN).arguments[1::2]))
    assert "model_context_window" not in unknown


def test_opencode(tmp_path: Path) -> None:
    config = json.loads(plan("opencode", tmp_path).environment["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["outrider"]
    assert config["model"] == config["small_model"] == "outrider/m-1"
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8123/v1"
    assert provider["options"]["apiKey"] == "secret"
    assert provider["models"]["m-1"]["limit"] == {"context": 40_000, "output": 10_000}
    assert provider["models"]["m-1"]["attachment"]


def test_aider(tmp_path: Path) -> None:
    found = plan("aider", tmp_path)
    assert found.environment["OPENAI_API_BASE"] == "http://127.0.0.1:8123/v1"
    assert found.environment["AIDER_MODEL"] == found.environment["AIDER_WEAK_MODEL"] == "openai/m-1"
    limits = json.loads(found.files[Path(found.environment["AIDER_MODEL_METADATA_FILE"])])["openai/m-1"]
    assert (limits["max_input_tokens"], limits["max_output_tokens"]) == (40_000, 10_000)


def test_llm(tmp_path: Path) -> None:
    found = plan("llm", tmp_path)
    home = Path(found.environment["LLM_USER_PATH"])
    (model,) = json.loads(found.files[home / "extra-openai-models.yaml"])
    assert (model["model_id"], model["api_base"]) == ("m-1", "http://127.0.0.1:8123/v1")
    assert json.loads(found.files[home / "keys.json"]) == {model["api_key_name"]: "secret"}
    assert found.notes  # llm's own logs and templates are not used


# -- the command -----------------------------------------------------------------------------------------


def program(folder: Path, name: str, lines: str) -> None:
    """A program in PATH."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\nimport json, os, signal, sys, time, urllib.request\n{lines}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    return folder


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted([], models=[MODEL | {"id": "m-0"}, MODEL]) as server:
        yield server


def test_the_tool_runs_with_its_arguments_environment_and_files(
    programs: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    program(
        programs,
        "aider",
        f"limits = open(os.environ['AIDER_MODEL_METADATA_FILE']).read()\n"
        f"open({str(found)!r}, 'w').write(json.dumps([sys.argv[1:], dict(os.environ), limits]))\nsys.exit(7)",
    )
    status = main(
        ["launch", "aider", "--url", server.url, "--model", "m-1", "--", "--message", "hi", "--print"]
    )
    arguments, variables, limits = json.loads(found.read_text())
    assert status == 7
    assert arguments == ["--message", "hi", "--print"]
    assert variables["OPENAI_API_BASE"] == f"{server.url}/v1"
    assert list(json.loads(limits)) == ["openai/m-1"]
    assert not Path(variables["AIDER_MODEL_METADATA_FILE"]).exists()


def test_without_a_name_the_first_model_is_used(
    programs: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "aider", "--url", server.url, "--print"]) == 0
    assert "openai/m-0" in capsys.readouterr().out


def test_print_runs_nothing_and_shows_no_key(
    programs: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    program(programs, "claude", "raise AssertionError")
    command = [
        "launch",
        "claude",
        "--url",
        server.url,
        "--api-key",
        "secret",
        "--print",
        "--",
        "-p",
        "hi there",
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"export ANTHROPIC_BASE_URL={server.url}\n" in shown
    assert "unset ANTHROPIC_API_KEY" in shown
    assert shown.endswith("claude-settings.json -p 'hi there'\n")
    assert "secret" not in shown
    assert server.headers == []  # no answer was asked for


def test_print_says_which_server_would_be_started(
    programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.cli.launch.command.DEFAULT_URL", "http://127.0.0.1:1")
    assert main(["launch", "codex", "--model", str(tmp_path), "--print"]) == 0
    shown = capsys.readouterr().out
    assert f"outrider serve {tmp_path} --port 0\n" in shown
    assert "Codex is not installed: npm install" in shown
    assert f'model="{tmp_path.name}"' in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nano"], "'nano' is no tool that can be launched: choose claude, codex, opencode, aider, llm"),
        (["codex"], "Codex is not installed (no codex in PATH): npm install -g @openai/codex"),
        (["claude", "--url", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1"),
        (["claude", "--url", "{url}", "--model", "x"], "does not serve x; it serves m-0, m-1"),
    ],
)
def test_what_cannot_be_launched_is_explained(
    words: list[str],
    message: str,
    programs: Path,
    server: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program(programs, "claude", "raise AssertionError")
    assert main(["launch", *(word.format(url=server.url) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        (["launch", "claude", "--", "-p", "--", "x"], ["launch", "claude"], ["-p", "--", "x"]),
        (["--log-level", "info", "launch", "codex", "--"], ["--log-level", "info", "launch", "codex"], []),
        (["chat", "launch", "--", "x"], ["chat", "launch", "--", "x"], []),
    ],
)
def test_what_follows_the_dashes_belongs_to_the_tool(
    words: list[str], own: list[str], others: list[str]
) -> None:
    assert split_arguments(words) == (own, others)


# -- the server ------------------------------------------------------------------------------------------


def test_a_server_that_is_not_outrider_is_not_used() -> None:
    with scripted([]) as server, pytest.raises(OtherServer, match="not an Outrider server"):
        served_models(ServerAddress.parse(server.url))


def test_a_server_with_keys_asks_for_one() -> None:
    refusal = Reply([b"{}"], 401, "application/json")
    with scripted([], list_reply=refusal) as server, pytest.raises(InvalidConfig, match="OUTRIDER_API_KEY"):
        served_models(ServerAddress.parse(server.url))


def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    shown = io.StringIO()
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(InvalidConfig, match="ended with status 3"),
        started(command, tmp_path / "log", shown),
    ):
        raise AssertionError
    assert shown.getvalue() == "no such model\n"


def test_a_short_context_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = Tool("T", "true", "", lambda target, folder: Plan(), prompt_tokens=9_000)
    assert run_tool(tool, Target("http://x", "m", 8192), tmp_path, [sys.executable, "-c", ""]) == 0
    assert "context of 8,192 tokens, of which T's own prompt takes about 9,000" in capsys.readouterr().err
    assert run_tool(tool, Target("http://x", "m", 32_768), tmp_path, [sys.executable, "-c", ""]) == 0
    assert capsys.readouterr().err == ""


# What the tool does: asks the server for its models, says so, then waits; a Ctrl-C ends it in its own way.
WAITING_TOOL = """
home = os.environ["LLM_USER_PATH"]
url = json.load(open(home + "/extra-openai-models.yaml"))[0]["api_base"]
models = json.load(urllib.request.urlopen(url + "/models"))["data"]
signal.signal(signal.SIGINT, lambda *_: (print("interrupted", flush=True), sys.exit(5)))
print(url, models[0]["id"], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 5), (signal.SIGTERM, 143)])
def test_a_server_that_was_started_ends_with_the_tool(
    number: signal.Signals, status: int, programs: Path, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny", with_head=False)
    program(programs, "llm", WAITING_TOOL)
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "launch", "llm", "--model", str(model)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"OUTRIDER_DRAFT_DEPTH": "0"},
        start_new_session=True,  # as in a terminal: a Ctrl-C reaches the command and the tool
    )
    try:
        assert process.stdout is not None
        url, name = process.stdout.readline().split()
        assert name == "tiny"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
            assert process.stdout.readline() == "interrupted\n"
        else:
            process.send_signal(number)
        assert process.wait(PATIENCE_S) == status
        assert process.stdout.read() == ""  # the tool has ended too
        wait_until(lambda: served_models(ServerAddress.parse(url)) is None)
    finally:
        process.kill()
        process.wait()
