"""`outrider serve` as an operator meets it: options from three sources, clear refusals, a graceful end."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import faulty_engine
from outrider.cli.engine_options import check_drafter, engine_config, sampling_defaults, tool_format
from outrider.cli.foreign_flags import notes
from outrider.cli.model_specs import model_name
from outrider.cli.option_sources import resolve
from outrider.cli.serve_options import GROUPS, OPTIONS, add_options
from outrider.config import EngineConfig, InvalidConfig
from outrider.engine.validation import ModelFacts
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, serving, write_tiny_model

AUTO = EngineConfig().auto_depth


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(flags)


def options(*flags: str, **environ: str) -> dict[str, Any]:
    return resolve(parsed(*flags), environ)


# -- options ---------------------------------------------------------------------------------------------


def test_served_names_are_words_or_separated_by_commas() -> None:
    assert options("m", "--served-model-name", "a", "b")["served_model_name"] == ("a", "b")
    assert options("m", "--served-model-name", "a,b", "--served-model-name", "c")["served_model_name"] == (
        "a",
        "b",
        "c",
    )
    found = options("--served-model-name", "a", "b", "--port", "1", "m")
    assert (found["served_model_name"], found["model"]) == (("a", "b"), "m")
    assert options("--served-model-name", "x/y")["served_model_name"] == ("x/y",)


@pytest.mark.parametrize("model", ["owner/name", "model.gguf", "."])
def test_a_model_after_the_served_names_is_not_taken_for_a_name(model: str) -> None:
    with pytest.raises(InvalidConfig, match="Give the MODEL before this flag"):
        options("--served-model-name", "a", model)


def test_defaults() -> None:
    found = options()
    assert found["host"] == "127.0.0.1"
    assert (found["port"], found["max_rows"], found["mtp"], found["draft_depth"]) == (
        8000,
        None,
        "auto",
        None,
    )
    assert found["api_key"] is None
    assert found["served_model_name"] == ()
    assert set(found) == {*OPTIONS, "models", "model_tables"}


def test_flag_goes_before_variable_and_variable_before_file(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(
        'max-rows = 3\nport = 3\nhost = "::1"\nserved_model_name = ["a", "b"]\nmemory-budget = "1GiB"'
    )
    found = options("--config", str(file), "--max-rows", "1", OUTRIDER_MAX_ROWS="2", OUTRIDER_PORT="2")
    assert (found["max_rows"], found["port"], found["host"]) == (1, 2, "::1")
    assert found["served_model_name"] == ("a", "b")
    assert found["memory_budget"] == 1 << 30
    assert options(OUTRIDER_CONFIG=str(file))["max_rows"] == 3


@pytest.mark.parametrize(
    "option", [option for group in GROUPS.values() for option in group], ids=lambda o: o.name
)
def test_every_option_has_all_three_sources(option: Any, tmp_path: Path) -> None:
    texts = {
        "mtp": "off",
        "drafter": "ngram",
        "dtype": "bfloat16",
        "log-level": "debug",
        "log-format": "json",
        "memory-budget": "5MB",
        "draft-depth": "3",
        "kv-bits": "4",
        "cache-layout": "slots",
        "rank-head": "whole",
        "generation-config": "none",
    }
    text = texts.get(option.name, "true" if option.is_switch else "7")
    flags = [option.flag] if option.is_switch else [option.flag, text]
    file = tmp_path / "o.toml"
    file.write_text(f"{option.name} = {'true' if option.is_switch else json.dumps(text)}")
    values = [
        options(*flags)[option.key],
        options(**{option.variable: text})[option.key],
        options("--config", str(file))[option.key],
    ]
    assert values[0] == values[1] == values[2]
    assert values[0] != options()[option.key]


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("512MiB", 512 << 20), ("1.5g", 1_500_000_000), ("4096", 4096), ("2 kb", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert options("--memory-budget", text)["memory_budget"] == size


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--port", "x"], {}, "--port: 'x' is not a whole number"),
        (["--default-top-p", "nan"], {}, "--default-top-p: 'nan' is not a number"),
        (["--kv-bits", "3"], {}, "--kv-bits: '3' is not one of 4, 8, 16, 32"),
        (["--generation-config", "vllm"], {}, "--generation-config: 'vllm' is not one of auto, none"),
        ([], {"OUTRIDER_PORT": "x"}, "OUTRIDER_PORT: 'x'"),
        (["--memory-budget", "lots"], {}, "--memory-budget: 'lots' is not a size"),
        (["--draft-depth", "9"], {}, "0..8"),
        (["--mtp", "maybe"], {}, "auto, wanted, on, off"),
        (["--drafter", "x"], {}, "auto, mtp, ngram, none"),
        ([], {"OUTRIDER_ALLOW_PUBLIC_WITHOUT_KEY": "perhaps"}, "neither true nor false"),
        (["--config", "nowhere.toml"], {}, "nowhere.toml cannot be read"),
        (["--max-num-seqs", "3", "--max-rows", "4"], {}, "contradict"),
        (["--enable-mtp", "--mtp", "off"], {}, "contradict"),
        (["--cache-memory-mb", "2GB"], {}, "--cache-memory-mb: '2GB' is not a whole number"),
        (["--chunked-prefill-tokens", "x"], {}, "--chunked-prefill-tokens: 'x' is not a whole number"),
        (["--cache-memory-mb", "2", "--prefix-cache-bytes", "3MiB"], {}, "contradict"),
    ],
)
def test_bad_value_names_its_source(flags: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        options(*flags, **environ)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("max-rowz = 1", "'max_rowz' is not an option"), ("max-rows = [", "not TOML"), ("port = true", "port")],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "o.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        options("--config", str(file))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_flags_of_other_servers_set_the_option_of_the_same_meaning() -> None:
    found = options("--max-num-seqs", "4", "--max-model-len", "99", "--enable-mtp")
    assert (found["max_rows"], found["max_context"], found["mtp"]) == (4, 99, "wanted")
    assert options("--mtp-num-draft-tokens", "3")["draft_depth"] == 3
    assert options("--max-num-seqs", "4", "--max-rows", "4")["max_rows"] == 4
    assert options("--max-num-seqs", "4", OUTRIDER_MAX_ROWS="2")["max_rows"] == 4


def test_cache_memory_mb_limits_cached_prefixes_only() -> None:
    """As in vllm-mlx: MiB for the prefix cache; the caches of running requests keep their own limit."""
    found = options("--cache-memory-mb", "2")
    assert (found["prefix_cache_bytes"], found["memory_budget"]) == (2 << 20, None)
    assert engine_config(options("--cache-memory-mb", "0")).prefix_cache_bytes == 0  # no cache


def test_chunked_prefill_tokens_is_the_chunk_size_and_0_is_refused() -> None:
    assert options("--chunked-prefill-tokens", "256")["prefill_step_size"] == 256
    with pytest.raises(InvalidConfig) as caught:
        options("--chunked-prefill-tokens", "0")
    assert str(caught.value).startswith("--chunked-prefill-tokens: 0 means no chunked prefill")
    assert "--prefill-step-size N" in str(caught.value)


@pytest.mark.parametrize("flag", ["--disable-prefix-cache", "--no-enable-prefix-caching"])
def test_prefix_cache_is_turned_off_by_the_flags_of_other_servers(flag: str) -> None:
    assert engine_config(options()).prefix_cache_bytes is None
    assert engine_config(options(flag)).prefix_cache_bytes == 0
    assert engine_config(options(flag, "--no-prefix-cache")).prefix_cache_bytes == 0
    assert engine_config(options("--enable-prefix-cache", flag)).prefix_cache_bytes == 0  # as in vllm-mlx


def test_paged_cache_is_refused_with_the_flags_to_use_instead() -> None:
    with pytest.raises(InvalidConfig) as caught:
        options("--use-paged-cache")
    for words in (
        "--use-paged-cache: the layout of the KV cache follows",
        "--memory-budget",
        "--prefix-cache-bytes",
    ):
        assert words in str(caught.value)


def test_flags_that_are_not_needed_are_answered_with_a_line() -> None:
    said = notes(parsed("--continuous-batching", "--mllm", "--enable-auto-tool-choice"))
    assert [line.partition(":")[0] for line in said] == [
        "--continuous-batching",
        "--mllm",
        "--enable-auto-tool-choice",
    ]
    assert notes(parsed()) == []


@pytest.mark.parametrize(
    ("name", "format"), [("hermes", "hermes"), ("kimi_k2", "kimi"), ("laguna", "glm"), ("xlam", "xlam")]
)
def test_a_tool_call_parser_is_found_by_its_name_here_or_elsewhere(name: str, format: str) -> None:
    found = tool_format(options("--tool-call-parser", name))
    assert found is not None
    assert found.name == format
    assert tool_format(options()) is None


@pytest.mark.parametrize(
    ("name", "words"), [("nonsense", "is unknown: leave it out"), ("beam", "response_template")]
)
def test_an_unknown_tool_call_parser_is_refused(name: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        tool_format(options("--tool-call-parser", name))


@pytest.mark.parametrize(
    ("flags", "drafter", "depth"),
    [
        ([], "auto", AUTO),
        (["--mtp", "on"], "auto", AUTO),  # insisted on once the model is there
        (["--enable-mtp"], "auto", AUTO),
        (["--mtp", "off"], "none", AUTO),
        (["--mtp", "off", "--drafter", "ngram"], "ngram", AUTO),
        (["--drafter", "ngram", "--draft-depth", "5"], "ngram", 5),
        (["--draft-depth", "0"], "auto", 0),
        (["--draft-model", "m", "--mtp", "off"], "auto", AUTO),  # no head, but the draft model
    ],
)
def test_engine_config(flags: list[str], drafter: str, depth: int) -> None:
    config = engine_config(options(*flags))
    assert (config.drafter, config.auto_depth) == (drafter, depth)


def test_a_head_that_is_wanted_and_missing_is_a_warning_and_one_that_is_demanded_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = SimpleNamespace(facts=ModelFacts("tiny", 9, 9, frozenset(), "none"))
    drafting = SimpleNamespace(facts=ModelFacts("tiny", 9, 9, frozenset(), "mtp"))
    vllm_mlx = ("--enable-mtp", "--mllm", "--continuous-batching", "--mtp-num-draft-tokens", "1")
    check_drafter(options(*vllm_mlx), drafting)  # type: ignore[arg-type]
    check_drafter(options(), plain)  # type: ignore[arg-type]
    assert not caplog.records
    check_drafter(options(*vllm_mlx), plain)  # type: ignore[arg-type]
    (said,) = [record.getMessage() for record in caplog.records]
    for words in ("tiny has none", "outrider mtp extract", "outrider mtp train", "without drafts"):
        assert words in said
    for flags in (("--mtp", "on"), ("--draft-depth", "2")):
        with pytest.raises(InvalidConfig, match="has none"):
            check_drafter(options(*flags), plain)  # type: ignore[arg-type]


def test_a_limit_for_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="needs --prefix-cache-dir"):
        engine_config(options("--prefix-cache-disk-bytes", "1GiB"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--mtp", "on", "--drafter", "ngram"],
        ["--enable-mtp", "--drafter", "ngram"],
        ["--mtp", "off", "--drafter", "mtp"],
        ["--mtp", "off", "--head", "f"],
        ["--draft-model", "m", "--drafter", "ngram"],
        ["--draft-model", "m", "--enable-mtp"],
    ],
)
def test_contradictions_are_refused(flags: list[str]) -> None:
    with pytest.raises(InvalidConfig, match="contradict"):
        engine_config(options(*flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--default-temperature", "-1"], "--default-temperature: temperature must be a number from 0"),
        (["--default-top-p", "0"], "--default-top-p: top_p must be above 0"),
        (["--default-top-k", "-2"], "--default-top-k: top_k must be 0"),
        (["--default-min-p", "2"], "--default-min-p: min_p must be from 0 to 1"),
        (["--default-repetition-penalty", "0"], "--default-repetition-penalty: repetition_penalty must be"),
    ],
)
def test_a_default_out_of_range_names_its_flag(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        sampling_defaults(options(*flags))


def test_model_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "Tiny-1B").mkdir()
    (tmp_path / "tiny.gguf").touch()
    assert model_name(tmp_path / "Tiny-1B") == "Tiny-1B"
    assert model_name(f"{tmp_path}/Tiny-1B/") == "Tiny-1B"
    assert model_name(tmp_path / "tiny.gguf") == "tiny"
    assert model_name("owner/name") == "owner/name"


# -- the process -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "headless", with_head=False)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    return folder


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def refusal(*args: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "outrider", "serve", *args], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_mtp_on_without_a_head_says_what_to_do(headless: Path) -> None:
    message = refusal(str(headless), "--port", "0", "--mtp", "on")
    assert "--mtp on needs an MTP head" in message
    assert "--head FILE" in message


def test_what_cannot_work_is_said_before_anything_is_loaded(headless: Path, taken_port: int) -> None:
    assert "cannot listen on 127.0.0.1" in refusal(str(headless), "--port", str(taken_port))
    assert "no API key is set" in refusal(str(headless), "--host", "0.0.0.0")


def test_a_bad_generation_config_is_said_at_start(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "bad", with_head=False)
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    message = refusal(str(folder), "--port", "0", "--no-supervisor")
    assert f"{folder / 'generation_config.json'}: temperature must be a number from 0 to 100" in message
    assert "--generation-config none" in message


def test_help_lists_every_option() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "outrider", "serve", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0
    missing = [
        option.flag for group in GROUPS.values() for option in group if option.flag not in result.stdout
    ]
    assert not missing
    assert all(f"\n{title}:" in result.stdout for title in GROUPS)


def test_banner_key_and_graceful_end(headless: Path, tmp_path: Path) -> None:
    """One server: what it says at the start, whom it lets in, and that a stream under way is finished."""
    hold_file = tmp_path / "hold"
    flags = (
        "--drafter",
        "ngram",
        "--draft-depth",
        "3",
        "--served-model-name",
        "one,two",
        "--default-top-k",
        "30",
        "--continuous-batching",
        "--no-page",
        "--drain",
        "240",
    )
    variables = {"OUTRIDER_API_KEY": "secret", "OUTRIDER_MAX_ROWS": "2", "HOLD_FILE": str(hold_file)}
    with serving(headless, *flags, program=faulty_engine.PROGRAM, **variables) as server:
        assert "float32 on cpu" in server.banner
        assert "n-gram lookup, 3 per step" in server.banner
        assert "(as one, two)" in server.banner
        assert "with an API key" in server.banner
        assert "sampling temperature 0.6, top_k 30, unless a request sets them" in server.banner
        assert "2 at once" in server.banner
        assert "--continuous-batching: not needed" in server.banner
        assert "/docs" not in server.banner
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            assert client.get("/docs", headers={"x-api-key": "secret"}).status_code == 404
            assert client.get("/v1/models").status_code == 401
            assert client.get("/health").status_code == 200
        _finishes_its_stream_and_refuses_others_after(signal.SIGTERM, server, hold_file)
        assert server.process.wait(PATIENCE_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def _finishes_its_stream_and_refuses_others_after(
    number: signal.Signals, server: ServerProcess, hold_file: Path
) -> None:
    body = {"prompt": "a", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": True}
    headers, lines = {"x-api-key": "secret"}, []

    def read() -> None:
        held = body | {"seed": faulty_engine.HOLD_SEED}
        lines.extend(server.post("/v1/completions", held, headers=headers).text.split("\n\n"))

    def status() -> Any:
        return httpx.get(f"{server.url}/v1/status", headers=headers, timeout=PATIENCE_S).json()

    hold_file.touch()
    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: status()["live_requests"])
    server.process.send_signal(number)
    wait_until(lambda: status()["status"] == "shutting down")
    refused = server.post("/v1/completions", body, headers=headers)
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert refused.headers["retry-after"]
    hold_file.unlink()
    reader.join(PATIENCE_S)
    assert lines[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(lines[-4:])


def _is_small(supervisor: int) -> None:
    status = Path(f"/proc/{supervisor}/status").read_text()
    resident_kb = int(status.partition("VmRSS:")[2].split()[0])
    assert resident_kb < 40_000
    assert "libmlx" not in Path(f"/proc/{supervisor}/maps").read_text()


def test_answers_that_take_too_long_end_with_an_error(headless: Path) -> None:
    with serving(headless, "--drain", "0.3") as server:
        if sys.platform == "linux":
            _is_small(server.process.pid)
        lines: list[str] = []

        body = {"prompt": "a", "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if not lines:
                    server.process.send_signal(signal.SIGINT)
                lines.append(line)
        assert server.process.wait(PATIENCE_S) == 0
    assert any("shutting down" in line for line in lines)
    assert "data: [DONE]" in lines[-3:]
