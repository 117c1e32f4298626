"""The comparison with other servers: which model each gets, how it is started, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from benchmarks import peers, server_process
from benchmarks.default_gguf import default_gguf

from outrider.models.errors import ModelUnavailable
from outrider.models.files.default_download import DownloadSource, Release

# The parts of xllamacpp that the launcher uses. The names of the parameters are those of the wheel; any other
# name is an AttributeError, as with the real one. The server knows /health and stores its parameters.
FAKE_XLLAMACPP = """
import http.server, json, os, threading
__version__ = "0"

class Parameters:
    __slots__ = (
        "model path hostnames port n_parallel n_ctx cpuparams n_threads verbosity "
        "cache_prompt cache_ram_mib slot_prompt_similarity"
    ).split()

    def values(self):
        given = {name: getattr(self, name) for name in self.__slots__ if hasattr(self, name)}
        return {name: v.values() if isinstance(v, Parameters) else v for name, v in given.items()}

def CommonParams():
    params = Parameters()
    params.model, params.cpuparams = Parameters(), Parameters()
    return params

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

class Server:
    def __init__(self, params):
        if not os.path.exists(params.model.path):
            raise RuntimeError("Failed to init server, please check the input params.")
        with open(params.model.path, "w") as file:
            json.dump(params.values(), file)
        server = http.server.HTTPServer((params.hostnames[0], params.port), Health)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{params.port}"

def get_system_info():
    return "CPU : AVX2 = 1"
"""


@pytest.fixture(autouse=True)
def _no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_folder", lambda model: Path("folder-of", Path(model).name))
    monkeypatch.setattr(peers, "write_float32_copy", lambda model, folder: folder)
    monkeypatch.setattr(peers, "default_model", lambda: "the-default")
    monkeypatch.setattr(peers, "default_gguf", lambda: Path("the-default.gguf"))
    monkeypatch.setattr(peers.machine, "device_name", lambda: "cpu")


def models(monkeypatch: pytest.MonkeyPatch, *words: str) -> peers.Models:
    monkeypatch.setattr(sys, "argv", ["peers", *words])
    return peers._models(peers._arguments()[0], Path("scratch"))


# -- which model each server gets ------------------------------------------------------------------------


def test_servers_on_mlx_share_one_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path("scratch/models/the-default")
    assert models(monkeypatch, "--peers", "mlx-lm", "vllm-mlx") == peers.Models(copy, copy, None)


def test_on_a_gpu_no_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.machine, "device_name", lambda: "gpu")
    folder = Path("folder-of/the-default")
    assert models(monkeypatch) == peers.Models(folder, folder, None)


def test_llama_cpp_gets_the_file_that_outriders_default_model_is_made_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path("folder-of/the-default")
    found = models(monkeypatch, "--peers", "llama-cpp")
    assert found == peers.Models(folder, folder, Path("the-default.gguf"))


def test_beside_llama_cpp_only_the_servers_on_mlx_get_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = models(monkeypatch, "--peers", "mlx-lm", "llama-cpp")
    assert found.outrider == Path("folder-of/the-default")
    assert found.mlx == Path("scratch/models/the-default")


def test_both_servers_get_the_gguf_file_that_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    expected = peers.Models(Path("folder-of/some.gguf"), Path("folder-of/some.gguf"), file)
    assert models(monkeypatch, "--peers", "llama-cpp", "--gguf", str(file)) == expected
    assert models(monkeypatch, str(file), "--peers", "llama-cpp") == expected


def test_a_model_folder_and_its_gguf_file_can_be_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    found = models(monkeypatch, "some-model", "--peers", "llama-cpp", "--gguf", str(file))
    assert found == peers.Models(Path("folder-of/some-model"), Path("folder-of/some-model"), file)


def test_llama_cpp_is_never_measured_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="give one of some-model with --gguf FILE"):
        models(monkeypatch, "some-model", "--peers", "llama-cpp")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gguf", __file__], "--gguf is for llama.cpp: add --peers llama-cpp"),
        (["--peers", "llama-cpp", "--gguf", "/no/such.gguf"], "/no/such.gguf: there is no such file"),
        (["--rows", "0"], "--rows: 0 is not at least 1"),
        (["--context", "0"], "--context: 0 is not at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        models(monkeypatch, *words)
    assert message in capsys.readouterr().err


# -- starting them ---------------------------------------------------------------------------------------


def llama_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path) -> server_process.Peer:
    """The peer, with a Python that has the fake wheel."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "xllamacpp.py").write_text(FAKE_XLLAMACPP)
    words = ["--peers", "llama-cpp", "--llama-cpp-python", sys.executable, "--rows", "3", "--context", "500"]
    monkeypatch.setattr(sys, "argv", ["peers", *words])
    found = peers._llama_cpp(peers._arguments()[0], peers.Models(tmp_path, tmp_path, gguf), tmp_path)
    return server_process.Peer(found.name, found.command, {"PYTHONPATH": str(site)})


