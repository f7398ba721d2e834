"""The reference primitives against dense float64 algebra, at sizes and on graphs that hurt."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import (
    CASES,
    WIDTHS,
    adjacency_of,
    assert_within,
    degree_of,
    graph_of,
    random_codes,
    random_scale,
    seed_of,
    sum_bound,
)
from qgnn import Graph, reference
from qgnn.reference import _common
from qgnn.reference.dense import _integer_product
from statistics_checks import EPS

EPS64 = 2.0**-53
GRAPHS_AND_WIDTHS = [(name, 7) for name in CASES] + [
    (name, F) for name in ("power_law", "wide") for F in WIDTHS if F != 7
]


def csr(graph: Graph) -> tuple[Tensor, Tensor]:
    return graph.csr.indptr, graph.csr.index


def csc(graph: Graph) -> tuple[Tensor, Tensor]:
    return graph.csc.indptr, graph.csc.index


# --- products


def exact_product(x_q: Tensor, w_q: Tensor) -> Tensor:
    return x_q.long() @ w_q.long().t()


@pytest.mark.parametrize("K", [*WIDTHS, 0, 1023, 1024, 1025, 2048, 3001])
@pytest.mark.parametrize(("N", "M"), [(0, 3), (3, 0), (1, 1), (7, 33), (33, 7)])
def test_matmul_integer_sums_are_exact(N: int, M: int, K: int) -> None:
    x_q, w_q = random_codes(N, K), random_codes(M, K)
    y = reference.matmul(x_q, torch.ones(N), w_q, torch.ones(M))
    assert torch.equal(y, exact_product(x_q, w_q).float())


@pytest.mark.parametrize("K", [1024, 1025, 4097])
def test_matmul_worst_case_codes_are_exact(K: int) -> None:
    """Rows of the largest codes, of one sign and of both; fp32 would lose the last digits of such sums."""
    x_q = torch.full((3, K), 127, dtype=torch.int8)
    x_q[1] = -127
    x_q[2, 1] = 126
    w_q = torch.full((2, K), 127, dtype=torch.int8)
    w_q[1, ::2] = -127
    exact = exact_product(x_q, w_q)
    y = reference.matmul(x_q, torch.ones(1), w_q, torch.ones(2), out_dtype=torch.float64)
    assert torch.equal(y, exact.float().double())
    assert torch.equal(_integer_product(x_q, w_q), exact.float())


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matmul_applies_scales_and_bias(K: int, per_tensor: bool, out_dtype: torch.dtype) -> None:
    x_q, w_q, w_scale, bias = random_codes(13, K), random_codes(7, K), random_scale(7) / K / 1e4, torch.randn(7)
    x_scale = random_scale(1 if per_tensor else 13)
    y = reference.matmul(x_q, x_scale, w_q, w_scale, bias, out_dtype=out_dtype)
    product = exact_product(x_q, w_q).double() * x_scale.double()[:, None] * w_scale.double()
    bound = sum_bound(torch.tensor(0), product.abs() + bias.abs(), 4)  # of float(sum), two scales, and the bias
    assert_within(y, product + bias.double(), bound, out_dtype)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("M", WIDTHS)
def test_matmul_requantize_rounds_the_product(M: int, seed: int | None, bits: int) -> None:
    """The row scale of x changes only the resulting scale."""
    x_q, x_scale, w_q, w_scale = random_codes(13, 33), random_scale(13), random_codes(M, 33), random_scale(M)
    codes, scale = reference.matmul_requantize(x_q, x_scale, w_q, w_scale, bits=bits, seed=seed_of(seed), stream=2)
    product = exact_product(x_q, w_q).float() * w_scale
    expected, expected_scale = reference.quantize(product, bits=bits, seed=seed_of(seed), stream=2)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale * x_scale)


@pytest.mark.parametrize(("M", "K"), [(1, 1), (7, 33), (130, 32), (0, 3), (3, 0)])
@pytest.mark.parametrize("N", [0, 1, 33, 700])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_matmul_dw_is_the_product_over_rows(N: int, M: int, K: int, per_tensor: bool) -> None:
    g_q, x_q = random_codes(N, M), random_codes(N, K)
    g_scale, x_scale = random_scale(1 if per_tensor else N), random_scale(N)
    dw = reference.matmul_dw(g_q, g_scale, x_q, x_scale)
    g, x = g_q.double() * g_scale.double()[:, None], x_q.double() * x_scale.double()[:, None]
    assert_within(dw, g.t() @ x, sum_bound(torch.tensor(N), g.abs().t() @ x.abs(), 3))


def test_matmul_dw_does_not_wrap() -> None:
    """140,000 rows of the largest codes: their int32 sum passes 2**31."""
    num_rows = 140_000
    assert num_rows * 127 * 127 > 2**31
    x_q = torch.full((num_rows, 1), 127, dtype=torch.int8)
    g_q = torch.cat([x_q, -x_q], dim=1)
    one = torch.ones(1)
    total = num_rows * 127.0 * 127.0
    dw = reference.matmul_dw(g_q, one, x_q, one)
    expected = torch.tensor([[total], [-total]], dtype=torch.float64)
    assert_within(dw, expected, sum_bound(torch.tensor(num_rows), expected.abs(), 3))


def test_matmul_dw_poison_shows() -> None:
    """A poisoned row contributes to every weight; it must not vanish."""
    g_q, x_q, scale = random_codes(5, 3), random_codes(5, 4), torch.ones(5)
    scale[2] = math.nan
    assert reference.matmul_dw(g_q, scale, x_q, torch.ones(5)).isnan().all()


# --- aggregation


@pytest.mark.parametrize(("name", "F"), GRAPHS_AND_WIDTHS)
def test_spmm_of_codes_is_the_dense_product(name: str, F: int) -> None:
    graph = graph_of(name)
    x_q, x_scale = random_codes(graph.num_sources, F), random_scale(graph.num_sources)
    weight, row_factor, bias = torch.randn(graph.num_edges), torch.rand(graph.num_targets), torch.randn(F)
    options = {"weight": weight, "x_scale": x_scale, "row_factor": row_factor, "bias": bias}
    out = reference.spmm(*csr(graph), x_q, **options)
    x = x_q.double() * x_scale.double()[:, None]
    factor = row_factor.double()[:, None]
    expected = factor * (adjacency_of(graph, weight) @ x) + bias.double()
    magnitude = factor * (adjacency_of(graph, weight.abs()) @ x.abs()) + bias.double().abs()
    assert_within(out, expected, sum_bound(degree_of(graph), magnitude, 4))


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_factor", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_spmm_of_floats_with_every_option(
    has_weight: bool, has_scale: bool, has_factor: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    graph = graph_of("random")
    N, S = graph.num_targets, graph.num_sources
    x, weight, x_scale = torch.randn(S, 33).to(dtype), torch.randn(graph.num_edges), torch.rand(S)
    row_factor, bias = torch.rand(N), torch.randn(33)
    out = reference.spmm(
        *csr(graph),
        x,
        weight=weight if has_weight else None,
        x_scale=x_scale if has_scale else None,
        row_factor=row_factor if has_factor else None,
        bias=bias if has_bias else None,
    )
    weight = weight if has_weight else torch.ones_like(weight)
    x_scale = x_scale if has_scale else torch.ones_like(x_scale)
    row_factor = (row_factor if has_factor else torch.ones_like(row_factor)).double()[:, None]
    bias = (bias if has_bias else torch.zeros_like(bias)).double()
    scaled = x.double() * x_scale.double()[:, None]
    expected = row_factor * (adjacency_of(graph, weight) @ scaled) + bias
    magnitude = row_factor * (adjacency_of(graph, weight.abs()) @ scaled.abs()) + bias.abs()
    eps = EPS64 if dtype == torch.float64 else EPS
    assert_within(out, expected, sum_bound(degree_of(graph), magnitude, 4, 2 * eps), dtype)


def test_spmm_writes_the_asked_type() -> None:
    graph = graph_of("random")
    x_q, x = random_codes(50, 7), torch.randn(50, 7)
    assert reference.spmm(*csr(graph), x_q, x_scale=torch.ones(1)).dtype == torch.float32
    assert reference.spmm(*csr(graph), x.half()).dtype == torch.float16
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = reference.spmm(*csr(graph), x_q, x_scale=torch.ones(1), out_dtype=dtype)
        assert torch.equal(out, reference.spmm(*csr(graph), x_q, x_scale=torch.ones(1)).to(dtype))


def test_spmm_half_mean_of_many_messages_is_finite() -> None:
    """5,000 messages of 30: their sum does not fit fp16, their mean does."""
    indptr, index = torch.tensor([0, 5000]), torch.arange(5000)
    out = reference.spmm(indptr, index, torch.full((5000, 3), 30.0).half(), row_factor=torch.tensor([1 / 5000]))
    assert torch.equal(out, torch.full((1, 3), 30.0).half())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_spmm_index_types(index_dtype: torch.dtype) -> None:
    graph, x = graph_of("power_law"), torch.randn(160, 7)
    indptr, index = (t.to(index_dtype) for t in csr(graph))
    assert torch.equal(reference.spmm(indptr, index, x), reference.spmm(*csr(graph), x))


@pytest.mark.parametrize("name", CASES)
def test_spmm_is_adjoint_of_its_transpose(name: str) -> None:
    """<A x, y> = <x, A^T y>, with the weights carried through the permutation."""
    graph = graph_of(name)
    x = torch.randn(graph.num_sources, 7, dtype=torch.float64)
    y = torch.randn(graph.num_targets, 7, dtype=torch.float64)
    weight = torch.randn(graph.num_edges, dtype=torch.float64)
    forward = (reference.spmm(*csr(graph), x, weight=weight) * y).sum()
    backward = (reference.spmm(*csc(graph), y, weight=weight[graph.csc.order]) * x).sum()
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)


@settings(max_examples=50)
@given(st.floats(-4, 4), st.floats(-4, 4), st.sampled_from(sorted(CASES)))
def test_spmm_is_linear(a: float, b: float, name: str) -> None:
    graph = graph_of(name)
    x, y = torch.randn(2, graph.num_sources, 5, dtype=torch.float64)
    together = reference.spmm(*csr(graph), a * x + b * y)
    apart = a * reference.spmm(*csr(graph), x) + b * reference.spmm(*csr(graph), y)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-11)


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(CASES)))
def test_spmm_does_not_depend_on_the_order_of_edges(random, name: str) -> None:
    """Sums of integers are exact in fp32, so equality is exact too."""
    edge_index, num_sources, num_targets = CASES[name]
    order = list(range(edge_index.shape[1]))
    random.shuffle(order)
    shuffled = Graph.from_edge_index(edge_index[:, order], (num_sources, num_targets))
    x_q = random_codes(num_sources, 7)
    one = torch.ones(1)
    out = reference.spmm(*csr(graph_of(name)), x_q, x_scale=one)
    assert torch.equal(reference.spmm(*csr(shuffled), x_q, x_scale=one), out)


def test_spmm_poison_reaches_its_neighbors_only() -> None:
    graph = graph_of("random")
    x_q, scale = random_codes(50, 7), torch.ones(50)
    clean = reference.spmm(*csr(graph), x_q, x_scale=scale)
    scale[11] = math.nan
    out = reference.spmm(*csr(graph), x_q, x_scale=scale)
    reached = adjacency_of(graph)[:, 11] > 0
    assert reached.any()
    assert out[reached].isnan().all()
    assert torch.equal(out[~reached], clean[~reached])


@pytest.mark.parametrize("name", ["power_law", "isolated", "empty", "no_nodes", "no_targets", "tall"])
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
def test_spmm_requantize_rounds_the_sum(name: str, seed: int | None) -> None:
    graph = graph_of(name)
    x_q, x_scale = random_codes(graph.num_sources, 33), random_scale(graph.num_sources)
    options = {"weight": torch.randn(graph.num_edges), "row_factor": torch.rand(graph.num_targets)}
    rows = reference.spmm(*csr(graph), x_q, x_scale=x_scale, **options)
    for bits in (2, 8):
        rounding = {"bits": bits, "seed": seed_of(seed), "stream": 5}
        codes, scale = reference.spmm_requantize(*csr(graph), x_q, x_scale=x_scale, **options, **rounding)
        expected, expected_scale = reference.quantize(rows, **rounding)
        assert torch.equal(codes, expected)
        assert torch.equal(scale, expected_scale)


# --- edge scores


@pytest.mark.parametrize(("name", "F"), GRAPHS_AND_WIDTHS)
def test_sddmm_of_codes_is_exact(name: str, F: int) -> None:
    graph = graph_of(name)
    x_target, x_source = random_codes(graph.num_targets, F), random_codes(graph.num_sources, F)
    source, target = graph.edge_index()
    exact = (x_target[target].long() * x_source[source].long()).sum(1)
    assert torch.equal(reference.sddmm(*csr(graph), x_target, x_source), exact.float())
    target_scale, source_scale = random_scale(graph.num_targets), random_scale(graph.num_sources)
    scales = {"target_scale": target_scale, "source_scale": source_scale}
    scores = reference.sddmm(*csr(graph), x_target, x_source, **scales)
    assert torch.equal(scores, exact.float() * target_scale[target] * source_scale[source])


@pytest.mark.parametrize("name", ["power_law", "wide", "isolated", "one_pair", "empty", "no_sources"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_sddmm_of_floats(name: str, dtype: torch.dtype) -> None:
    graph = graph_of(name)
    x_target = torch.randn(graph.num_targets, 33).to(dtype)
    x_source = torch.randn(graph.num_sources, 33).to(dtype)
    target_scale = random_scale(1)
    source, target = graph.edge_index()
    terms = x_target[target].double() * x_source[source].double() * target_scale.double()
    scores = reference.sddmm(*csr(graph), x_target, x_source, target_scale=target_scale)
    eps = EPS64 if dtype == torch.float64 else EPS
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert_within(scores, terms.sum(1), sum_bound(torch.tensor(33), terms.abs().sum(1), 2, 2 * eps), compute_dtype)


def test_sddmm_long_rows_of_the_largest_codes_are_exact() -> None:
    F = 5000
    x = torch.full((2, F), 127, dtype=torch.int8)
    x[1, 0] = 126
    scores = reference.sddmm(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), x, x)
    assert scores.tolist() == [float(torch.tensor(F * 127 * 127 - 127, dtype=torch.float32))] * 2


# --- chunks


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large inputs are walked in pieces; here a piece is a row or two."""
    graph = graph_of("random")
    N, F = 50, 33
    x, x_q, x_scale = torch.randn(N, F), random_codes(N, F), random_scale(N)
    w_q, w_scale, g_q = random_codes(7, F), random_scale(7), random_codes(N, 7)
    seed = seed_of(1)

    def results() -> list[Tensor]:
        return [
            *reference.quantize(x, seed=seed),
            *reference.quantize(x, seed=seed, granularity="tensor"),
            *reference.quantize(x, seed=seed, granularity="block", block_size=8),
            reference.matmul(x_q, x_scale, w_q, w_scale),
            *reference.matmul_requantize(x_q, x_scale, w_q, w_scale, seed=seed),
            *reference.spmm_requantize(*csr(graph), x_q, x_scale=x_scale, seed=seed),
            reference.sddmm(*csr(graph), x_q, x_q, target_scale=x_scale, source_scale=x_scale),
            reference.matmul_dw(g_q, torch.ones(1), x_q, torch.ones(1)),  # sums of integers: exact in any order
        ]

    whole = results()
    monkeypatch.setattr(_common, "CHUNK_ELEMENTS", 2 * F)
    assert len(list(_common.row_chunks(N, F))) == N // 2
    for in_one, in_pieces in zip(whole, results(), strict=True):
        assert torch.equal(in_one, in_pieces)


def test_chunks_cover_every_row() -> None:
    for num_rows in (0, 1, 1000):
        for width in (0, 1, 10**9):
            covered = [row for rows in _common.row_chunks(num_rows, width) for row in range(rows.start, rows.stop)]
            assert covered == list(range(num_rows))
