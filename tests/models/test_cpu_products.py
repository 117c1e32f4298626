"""Products in pieces: the same numbers, whatever is cut, and a token's own whoever is fed beside it."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider import blas
from outrider.models import cpu_layers, cpu_math, cpu_products
from outrider.models.cpu_products import CutEmbedding, CutLinear, product, rows_in_piece

pytestmark = pytest.mark.skipif(not cpu_math.applies(), reason="for Linux on x86 without a GPU")

FULL_CORE = "OpenBLAS 0.3.34 SkylakeX"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "most_tokens", lambda: 16)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "size", "rows"),
    [
        (1, 576, 576, None),  # fits
        (1, 1536, 576, 768),
        (2, 1536, 576, 512),
        (16, 1536, 576, 64),
        (1, 49152, 576, 1024),
        (1, 151936, 1024, 128),
        (1, 50257, 768, 848),  # and a rest
        (16, 4096, 4096, None),  # pieces would be too thin
    ],
)
def test_pieces_fit_and_divide_where_they_can(
    num_tokens: int, num_rows: int, size: int, rows: int | None
) -> None:
    assert rows_in_piece(num_tokens, num_rows, size) == rows


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (2, 3), (5,), (1, 17), (8, 4)])
@pytest.mark.parametrize(("num_rows", "size"), [(1536, 576), (576, 1536), (18321, 576), (93, 7001)])
def test_a_product_is_what_it_is_in_one_piece(shape: tuple[int, ...], num_rows: int, size: int) -> None:
    x, weight = mx.random.normal((*shape, size)), mx.random.normal((num_rows, size)) / size**0.5
    truth = np.array(x, np.float64) @ np.array(weight, np.float64).T
    found = np.array(product(x, weight))
    assert found.shape == (*shape, num_rows)
    np.testing.assert_allclose(found, truth, rtol=0, atol=5e-6)


@pytest.mark.usefixtures("one_thread")
def test_a_tokens_product_does_not_depend_on_its_neighbours() -> None:
    if not blas.report().name.endswith(cpu_products.CORES):
        pytest.skip("a core without such kernels")
    x, weight = mx.random.normal((16, 576)), mx.random.normal((1536, 576))
    alone = product(x[:1], weight)
    assert all(mx.array_equal(product(x[:count], weight)[:1], alone) for count in range(2, 17))


@pytest.mark.parametrize(
    ("name", "threads", "most"),
    [
        (FULL_CORE, 1, 16),
        (FULL_CORE, 2, 4),
        (FULL_CORE, 8, 0),
        (FULL_CORE, None, 0),
        ("OpenBLAS 0.3.34 Haswell", 1, 0),
    ],
)
def test_what_is_cut_depends_on_the_machine(
    name: str, threads: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = blas.BlasReport(name, "a test", "/somewhere/lib.so", threads)
    monkeypatch.setattr(blas, "report", lambda: report)
    assert cpu_products.most_tokens() == most
    monkeypatch.setattr(blas, "report", lambda: dataclasses.replace(report, path=None))
    assert cpu_products.most_tokens() == 0


def test_nothing_is_cut_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "report", lambda: blas.BlasReport(FULL_CORE, "a test", "/lib.so", 1))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert cpu_products.most_tokens() == 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_layers_and_tied_embeddings(has_bias: bool) -> None:
    layers = nn.Sequential(nn.Linear(576, 1536, bias=has_bias), nn.Linear(1536, 576, bias=has_bias))
    tied = nn.Embedding(2048, 576)
    x = mx.random.normal((2, 3, 576))
    expected = tied.as_linear(layers(x))
    for part in (layers, tied):
        cpu_layers.use(part)
    assert [type(layer) for layer in layers.layers] == [CutLinear] * 2
    assert type(tied) is CutEmbedding
    np.testing.assert_allclose(np.array(tied.as_linear(layers(x))), np.array(expected), atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_other_dtypes_are_left_whole() -> None:
    x, weight = (
        mx.random.normal((1, 576)).astype(mx.float16),
        mx.random.normal((1536, 576)).astype(mx.float16),
    )
    assert mx.array_equal(product(x, weight), x @ weight.T)
