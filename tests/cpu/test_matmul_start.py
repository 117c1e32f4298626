"""How native/sgemm.c comes into a process: compiled once, cached, checked; OpenBLAS serves without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fresh_process import PRINT, PRODUCT, PROVIDER, REPORT, clean_environment, files_in, in_fresh_process
from outrider.cpu import matmul, threads
from own_sgemm import WHERE_THEY_ARE
from patience import PATIENCE_S, case_only_in_soak, wait_until

pytestmark = WHERE_THEY_ARE

SAME = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
x, w, bias = mx.random.normal((40, 576)), mx.random.normal((1536, 576)), mx.random.normal((1536,))
whole = [x @ w.T, mx.addmm(bias, x, w.T)]
parts = [x[i : i + 1] @ w.T for i in range(40)], [mx.addmm(bias, x[i : i + 1], w.T) for i in range(40)]
found["same"] = [mx.array_equal(a, mx.concatenate(b)).item() for a, b in zip(whole, parts)]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds both libraries already."""
    folder = tmp_path_factory.mktemp("cache")
    found = in_fresh_process(REPORT, XDG_CACHE_HOME=folder)
    if not found["kernel"]:
        pytest.skip(found["no_kernel"])
    return folder


def kernel_in(cache: Path) -> Path:
    (found,) = (file for file in files_in(cache) if file.name.startswith("libsgemm-"))
    return found


def test_mlx_multiplies_with_it_and_a_token_stays_the_same(cache: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT + SAME, XDG_CACHE_HOME=cache)
    assert found["provider"] == str(kernel_in(cache))
    assert found["kernel"].startswith("own avx")
    assert found["no_kernel"] == found["stderr"] == ""
    assert found["error"] < 1e-5
    assert found["same"] == [True, True]


THREADS_BEFORE = """
import hashlib
import numpy as np  # starts threads of its own
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))
before = len(os.listdir("/proc/self/task"))
"""
THREADS = """
mx.eval([mx_x @ mx_w.T for _ in range(200)])
found["helpers"] = len(os.listdir("/proc/self/task")) - before
found["y"] = hashlib.sha256(np.array(mx_x @ mx_w.T)).hexdigest()
"""


@pytest.mark.skipif(threads.usable_cpus() < 2, reason="nobody could help")
def test_mlx_multiplies_with_several_threads_and_ends_in_peace(cache: Path) -> None:
    one, two = (
        in_fresh_process(
            REPORT + THREADS_BEFORE + PRODUCT + THREADS, XDG_CACHE_HOME=cache, OUTRIDER_BLAS_THREADS=threads
        )
        for threads in "12"
    )
    assert two["kernel"]
    assert (one["helpers"], two["helpers"]) == (0, 1)
    assert two["error"] < 1e-5
    assert two["y"] == one["y"]
    assert two["stderr"] == ""


def test_it_can_be_switched_off(cache: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache, OUTRIDER_KERNEL="off")
    assert found["provider"] == found["path"]
    assert (found["kernel"], found["no_kernel"]) == ("", "OUTRIDER_KERNEL=off")


def test_a_switch_that_says_nothing_known_is_reported(cache: Path) -> None:
    found = in_fresh_process(REPORT, XDG_CACHE_HOME=cache, OUTRIDER_KERNEL="maybe")
    assert found["kernel"]
    assert found["stderr"].count("'maybe' is none of on, off") == 1


def test_instructions_without_a_form_leave_all_matmuls_to_the_library(cache: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache, OUTRIDER_KERNEL="portable")
    assert found["provider"] == found["path"]
    assert found["no_kernel"] == "OUTRIDER_KERNEL=portable, and there is no portable form"


def test_it_stands_in_front_of_a_library_that_the_user_names(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.so"
    (openblas,) = set(files_in(cache)) - {kernel_in(cache)}
    mine.write_bytes(openblas.read_bytes())
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT, XDG_CACHE_HOME=cache, OUTRIDER_BLAS=mine)
    assert (found["path"], found["provider"]) == (str(mine), str(kernel_in(cache)))
    assert found["error"] < 1e-5


