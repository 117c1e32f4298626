"""Our own products: right, a token's the same to the bit whatever is beside it, and never in the way."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fresh_process import PRINT, PRODUCT, PROVIDER, REPORT, clean_environment, files_in, in_fresh_process
from outrider import blas, cpu_kernel
from outrider.cpu_kernel import AS_IT_IS, MOST_TOKENS, ROW_MAJOR, TRANSPOSED, Kernel
from outrider.cpu_threads import Threads
from outrider.kept_libraries import Unusable

HAS_COMPILER = any(map(shutil.which, cpu_kernel.COMPILERS))
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only: macOS has Accelerate"),
    pytest.mark.skipif(cpu_kernel.platform.machine() != "x86_64", reason="x86-64 only"),
    pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler"),
]

SGEMM = ctypes.CFUNCTYPE(
    None,
    *[ctypes.c_int] * 6,
    *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int),
)


class Passed:
    """Stands for the BLAS behind: notes what is passed on, and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.cblas_sgemm = SGEMM(lambda *arguments: self.calls.append(arguments))


class Products:
    """A library of its own for these tests, so that the process's keeps its instructions and threads."""

    def __init__(self, path: Path, instructions: str) -> None:
        self.library = ctypes.CDLL(str(path))
        self.passed = Passed()
        self.instructions = cpu_kernel.start(self.library, self.passed, instructions)  # type: ignore[arg-type]

    def sgemm(
        self,
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        num_threads: int = 1,
        beta: float = 0.0,
        alpha: float = 1.0,
        forms: tuple[int, int, int] = (ROW_MAJOR, AS_IT_IS, TRANSPOSED),
    ) -> np.ndarray:
        """Rows may be apart; x and w as they lie in memory."""
        self.library.outrider_product_set_num_threads(num_threads)
        address, apart = lambda a: ctypes.c_void_p(a.ctypes.data), lambda a: a.strides[0] // 4
        self.library.cblas_sgemm(
            *(*forms, len(x), len(w), x.shape[1], ctypes.c_float(alpha), address(x), apart(x)),
            *(address(w), apart(w), ctypes.c_float(beta), address(y), apart(y)),
        )
        return y

    def __call__(self, x: np.ndarray, w: np.ndarray, num_threads: int = 1) -> np.ndarray:
        return self.sgemm(x, w, np.full((len(x), len(w)), np.nan, np.float32), num_threads)


@pytest.fixture(scope="module", params=["avx512", "avx2"])
def products(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Products:
    path = tmp_path_factory.mktemp(request.param) / "product.so"
    cpu_kernel._compile(path)
    try:
        return Products(path, request.param)
    except Unusable as reason:
        pytest.skip(str(reason))


def numbers(seed: int, rows: int, size: int, gap: int = 0) -> np.ndarray:
    """Rows with unused numbers between them, none of which may be read into a sum."""
    wide = np.full((rows, size + gap), np.nan, np.float32)
    wide[:, :size] = np.random.default_rng(seed).standard_normal((rows, size))
    return wide[:, :size]


sizes = st.integers(1, 70) | st.sampled_from([64, 576, 1023, 1024, 1025, 1536, 2100, 4096])
shapes = st.tuples(st.integers(1, 40) | st.just(MOST_TOKENS), st.integers(1, 70), sizes)
gaps = st.integers(0, 3)


def test_the_instructions_are_those_asked_for(products: Products, request: pytest.FixtureRequest) -> None:
    assert products.instructions == request.node.callspec.params["products"]


@settings(max_examples=150, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), apart=st.tuples(gaps, gaps, gaps), adds=st.booleans())
def test_products_are_right_and_touch_nothing_else(
    products: Products, shape: tuple[int, int, int], seed: int, apart: tuple[int, int, int], adds: bool
) -> None:
    num_tokens, num_rows, size = shape
    x, w = numbers(seed, num_tokens, size, apart[0]), numbers(seed + 1, num_rows, size, apart[1])
    before = numbers(seed + 2, num_tokens, num_rows)
    wide = np.full((num_tokens, num_rows + apart[2]), np.nan, np.float32)
    wide[:, :num_rows] = before if adds else np.nan
    products.sgemm(x, w, wide[:, :num_rows], beta=float(adds))
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + (before if adds else 0)
    np.testing.assert_allclose(wide[:, :num_rows], exact, rtol=0, atol=2e-5 * size**0.5)
    assert np.isnan(wide[:, num_rows:]).all()
    assert products.passed.calls == []