def test_llama_cpp_is_started_without_caches_and_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers.sys, "platform", "linux")
    monkeypatch.setattr(peers, "usable_cpus", lambda: 2)
    file = tmp_path / "some.gguf"
    file.touch()
    with server_process.started(llama_cpp(monkeypatch, tmp_path, file), tmp_path) as running:
        server_process.wait_until_healthy(running)
        assert running.process.poll() is None
    assert running.process.returncode is not None
    assert json.loads(file.read_text()) == {
        "model": {"path": str(file)},
        "hostnames": ["127.0.0.1"],
        "port": running.port,
        "n_parallel": 3,
        "n_ctx": 1500,  # for all slots together
        "cpuparams": {"n_threads": 2},
        "verbosity": 2,
        "cache_prompt": False,
        "cache_ram_mib": 0,
        "slot_prompt_similarity": 0.0,
    }


def test_a_server_that_does_not_start_shows_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peer = llama_cpp(monkeypatch, tmp_path, tmp_path / "missing.gguf")
    with (
        server_process.started(peer, tmp_path) as running,
        pytest.raises(server_process.DidNotStart) as stopped,
    ):
        server_process.wait_until_healthy(running)
    assert "llama-cpp did not start:" in str(stopped.value)
    assert "RuntimeError: Failed to init server" in str(stopped.value)


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    peer = server_process.Peer("llama-cpp", ["python-with-xllamacpp", "x.py"])
    with pytest.raises(server_process.DidNotStart, match="llama-cpp: no Python at python-with-xllamacpp"):
        server_process.started(peer, tmp_path).__enter__()


def test_all_servers_know_the_model_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx_lm.server knows a model by its path only; llama.cpp does not look at the name."""
    monkeypatch.setattr(sys, "argv", ["peers", "--peers", "mlx-lm", "vllm-mlx", "llama-cpp"])
    args, _ = peers._arguments()
    found = peers._peers(args, peers.Models(Path("own"), Path("copy"), Path("m.gguf")), Path("scratch"))
    assert [peer.name for peer in found] == ["outrider", "mlx-lm", "vllm-mlx", "llama-cpp"]
    outrider, mlx_lm, vllm_mlx, llama = (peer.command for peer in found)
    assert outrider[outrider.index("serve") + 1] == "own"
    assert outrider[outrider.index("--served-model-name") + 1] == "copy"
    assert "copy" in mlx_lm
    assert "copy" in vllm_mlx
    assert "m.gguf" in llama


# -- the default model's file ----------------------------------------------------------------------------


def release(content: bytes, num_fetched: list[int]) -> Release:
    def fetch(folder: Path, progress: object) -> Path:
        num_fetched.append(1)
        file = folder / "fetched"
        file.write_bytes(content)
        return file

    return Release("m.gguf", 4, hashlib.sha256(b"GGUF").hexdigest(), (DownloadSource("somewhere", fetch),))


def test_the_default_models_file_is_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    num_fetched: list[int] = []
    file = default_gguf(release(b"GGUF", num_fetched))
    assert (file.name, file.read_bytes()) == ("m.gguf", b"GGUF")
    assert default_gguf(release(b"GGUF", num_fetched)) == file
    assert len(num_fetched) == 1
    file.write_bytes(b"GG")  # cut off
    assert default_gguf(release(b"GGUF", num_fetched)).read_bytes() == b"GGUF"


def test_another_file_is_not_taken_for_the_default_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(ModelUnavailable, match="checksum is wrong"):
        default_gguf(release(b"FFFF", []))
    assert not (tmp_path / "gguf").exists()