@pytest.mark.parametrize("damage", ["cut", case_only_in_soak("empty"), case_only_in_soak("overwritten")])
def test_a_damaged_one_is_made_anew(damage: str, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    broken, content = kernel_in(tmp_path), kernel_in(cache).read_bytes()
    broken.write_bytes({"empty": b"", "cut": content[:9000], "overwritten": b"?" * len(content)}[damage])
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT, XDG_CACHE_HOME=tmp_path)
    assert found["provider"] == str(broken)
    assert found["error"] < 1e-5


def test_without_a_cache_folder_it_serves_one_process(tmp_path: Path) -> None:
    not_a_folder, temporary = tmp_path / "file", tmp_path / "tmp"
    not_a_folder.touch()
    temporary.mkdir()
    found = in_fresh_process(REPORT + PRODUCT, XDG_CACHE_HOME=not_a_folder, TMPDIR=temporary)
    assert found["kernel"]
    assert "libsgemm" in found["stderr"]
    assert found["error"] < 1e-5
    assert list(temporary.glob("outrider-blas-*")) == []


def test_processes_that_start_together_all_get_it(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    kernel_in(tmp_path).unlink()
    command = [sys.executable, "-c", REPORT + "found['ok'] = bool(found['kernel'])" + PRINT]
    environment = clean_environment(XDG_CACHE_HOME=tmp_path)
    together = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    assert all(b'"ok": true' in process.communicate(timeout=PATIENCE_S)[0] for process in together)
    assert kernel_in(tmp_path).name == kernel_in(cache).name


NO_HOME = """
import os.path
os.path.expanduser = lambda path: path
"""


def test_without_a_home_it_serves_one_process(tmp_path: Path) -> None:
    found = in_fresh_process(NO_HOME + REPORT + PRODUCT, XDG_CACHE_HOME="", TMPDIR=tmp_path)
    assert found["active"]
    assert found["kernel"]
    assert "home" in found["stderr"]
    assert found["error"] < 1e-5
    assert list(tmp_path.glob("outrider-blas-*")) == []


NO_MORE_THREADS = """
import resource
import numpy as np
x, w, y = np.ones((8, 576), np.float32), np.ones((4096, 576), np.float32), np.empty((8, 4096), np.float32)
sgemm, one, zero = ctypes.CDLL(None).cblas_sgemm, ctypes.c_float(1), ctypes.c_float(0)
at_x, at_w, at_y = (ctypes.c_void_p(array.ctypes.data) for array in (x, w, y))
multiply = lambda: sgemm(101, 111, 112, 8, 4096, 576, one, at_x, 576, at_w, 576, zero, at_y, 4096)
tasks = lambda: len(os.listdir("/proc/self/task"))
before, set_num_threads = tasks(), blas._loaded.kernel.set_num_threads
set_num_threads(2)
most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most[1]))  # there is no room for a stack
multiply()
resource.setrlimit(resource.RLIMIT_AS, most)
found["right"] = bool((y == 576).all())
multiply()
found["helpers"] = [tasks() - before]
set_num_threads(2)
multiply()
found["helpers"].append(tasks() - before)
"""


def test_threads_that_cannot_be_had_are_not_asked_for_again(cache: Path) -> None:
    found = in_fresh_process(REPORT + NO_MORE_THREADS, XDG_CACHE_HOME=cache)
    assert found["right"]
    assert found["helpers"] == [0, 1]  # until a number is set anew


@pytest.mark.parametrize("kernel", ["on", "off"])
def test_a_library_that_multiplies_wrong_does_not_take_over(kernel: str, cache: Path, tmp_path: Path) -> None:
    wrong, source = tmp_path / "wrong.so", tmp_path / "wrong.c"
    source.write_text("void cblas_sgemm(void) {}")
    subprocess.run([matmul.COMPILERS[0], "-shared", "-fPIC", "-o", wrong, source], check=True)
    variables = {"OUTRIDER_BLAS": wrong, "OUTRIDER_KERNEL": kernel}
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT, XDG_CACHE_HOME=cache, **variables)
    assert f"{wrong} computes wrong products" in found["reason"]
    assert found["name"].startswith("OpenBLAS")
    assert found["provider"] == (str(kernel_in(cache)) if kernel == "on" else found["path"])
    assert found["error"] < 1e-4


# With strange compilers -------------------------------------------------------------------------------------

NOTHING = "void outrider_sgemm_set_num_threads(int n) {} void cblas_sgemm(void) {}"
WRONG = f'const char *outrider_sgemm_start(void) {{ return "avx2"; }} {NOTHING}'
NO_CPU = f"const char *outrider_sgemm_start(void) {{ return 0; }} {NOTHING}"

