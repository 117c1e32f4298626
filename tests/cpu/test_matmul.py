"""native/sgemm.c: correct, a token's result bit-identical whatever is beside it, and nothing else touched."""

import ctypes
import faulthandler
import mmap
import signal
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cpu import blas, matmul
from outrider.cpu.matmul import MAX_TOKENS, SgemmKernel
from outrider.cpu.matmul_check import NO_TRANSPOSE, ROW_MAJOR, TRANSPOSE
from outrider.cpu.threads import ThreadCounts
from own_sgemm import (
    INSTRUCTIONS,
    VALUES,
    WHERE_THEY_ARE,
    Sgemm,
    exit_code_of_a_child,
    loaded,
    numbers,
)

pytestmark = WHERE_THEY_ARE


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def sgemm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sgemm:
    path = tmp_path_factory.mktemp(request.param) / "sgemm.so"
    matmul._compile(path)
    return loaded(path, request.param)


sizes = st.integers(1, 70) | st.sampled_from([64, 576, 639, 640, 641, 1280, 1281, 1536, 2100, 4096])
shapes = st.tuples(st.integers(1, 40) | st.just(MAX_TOKENS), st.integers(1, 70), sizes)
gaps = st.integers(0, 3)


def test_the_instructions_are_those_asked_for(sgemm: Sgemm, request: pytest.FixtureRequest) -> None:
    assert sgemm.instructions == request.node.callspec.params["sgemm"]


@settings(max_examples=150, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), apart=st.tuples(gaps, gaps, gaps), adds=st.booleans())
def test_results_are_right_and_touch_nothing_else(
    sgemm: Sgemm, shape: tuple[int, int, int], seed: int, apart: tuple[int, int, int], adds: bool
) -> None:
    num_tokens, num_rows, size = shape
    x, w = numbers(seed, num_tokens, size, apart[0]), numbers(seed + 1, num_rows, size, apart[1])
    before = numbers(seed + 2, num_tokens, num_rows)
    wide = np.full((num_tokens, num_rows + apart[2]), np.nan, np.float32)
    wide[:, :num_rows] = before if adds else np.nan
    sgemm.call(x, w, wide[:, :num_rows], beta=float(adds))
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + (before if adds else 0)
    np.testing.assert_allclose(wide[:, :num_rows], exact, rtol=0, atol=2e-5 * size**0.5)
    assert np.isnan(wide[:, num_rows:]).all()
    assert sgemm.passed.calls == []


@settings(max_examples=100, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), num_threads=st.integers(1, 4), data=st.data())
def test_a_tokens_result_does_not_depend_on_what_is_beside_it(
    sgemm: Sgemm, shape: tuple[int, int, int], seed: int, num_threads: int, data: st.DataObject
) -> None:
    num_tokens, num_rows, size = shape
    x, w = numbers(seed, num_tokens, size), numbers(seed + 1, num_rows, size)
    all_together = sgemm(x, w, num_threads)
    first = data.draw(st.integers(0, num_tokens - 1))
    last = data.draw(st.integers(first + 1, num_tokens))
    first_row = data.draw(st.integers(0, num_rows - 1))
    assert np.array_equal(sgemm(x[first:last], w), all_together[first:last])
    assert np.array_equal(sgemm(x[first : first + 1], w[first_row:])[0], all_together[first, first_row:])


@pytest.mark.parametrize("stranger", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(5, 7, 17), (8, 9, 576), (13, 6, 1025)])
def test_what_is_no_number_stays_in_its_own_sums(
    sgemm: Sgemm, shape: tuple[int, int, int], stranger: float
) -> None:
    num_tokens, num_rows, size = shape
    x, w = numbers(0, num_tokens, size), numbers(1, num_rows, size)
    usual = sgemm(x, w)
    for number in range(max(num_tokens, num_rows)):
        token, row = number % num_tokens, number % num_rows
        strange_x, strange_w = x.copy(), w.copy()
        strange_x[token] = strange_w[row] = stranger
        found = sgemm(strange_x, strange_w)
        others = np.ix_(np.arange(num_tokens) != token, np.arange(num_rows) != row)
        assert np.array_equal(found[others], usual[others])
        assert not np.isfinite(found[token]).any()
        assert not np.isfinite(found[:, row]).any()


PAGE = mmap.PAGESIZE


