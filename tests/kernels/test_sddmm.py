import pytest
import torch
from qgnn.kernels.sddmm import MAX_COLUMNS, sddmm
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    UNIT,
    assert_within,
    csr,
    far_columns,
    quiet,
    random_codes,
    random_scales,
    surrounded,
)
from qgnn import reference

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
GRAPH = RECTANGULAR["wide"]  # 90 edges from 60 nodes into 7


def _codes(graph: tuple[Tensor, int, int], width: int, device: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    edge_index, S, N = graph
    rows = (*csr(edge_index, N, device), random_codes(N, width, device), random_codes(S, width, device))
    return rows, {"target_scale": random_scales(N, device), "source_scale": random_scales(S, device)}


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_sddmm_of_codes_equals_reference_on_every_graph(device: str, name: str) -> None:
    rows, scales = _codes(ALL_GRAPHS[name], 7, device)
    assert torch.equal(sddmm(*rows, **scales), reference.sddmm(*rows, **scales))


@pytest.mark.parametrize("width", [*SIZES, 600])
def test_sddmm_of_codes_equals_reference_at_every_width(device: str, width: int) -> None:
    rows, scales = _codes(GRAPH, width, device)
    assert torch.equal(sddmm(*rows, **scales), reference.sddmm(*rows, **scales))


def test_sddmm_takes_one_scale_for_all_rows_or_none(device: str) -> None:
    rows, _ = _codes(GRAPH, 33, device)
    one = torch.full((1,), 0.25, device=device)
    for options in ({"target_scale": one, "source_scale": one}, {}):
        assert torch.equal(sddmm(*rows, **options), reference.sddmm(*rows, **options))


def test_integer_dot_products_are_exact_beyond_24_bits(device: str) -> None:
    """Terms of up to 14 bits, 2000 of them: fp32 would round the partial sums, int32 rounds the final one only."""
    target, source = (torch.randint(100, 128, (n, 2000), dtype=torch.int8, device=device) for n in (1, 8))
    indptr, index = torch.tensor([0, 8], device=device), torch.arange(8, device=device)
    exact = (source.long() * target.long()).sum(1)
    assert exact.min() > 2**24
    assert torch.equal(sddmm(indptr, index, target, source), exact.float())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 33, 300])
def test_sddmm_of_floats_is_within_its_error_bound(device: str, dtype: torch.dtype, width: int) -> None:
    """F products and F - 1 additions, each rounded once."""
    edge_index, S, N = GRAPH
    indptr, index = csr(edge_index, N, device, torch.int64)
    target, source = torch.randn(N, width, device=device).to(dtype), torch.randn(S, width, device=device).to(dtype)
    ends = target.double()[torch.repeat_interleave(indptr.diff())], source.double()[index]
    out = sddmm(indptr, index, target, source)
    assert out.dtype == torch.float32
    assert_within(out, (ends[0] * ends[1]).sum(1), 1.01 * (width + 1) * UNIT * (ends[0] * ends[1]).abs().sum(1))
    assert torch.equal(out, sddmm(indptr, index, target, source))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sddmm_takes_any_strides(device: str, layout: str) -> None:
    rows, scales = _codes(GRAPH, 33, device)
    strided = [v.repeat_interleave(2)[::2] for v in rows[:2]] + [LAYOUTS[layout](v) for v in rows[2:]]
    strided_scales = {name: v.repeat_interleave(2)[::2] for name, v in scales.items()}
    assert torch.equal(sddmm(*strided, **strided_scales), sddmm(*rows, **scales))


@pytest.mark.parametrize("far", ["target", "source"])
def test_sddmm_finds_columns_beyond_32_bit_offsets(device: str, far: str) -> None:
    (indptr, index, target, source), scales = _codes(GRAPH, 5, device)
    rows = (far_columns(target), source) if far == "target" else (target, far_columns(source))
    assert torch.equal(sddmm(indptr, index, *rows, **scales), sddmm(indptr, index, target, source, **scales))


@pytest.mark.parametrize("width", SIZES)
def test_sddmm_uses_nothing_outside_a_view(device: str, width: int) -> None:
    (indptr, index, *codes), scales = _codes(GRAPH, width, device)
    out = sddmm(indptr, index, *(surrounded(x, 99) for x in codes), **scales)
    assert torch.equal(out, sddmm(indptr, index, *codes, **scales))
    floats = [x.float() for x in codes]
    out = sddmm(indptr, index, *(surrounded(x, float("nan")) for x in floats))
    assert torch.equal(out, sddmm(indptr, index, *floats))


def test_sddmm_leaves_its_inputs_alone(device: str) -> None:
    rows, scales = _codes(GRAPH, 33, device)
    inputs = [*rows, *scales.values()]
    before = [x.clone() for x in inputs]
    sddmm(*rows, **scales)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@quiet
def test_poison_reaches_the_edges_of_its_rows_and_no_other(device: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    (indptr, index, _, _), _ = _codes((edge_index, num_nodes, num_nodes), 1, device)
    x = torch.randn(num_nodes, 33, device=device)
    expected = sddmm(indptr, index, x, x)
    poisoned = x.clone()
    poisoned[0] = float("nan")  # the row that masked lanes point at
    row = torch.repeat_interleave(indptr.diff().long())
    reached = (row == 0) | (index == 0)
    out = sddmm(indptr, index, poisoned, poisoned)
    assert torch.equal(out.isnan(), reached)
    assert torch.equal(out[~reached], expected[~reached])


def test_sddmm_of_rows_without_columns_is_zero(device: str) -> None:
    (indptr, index, *_), _ = _codes(GRAPH, 1, device)
    rows = [torch.zeros((n, 0), dtype=torch.int8, device=device) for n in (GRAPH[2], GRAPH[1])]
    assert torch.equal(sddmm(indptr, index, *rows), torch.zeros(index.numel(), device=device))


@pytest.mark.parametrize("codes", ["target", "source"])
def test_sddmm_refuses_codes_with_floats(device: str, codes: str) -> None:
    (indptr, index, target, source), _ = _codes(GRAPH, 7, device)
    rows = (target, source.float()) if codes == "target" else (target.float(), source)
    names = r"torch\.int8 and torch\.float32" if codes == "target" else r"torch\.float32 and torch\.int8"
    with pytest.raises(TypeError, match=rf"both operands in int8 or both in a floating-point type \(got {names}\)"):
        sddmm(indptr, index, *rows)


def test_sddmm_refuses_sums_that_int32_cannot_hold(device: str) -> None:
    row = torch.zeros((1, 1), dtype=torch.int8, device=device).expand(1, MAX_COLUMNS + 1)
    indptr, index = torch.tensor([0, 1], device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="'sddmm' expects at most 131072 columns of codes"):
        sddmm(indptr, index, row, row)