COMPILERS = {
    "none": (None, "no C compiler (cc, gcc, clang)"),
    "failing": ("echo it does not like this >&2; exit 3", "failed (3): it does not like this"),
    "idle": ("exit 0", "wrote no library"),
    "scribbling": ("echo no library > $OUT", "file too short"),
    "wrong": (f"echo '{WRONG}' | cc -x c -shared -fPIC -o $OUT -", "wrong products"),
    "for another CPU": (f"echo '{NO_CPU}' | cc -x c -shared -fPIC -o $OUT -", "neither AVX-512 nor"),
}


class Programs:
    """A folder of compilers, the only one to be searched; they note that they ran."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder / "programs"
        self.folder.mkdir()
        self.cache = shutil.copytree(cache, folder / "cache")
        kernel_in(self.cache).unlink()

    def add(self, name: str, script: str) -> None:
        """A compiler whose `$OUT` is the file it is to write."""
        find_out = 'for OUT in "$@"; do [ "$LAST" = -o ] && break; LAST=$OUT; done'
        noting = f"echo {name} $$ >> {self.folder}/runs"
        program = self.folder / name
        program.write_text(f"#!/bin/sh\nPATH={os.environ['PATH']}\n{noting}\n{find_out}\n{script}\n")
        program.chmod(0o755)

    def runs(self) -> list[tuple[str, int]]:
        """Names and numbers of the processes, in order."""
        lines = (self.folder / "runs").read_text().splitlines()
        return [(name, int(number)) for name, number in map(str.split, lines)]

    def start(self, code: str = REPORT + PROVIDER + PRODUCT) -> dict[str, Any]:
        return in_fresh_process(code, XDG_CACHE_HOME=self.cache, PATH=self.folder)


@pytest.fixture
def programs(tmp_path: Path, cache: Path) -> Programs:
    return Programs(tmp_path, cache)


@pytest.mark.parametrize("kind", COMPILERS)
def test_whatever_the_compiler_does_openblas_is_there(kind: str, programs: Programs) -> None:
    script, reason = COMPILERS[kind]
    if script is not None:
        programs.add("cc", script)
    found = programs.start()
    assert found["provider"] == found["path"]
    assert reason in found["no_kernel"]
    assert found["error"] < 1e-4
    assert script is None or len(programs.runs()) == 1


@pytest.mark.parametrize("kind", ["wrong", "for another CPU"])
def test_what_another_compilation_would_not_change_is_compiled_once(kind: str, programs: Programs) -> None:
    script, reason = COMPILERS[kind]
    programs.add("cc", str(script))
    for _ in range(2):
        assert reason in programs.start(REPORT)["no_kernel"]
    assert len(programs.runs()) == 1


def test_where_one_compiler_fails_the_next_is_tried(programs: Programs) -> None:
    programs.add("cc", "exit 1")
    programs.add("gcc", 'exec cc "$@"')
    found = programs.start()
    assert found["provider"] == str(kernel_in(programs.cache))
    assert found["error"] < 1e-5
    assert [name for name, _number in programs.runs()] == ["cc", "gcc"]


IMPATIENT = """
import pathlib, subprocess, time
communicate = subprocess.Popen.communicate
def impatient(process, timeout):
    assert timeout == 30
    runs = pathlib.Path({runs!r})
    while not runs.is_file() or "child" not in runs.read_text():
        time.sleep(0.01)
    return communicate(process, timeout=1)
subprocess.Popen.communicate = impatient
"""


def test_a_compiler_that_hangs_is_ended_with_all_its_children(programs: Programs) -> None:
    hanging = f"sleep 900 & echo child $! >> {programs.folder}/runs; wait"
    programs.add("cc", hanging)
    programs.add("gcc", hanging)
    impatient = IMPATIENT.format(runs=str(programs.folder / "runs"))
    found = programs.start(impatient + REPORT + PROVIDER + PRODUCT)
    assert "took longer than" in found["no_kernel"]
    assert found["provider"] == found["path"]
    assert found["error"] < 1e-4
    assert [name for name, _number in programs.runs()] == ["cc", "child"]
    wait_until(lambda: not any(is_running(number) for _name, number in programs.runs()))


def is_running(number: int) -> bool:
    """A process that has ended may be there until somebody asks after it."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between open and read
        return False