def up_to_the_edge(array: np.ndarray, gap: int) -> np.ndarray:
    """A copy, its rows apart, whose last number is the last one before a page that nobody may touch."""
    rows, size = array.shape
    count = (rows - 1) * (size + gap) + size
    room = mmap.mmap(-1, (4 * count // PAGE + 2) * PAGE)
    edge = len(room) - PAGE
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + edge), ctypes.c_size_t(PAGE), 0) == 0
    flat = np.frombuffer(room, np.float32, count, edge - 4 * count)
    copy = np.lib.stride_tricks.as_strided(flat, (rows, size), (4 * (size + gap), 4))
    copy[:] = array
    return copy


ODD_SHAPES = [
    *product(range(1, 8), range(1, 10), (1, 3, 7, 8, 9, 15, 17, 31, 33, 1025)),
    *product((1, 25, 97), (16, 31, 63, 65), (3, 257)),
    (7, 577, 1537),
]


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_nothing_is_read_or_written_past_the_end(sgemm: Sgemm, gap: int) -> None:
    def all_are_right() -> bool:
        for num_tokens, num_rows, size in ODD_SHAPES:
            x, w, v = numbers(0, num_tokens, size), numbers(1, num_rows, size), numbers(2, size, num_rows)
            for right, how in ((w, {}), (v, {"forms": VALUES})):
                y = np.ones((num_tokens, num_rows), np.float32)
                at_the_edge = [up_to_the_edge(array, gap) for array in (x, right, y)]
                found = sgemm.call(*at_the_edge, num_threads=3, beta=1.0, **how)
                if not np.array_equal(found, sgemm.call(x, right, y, beta=1.0, **how)):
                    return False
        return True

    assert exit_code_of_a_child(all_are_right) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_edge_is_one(sgemm: Sgemm) -> None:
    """One number more than there are: a child that does so is stopped, or the test above shows nothing."""
    x, w = numbers(0, 1, 16), numbers(1, 1, 16)

    def reads_on() -> bool:
        faulthandler.disable()  # it is no surprise
        too_long = np.lib.stride_tricks.as_strided(up_to_the_edge(w, 0), (1, 17), (68, 4))
        sgemm(numbers(0, 1, 17), too_long)
        return True

    assert sgemm(x, up_to_the_edge(w, 0)).shape == (1, 1)
    assert exit_code_of_a_child(reads_on) == -signal.SIGSEGV


@pytest.mark.parametrize(
    "how",
    [
        {"forms": (ROW_MAJOR, TRANSPOSE, NO_TRANSPOSE)},
        {"forms": (ROW_MAJOR, TRANSPOSE, TRANSPOSE)},
        {"forms": (102, NO_TRANSPOSE, TRANSPOSE)},
        {"forms": (102, NO_TRANSPOSE, NO_TRANSPOSE)},
        {"forms": VALUES, "alpha": 0.5},
        {"forms": VALUES, "beta": 0.5},
        {"alpha": 0.5},
        {"beta": 0.5},
    ],
)
def test_other_calls_are_passed_on(sgemm: Sgemm, how: dict[str, Any]) -> None:
    square, y = numbers(0, 16, 16), np.zeros((16, 16), np.float32)
    sgemm.passed.calls.clear()
    sgemm.call(square, square, y, **how)
    (call,) = sgemm.passed.calls
    sgemm.passed.calls.clear()
    a, forms = square.ctypes.data, how.get("forms", (ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE))
    alpha, beta = how.get("alpha", 1.0), how.get("beta", 0.0)
    assert call == (*forms, 16, 16, 16, alpha, a, 16, a, 16, beta, y.ctypes.data, 16)
    assert not y.any()


def test_many_tokens_are_passed_on(sgemm: Sgemm) -> None:
    sgemm.passed.calls.clear()
    sgemm(numbers(0, MAX_TOKENS + 1, 16), numbers(1, 8, 16))
    assert len(sgemm.passed.calls) == 1
    sgemm.passed.calls.clear()


# y = x @ v --------------------------------------------------------------------------------------------------

many_tokens = st.integers(1, 40) | st.sampled_from([97, 200, MAX_TOKENS + 1])
columns = st.integers(1, 140) | st.sampled_from([256, 512, 577])
cells = st.integers(1, 70) | st.sampled_from([255, 256, 257, 512, 700])
value_shapes = st.tuples(many_tokens, cells, columns)