@settings(max_examples=100, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), num_threads=st.integers(1, 4), data=st.data())
def test_a_tokens_product_does_not_depend_on_what_is_beside_it(
    products: Products, shape: tuple[int, int, int], seed: int, num_threads: int, data: st.DataObject
) -> None:
    num_tokens, num_rows, size = shape
    x, w = numbers(seed, num_tokens, size), numbers(seed + 1, num_rows, size)
    all_together = products(x, w, num_threads)
    first = data.draw(st.integers(0, num_tokens - 1))
    last = data.draw(st.integers(first + 1, num_tokens))
    first_row = data.draw(st.integers(0, num_rows - 1))
    assert np.array_equal(products(x[first:last], w), all_together[first:last])
    assert np.array_equal(products(x[first : first + 1], w[first_row:])[0], all_together[first, first_row:])


@pytest.mark.parametrize("shape", [(1, 1536, 576), (7, 577, 1537), (64, 963, 576), (384, 144, 64)])
def test_the_number_of_threads_does_not_change_a_bit(products: Products, shape: tuple[int, int, int]) -> None:
    x, w = numbers(0, shape[0], shape[2]), numbers(1, *shape[1:])
    alone = products(x, w)
    for turn in range(60):
        assert np.array_equal(products(x, w, num_threads=1 + turn % 5), alone)


