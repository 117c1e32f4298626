"""The BLAS take-over, watched from fresh processes: it can happen only once, before mlx is imported."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import fresh_process
from fresh_process import PRINT, PRODUCT, PROVIDER, REPORT, files_in
from outrider.cpu import blas, openblas_package, threads
from own_sgemm import WHERE_THEY_ARE
from patience import PATIENCE_S, case_only_in_soak, measures_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only: macOS has Accelerate")

HAS_AVX512 = blas._cpu_flags() >= blas.AVX512_FLAGS

# Without the own matmul in front of the library: test_matmul_start.py has that.
clean_environment = partial(fresh_process.clean_environment, OUTRIDER_KERNEL="off")
in_fresh_process = partial(fresh_process.in_fresh_process, OUTRIDER_KERNEL="off")

LINALG = """
import mlx.core as mx
import numpy as np
a = np.random.default_rng(0).standard_normal((48, 48)).astype(np.float32)
spd = a @ a.T + 48 * np.eye(48, dtype=np.float32)
linalg = lambda name, value: getattr(mx.linalg, name)(mx.array(value), stream=mx.cpu)
gap = lambda got, wanted: float(np.abs(got - wanted).max())
np_all = lambda arrays: [np.array(array) for array in arrays]
q, r = np_all(linalg("qr", a))
u, s, vt = np_all(linalg("svd", a))
values, vectors = np_all(linalg("eigh", spd))
lower = np.array(linalg("cholesky", spd))
found["gaps"] = {
    "inv": gap(np.array(linalg("inv", spd)) @ spd, np.eye(48)),
    "qr": gap(q @ r, a) + gap(q.T @ q, np.eye(48)),
    "svd": gap((u * s) @ vt, a),
    "eigh": gap((vectors * values) @ vectors.T, spd) / 48,
    "cholesky": gap(lower @ lower.T, spd) / 48,
}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the copy already."""
    folder = tmp_path_factory.mktemp("cache")
    found = in_fresh_process(REPORT, XDG_CACHE_HOME=folder)
    assert found["active"], found
    return folder


def test_the_process_takes_sgemm_from_the_cached_copy(cache: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache)
    assert found["name"].startswith("OpenBLAS")
    assert found["provider"] == found["path"] == str(files_in(cache)[0])
    assert not found["scipy_names"], "scipy's own OpenBLAS would be taken over"
    assert found["stderr"] == ""


def test_mlx_multiplies_right(cache: Path) -> None:
    optimised = in_fresh_process(REPORT + PRODUCT, XDG_CACHE_HOME=cache)
    reference = in_fresh_process(REPORT + PRODUCT, XDG_CACHE_HOME=cache, OUTRIDER_BLAS="off")
    assert optimised["error"] < 1e-4
    assert reference["error"] < 1e-4


@measures_time
def test_mlx_multiplies_at_least_five_times_faster(cache: Path) -> None:
    optimised = in_fresh_process(REPORT + PRODUCT, XDG_CACHE_HOME=cache)
    reference = in_fresh_process(REPORT + PRODUCT, XDG_CACHE_HOME=cache, OUTRIDER_BLAS="off")
    assert reference["best_s"] > 5 * optimised["best_s"]


def test_linear_algebra_on_the_cpu_stays_right(cache: Path) -> None:
    found = in_fresh_process(REPORT + LINALG, XDG_CACHE_HOME=cache)
    assert found["active"]
    assert max(found["gaps"].values()) < 1e-4, found["gaps"]


def test_off_leaves_the_process_alone(tmp_path: Path) -> None:
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=tmp_path, OUTRIDER_BLAS="off")
    assert not found["active"]
    assert found["reason"] == "OUTRIDER_BLAS=off"
    assert found["provider"] is None
    assert list(tmp_path.iterdir()) == []


def test_mlx_imported_first_is_left_as_it_is(cache: Path) -> None:
    found = in_fresh_process("import mlx.core" + REPORT + PROVIDER, XDG_CACHE_HOME=cache)
    assert not found["active"]
    assert "mlx.core was imported" in found["reason"]
    assert found["provider"] is None


def test_a_preloaded_library_keeps_its_place(cache: Path) -> None:
    preloaded = files_in(cache)[0]
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache, LD_PRELOAD=preloaded)
    assert not found["active"]
    assert "LD_PRELOAD" in found["reason"]


def test_a_named_library_is_used(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.so"
    mine.write_bytes(files_in(cache)[0].read_bytes())
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache, OUTRIDER_BLAS=mine)
    assert found["provider"] == found["path"] == str(mine)
    assert found["reason"] == f"OUTRIDER_BLAS={mine}"


def test_a_named_library_that_is_missing_is_reported_and_passed_over(cache: Path) -> None:
    found = in_fresh_process(REPORT, XDG_CACHE_HOME=cache, OUTRIDER_BLAS="/nowhere/libblas.so")
    assert found["path"] == str(files_in(cache)[0])
    assert "OUTRIDER_BLAS=/nowhere/libblas.so: " in found["reason"]
    assert "/nowhere/libblas.so cannot be used" in found["stderr"]


def test_a_named_library_without_sgemm_never_takes_over(cache: Path) -> None:
    unprefixed = openblas_package.packaged_library()  # exports scipy_cblas_sgemm
    found = in_fresh_process(REPORT + PROVIDER, XDG_CACHE_HOME=cache, OUTRIDER_BLAS=unprefixed)
    assert found["provider"] == str(files_in(cache)[0])
    assert "exports no cblas_sgemm" in found["reason"]
    assert not found["scipy_names"]


@pytest.mark.parametrize("damage", ["cut", case_only_in_soak("empty"), case_only_in_soak("overwritten")])
def test_a_damaged_copy_is_made_anew(damage: str, cache: Path, tmp_path: Path) -> None:
    whole = files_in(cache)[0]
    broken = tmp_path / whole.relative_to(cache)
    broken.parent.mkdir(parents=True)
    content = whole.read_bytes()
    broken.write_bytes({"empty": b"", "cut": content[:5_000_000], "overwritten": b"?" * len(content)}[damage])
    found = in_fresh_process(REPORT + PROVIDER + PRODUCT, XDG_CACHE_HOME=tmp_path)
    assert found["provider"] == str(broken)
    assert found["error"] < 1e-4
    assert files_in(tmp_path) == [broken]
    assert broken.read_bytes() == content


def test_without_a_cache_folder_the_copy_serves_one_process(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    found = in_fresh_process(REPORT + PRODUCT, XDG_CACHE_HOME=not_a_folder, TMPDIR=temporary)
    assert found["active"]
    assert "no cache folder" in found["reason"]
    assert "cannot be stored" in found["stderr"]
    assert found["error"] < 1e-4
    assert list(temporary.glob("outrider-blas-*")) == []


def test_a_full_disk_falls_through_with_a_reason_and_leaves_nothing_behind(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    found = in_fresh_process(full + REPORT + PRODUCT, XDG_CACHE_HOME=tmp_path)
    assert "scipy-openblas32: " in found["reason"]
    assert found["error"] < 1e-4
    assert files_in(tmp_path) == []


def test_processes_that_start_together_on_an_empty_cache_all_get_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPORT + PROVIDER + PRINT]
    environment = clean_environment(XDG_CACHE_HOME=tmp_path)
    together = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    found = [json.loads(process.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]) for process in together]
    (copy,) = files_in(tmp_path)
    assert [each["path"] for each in found] == [str(copy)] * 3
    assert [each["provider"].removesuffix(" (deleted)") for each in found] == [str(copy)] * 3


def test_the_copy_is_named_after_version_and_content(tmp_path: Path) -> None:
    library = tmp_path / openblas_package.PACKAGE / "lib" / "libscipy_openblas.so"
    library.parent.mkdir(parents=True)
    info = tmp_path / f"{openblas_package.PACKAGE}-1.2.3.dist-info"
    info.mkdir()
    library.write_bytes(b"one")
    first = openblas_package.copy_stem(library)
    library.write_bytes(b"two")
    second = openblas_package.copy_stem(library)
    info.rename(tmp_path / f"{openblas_package.PACKAGE}-1.2.4.dist-info")
    third = openblas_package.copy_stem(library)
    assert first.startswith("libopenblas-1.2.3-")
    assert len({first, second, third}) == 3


def test_the_library_runs_with_the_threads_asked_for(cache: Path) -> None:
    num_cpus = threads.usable_cpus()
    asked = {"OUTRIDER_BLAS_THREADS": "1"}, {"OUTRIDER_BLAS_THREADS": str(num_cpus)}, {"OMP_NUM_THREADS": "1"}
    found = [in_fresh_process(REPORT, XDG_CACHE_HOME=cache, **variables)["threads"] for variables in asked]
    assert found == [1, num_cpus, 1]


REST = """
import time
import mlx.core as mx
mx.set_default_device(mx.cpu)
x, w = mx.ones((64, 576)), mx.ones((1536, 576))
mx.eval([x @ w.T for _ in range(20)])
before = time.process_time()
time.sleep(0.06)
found["busy_s"] = time.process_time() - before
"""


@pytest.mark.skipif(threads.usable_cpus() < 2, reason="one thread never waits for another")
def test_a_thread_without_work_does_not_keep_a_core(cache: Path) -> None:
    """Steps with products of one thread follow such of two: a thread that spins would slow them down."""
    found = in_fresh_process(REPORT + REST, XDG_CACHE_HOME=cache, OUTRIDER_BLAS_THREADS="2")
    assert found["busy_s"] < 0.03  # of 0.06: OpenBLAS alone would take them all


def test_the_thread_variable_is_left_as_the_user_set_it(cache: Path) -> None:
    after = "\nfound['after'] = os.environ.get('OPENBLAS_NUM_THREADS')"
    unset = in_fresh_process(REPORT + after, XDG_CACHE_HOME=cache)
    mine = in_fresh_process(REPORT + after, XDG_CACHE_HOME=cache, OPENBLAS_NUM_THREADS="01")
    assert (unset["after"], mine["after"]) == (None, "01")


def test_the_cores_are_shared_out_only_where_nobody_said_how_many(cache: Path) -> None:
    watch = "\nfound['watched'] = str(blas.watch_threads())\nfound['again'] = str(blas.watch_threads())"
    free = in_fresh_process(REPORT + watch, XDG_CACHE_HOME=cache)
    fixed = in_fresh_process(REPORT + watch, XDG_CACHE_HOME=cache, OUTRIDER_BLAS_THREADS="1")
    wanted = threads.thread_counts({})
    assert free["threads"] == wanted.initial
    assert (f"up to {wanted.max} threads" in free["watched"]) == (wanted.max > wanted.initial)
    assert free["again"] == free["watched"]
    assert "1 thread (" in fixed["watched"]


@pytest.mark.skipif(not HAS_AVX512, reason="a CPU without AVX-512")
@pytest.mark.parametrize("core", ["Haswell", "Zen", ""])
def test_a_cpu_with_avx512_uses_the_kernels_for_it(cache: Path, core: str) -> None:
    found = in_fresh_process(REPORT, XDG_CACHE_HOME=cache, OPENBLAS_CORETYPE=core)
    assert blas.AVX512_CORE in found["name"]


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("on", marks=WHERE_THEY_ARE),
        pytest.param("off", marks=pytest.mark.skipif(not HAS_AVX512, reason="its AVX2 kernels differ")),
    ],
)
def test_products_are_the_same_to_the_bit_with_every_number_of_threads(
    kernel: str, cache: Path, tmp_path: Path
) -> None:
    own_cache = shutil.copytree(cache, tmp_path / "cache")
    products = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
library = ctypes.CDLL(found["path"])
shapes = [(576, 1536), (1536, 576), (608, 93), (64, 2048), (1024, 64)]
pairs = [(mx.random.normal((rows, k)), mx.random.normal((k, n))) for k, n in shapes for rows in (1, 3, 8, 33)]
def products(num_threads):
    library.openblas_set_num_threads(num_threads)
    made = [x @ w for x, w in pairs] + [x @ mx.contiguous(w.T).T for x, w in pairs]
    mx.eval(made)
    return made
first = products(1)
found["same"] = [all(map(mx.array_equal, first, products(n))) for n in (2, 3, 4)]
"""
    found = in_fresh_process(REPORT + products, XDG_CACHE_HOME=own_cache, OUTRIDER_KERNEL=kernel)
    assert bool(found["kernel"]) == (kernel == "on")
    assert found["same"] == [True] * 3


def test_compiled_functions_run_where_there_is_no_compiler(cache: Path, tmp_path: Path) -> None:
    """mlx falls back to the separate operations by itself; a bare machine needs nothing from us."""
    compiled = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
x = mx.array([[-1.0, 0.0, 2.0]])
swiglu = mx.compile(lambda gate, up: gate * mx.sigmoid(gate) * up)
found["gap"] = mx.abs(swiglu(x, x) - x * x * mx.sigmoid(x)).max().item()
"""
    found = in_fresh_process(REPORT + compiled, XDG_CACHE_HOME=cache, PATH="/nonexistent", TMPDIR=tmp_path)
    assert found["active"]
    assert found["gap"] < 1e-6
    assert list(tmp_path.glob("mlx/**/*.so")) == []