@settings(max_examples=150, deadline=None)
@given(shape=value_shapes, seed=st.integers(0, 99), apart=st.tuples(gaps, gaps, gaps), adds=st.booleans())
def test_weighted_values_are_right_and_nothing_else_is_touched(
    sgemm: Sgemm, shape: tuple[int, int, int], seed: int, apart: tuple[int, int, int], adds: bool
) -> None:
    num_tokens, num_cells, num_columns = shape
    x, v = numbers(seed, num_tokens, num_cells, apart[0]), numbers(seed + 1, num_cells, num_columns, apart[1])
    before = numbers(seed + 2, num_tokens, num_columns)
    wide = np.full((num_tokens, num_columns + apart[2]), np.nan, np.float32)
    wide[:, :num_columns] = before if adds else np.nan
    sgemm.call(x, v, wide[:, :num_columns], beta=float(adds), forms=VALUES)
    exact = x.astype(np.float64) @ v.astype(np.float64) + (before if adds else 0)
    np.testing.assert_allclose(wide[:, :num_columns], exact, rtol=0, atol=2e-5 * num_cells**0.5)
    assert np.isnan(wide[:, num_columns:]).all()
    assert sgemm.passed.calls == []


@settings(max_examples=100, deadline=None)
@given(shape=value_shapes, seed=st.integers(0, 99), num_threads=st.integers(1, 4), data=st.data())
def test_a_tokens_weighted_values_depend_on_its_own_cells_alone(
    sgemm: Sgemm, shape: tuple[int, int, int], seed: int, num_threads: int, data: st.DataObject
) -> None:
    """Not on tokens and columns beside them, nor on cells without weight that follow."""
    num_tokens, num_cells, num_columns = shape
    x, v = numbers(seed, num_tokens, num_cells), numbers(seed + 1, num_cells, num_columns)
    all_together = sgemm.values(x, v, num_threads)
    first = data.draw(st.integers(0, num_tokens - 1))
    last = data.draw(st.integers(first + 1, num_tokens))
    first_column = data.draw(st.integers(0, num_columns - 1))
    assert np.array_equal(sgemm.values(x[first:last], v), all_together[first:last])
    part = sgemm.values(x[first:last], v[:, first_column:])
    assert np.array_equal(part, all_together[first:last, first_column:])
    more = data.draw(st.integers(1, 300))
    longer = np.concatenate([x, np.zeros((num_tokens, more), np.float32)], axis=1)
    followed = np.concatenate([v, numbers(seed + 2, more, num_columns)])
    assert np.array_equal(sgemm.values(longer, followed, num_threads), all_together)


@pytest.mark.parametrize("stranger", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(5, 17, 7), (8, 300, 64), (130, 20, 97)])
def test_a_value_that_is_no_number_stays_in_its_own_column(
    sgemm: Sgemm, shape: tuple[int, int, int], stranger: float
) -> None:
    num_tokens, num_cells, num_columns = shape
    x, v = numbers(0, num_tokens, num_cells), numbers(1, num_cells, num_columns)
    usual = sgemm.values(x, v)
    for column in range(0, num_columns, 5):
        strange = v.copy()
        strange[column % num_cells, column] = stranger
        found = sgemm.values(x, strange)
        assert not np.isfinite(found[:, column]).any()
        assert np.array_equal(np.delete(found, column, 1), np.delete(usual, column, 1))


@pytest.mark.parametrize(("parallel", "watched"), [(1, 1), (2, 0)])
def test_it_gets_all_cores_and_only_the_library_behind_is_watched(
    parallel: int, watched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, watches = [], []
    behind = SimpleNamespace(openblas_get_parallel=lambda: parallel, openblas_set_num_threads=print)
    kernel = SgemmKernel("/lib.so", "avx2", given.append)
    monkeypatch.setattr(blas, "_loaded", blas._Loaded(behind, kernel, ThreadCounts(1, 4)))  # type: ignore[arg-type]
    monkeypatch.setattr(blas, "_report", blas.BlasReport("OpenBLAS", "a test", "/blas.so", 1, str(kernel)))
    monkeypatch.setattr(
        blas, "ThreadWatch", lambda *arguments: SimpleNamespace(start=lambda: watches.append(arguments))
    )
    assert str(blas.watch_threads()).startswith("own avx2 matmul up to 512 tokens, OpenBLAS, up to 4 threads")
    blas.watch_threads()
    assert given == [4]
    assert watches == [(ThreadCounts(1, 4), print)] * watched