def test_callers_that_come_together_all_get_their_product(products: Products) -> None:
    pairs = [(numbers(i, 1 + i, 576), numbers(9 + i, 1000, 576)) for i in range(4)]
    alone = [products(x, w) for x, w in pairs]
    wrong = []

    def call(number: int) -> None:
        for _ in range(100):
            if not np.array_equal(products(*pairs[number], num_threads=3), alone[number]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own(products: Products) -> None:
    x, w = numbers(0, 4, 576), numbers(1, 2000, 576)
    alone = products(x, w)
    products(x, w, num_threads=3)
    child = os.fork()
    if child == 0:
        same = all(np.array_equal(products(x, w, num_threads=3), alone) for _ in range(50))
        os._exit(0 if same else 1)
    assert all(np.array_equal(products(x, w, num_threads=3), alone) for _ in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "how",
    [
        {"forms": (ROW_MAJOR, AS_IT_IS, AS_IT_IS)},
        {"forms": (ROW_MAJOR, TRANSPOSED, TRANSPOSED)},
        {"forms": (102, AS_IT_IS, TRANSPOSED)},
        {"alpha": 0.5},
        {"beta": 0.5},
    ],
)
def test_what_is_no_such_product_is_passed_on(products: Products, how: dict[str, Any]) -> None:
    square, y = numbers(0, 16, 16), np.zeros((16, 16), np.float32)
    products.passed.calls.clear()
    products.sgemm(square, square, y, **how)
    (call,) = products.passed.calls
    products.passed.calls.clear()
    a, forms = square.ctypes.data, how.get("forms", (ROW_MAJOR, AS_IT_IS, TRANSPOSED))
    alpha, beta = how.get("alpha", 1.0), how.get("beta", 0.0)
    assert call == (*forms, 16, 16, 16, alpha, a, 16, a, 16, beta, y.ctypes.data, 16)
    assert not y.any()


def test_many_tokens_are_passed_on(products: Products) -> None:
    products.passed.calls.clear()
    products(numbers(0, MOST_TOKENS + 1, 16), numbers(1, 8, 16))
    assert len(products.passed.calls) == 1
    products.passed.calls.clear()


@pytest.mark.parametrize(("parallel", "watched"), [(1, 1), (2, 0)])
def test_it_gets_all_cores_and_only_the_library_behind_is_watched(
    parallel: int, watched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, watches = [], []
    behind = SimpleNamespace(openblas_get_parallel=lambda: parallel, openblas_set_num_threads=print)
    kernel = Kernel("/lib.so", "avx2", given.append)
    monkeypatch.setattr(blas, "_loaded", blas._Loaded(behind, kernel, Threads(1, 4)))  # type: ignore[arg-type]
    monkeypatch.setattr(blas, "_report", blas.BlasReport("OpenBLAS", "a test", "/blas.so", 1, str(kernel)))
    monkeypatch.setattr(
        blas, "ThreadWatch", lambda *arguments: SimpleNamespace(start=lambda: watches.append(arguments))
    )
    assert str(blas.watch_threads()).startswith(
        "own avx2 products up to 512 tokens, OpenBLAS, up to 4 threads"
    )
    blas.watch_threads()
    assert given == [4]
    assert watches == [(Threads(1, 4), print)] * watched


# In fresh processes -----------------------------------------------------------------------------------------

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
    (found,) = (file for file in files_in(cache) if file.name.startswith("libproduct-"))
    return found


def test_mlx_multiplies_with_it_and_a_token_stays_the_same(cache: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT + SAME, XDG_CACHE_HOME=cache)
    assert found["provider"] == str(kernel_in(cache))
    assert found["kernel"].startswith("own avx")
    assert found["no_kernel"] == found["stderr"] == ""
    assert found["error"] < 1e-5
    assert found["same"] == [True, True]


def test_it_can_be_switched_off(cache: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache, OUTRIDER_KERNEL="off")
    assert found["provider"] == found["path"]
    assert (found["kernel"], found["no_kernel"]) == ("", "OUTRIDER_KERNEL=off")


def test_a_switch_that_says_nothing_known_is_reported(cache: Path) -> None:
    found = in_fresh_process(REPORT, XDG_CACHE_HOME=cache, OUTRIDER_KERNEL="maybe")
    assert found["kernel"]
    assert "neither on nor off" in found["stderr"]


def test_it_stands_in_front_of_a_library_that_the_user_names(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.so"
    (openblas,) = set(files_in(cache)) - {kernel_in(cache)}
    mine.write_bytes(openblas.read_bytes())
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT, XDG_CACHE_HOME=cache, OUTRIDER_BLAS=mine)
    assert (found["path"], found["provider"]) == (str(mine), str(kernel_in(cache)))
    assert found["error"] < 1e-5


@pytest.mark.parametrize("damage", ["empty", "cut", "overwritten"])
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
    assert "libproduct" in found["stderr"]
    assert found["error"] < 1e-5
    assert list(temporary.glob("outrider-blas-*")) == []


def test_processes_that_start_together_all_get_it(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    kernel_in(tmp_path).unlink()
    command = [sys.executable, "-c", REPORT + "found['ok'] = bool(found['kernel'])" + PRINT]
    environment = clean_environment(XDG_CACHE_HOME=tmp_path)
    together = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    assert all(b'"ok": true' in process.communicate(timeout=120)[0] for process in together)
    assert kernel_in(tmp_path).name == kernel_in(cache).name


NOTHING = "void outrider_product_set_num_threads(int n) {} void cblas_sgemm(void) {}"
WRONG = f'const char *outrider_product_start(void) {{ return "avx2"; }} {NOTHING}'
NO_CPU = f"const char *outrider_product_start(void) {{ return 0; }} {NOTHING}"

COMPILERS = {
    "none": (None, "no C compiler (cc, gcc, clang)"),
    "failing": ("echo it does not like this >&2; exit 3", "failed (3): it does not like this"),
    "idle": ("exit 0", "wrote no library"),
    "scribbling": ("echo no library > $OUT", "file too short"),
    "wrong": (f"echo '{WRONG}' | cc -x c -shared -fPIC -o $OUT -", "wrong products"),
    "for another CPU": (f"echo '{NO_CPU}' | cc -x c -shared -fPIC -o $OUT -", "neither AVX-512 nor"),
}


@pytest.mark.parametrize("kind", COMPILERS)
def test_whatever_the_compiler_does_openblas_is_there(kind: str, cache: Path, tmp_path: Path) -> None:
    script, reason = COMPILERS[kind]
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    kernel_in(tmp_path).unlink()
    programs = tmp_path / "programs"
    programs.mkdir()
    if script is not None:
        compiler = programs / "cc"
        find_out = 'for OUT in "$@"; do [ "$LAST" = -o ] && break; LAST=$OUT; done'
        compiler.write_text(f"#!/bin/sh\nPATH={os.environ['PATH']}\n{find_out}\n{script}\n")
        compiler.chmod(0o755)
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT, XDG_CACHE_HOME=tmp_path, PATH=programs)
    assert found["provider"] == found["path"]
    assert reason in found["no_kernel"]
    assert found["error"] < 1e-4
