import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.sddmm import sddmm
from qgnn.kernels.spmm_plan import make_plan
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


def _codes(
    graph: tuple[Tensor, int, int], width: int, device: str, heads: int = 1
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    edge_index, S, N = graph
    rows = (*csr(edge_index, N, device), random_codes(N, width, device), random_codes(S, width, device))
    shape = (-1,) if heads == 1 else (-1, heads)
    scales = {"target_scale": random_scales(N * heads, device), "source_scale": random_scales(S * heads, device)}
    return rows, {name: scale.view(shape) for name, scale in scales.items()}


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize(("op", "heads"), [("dot", 1), ("dot", 3), ("add", 1)])
def test_sddmm_of_codes_equals_reference_on_every_graph(device: str, name: str, op: str, heads: int) -> None:
    rows, scales = _codes(ALL_GRAPHS[name], 7 * heads, device, heads)
    options = {"op": op, "heads": heads, **scales}
    assert torch.equal(sddmm(*rows, **options), reference.sddmm(*rows, **options))


@pytest.mark.parametrize("op", ["dot", "add"])
def test_sddmm_of_chunks_equals_reference(device: str, op: str) -> None:
    """With a cap of 16, 18 chunks of the hub."""
    (indptr, index, *rows), scales = _codes(ALL_GRAPHS["hub"], 8, device, 2)
    options = {"op": op, "heads": 2, **scales}
    out = sddmm(indptr, index, *rows, **options, plan=make_plan(indptr, index.numel(), cap=16))
    assert torch.equal(out, reference.sddmm(indptr, index, *rows, **options))


@pytest.mark.parametrize(
    ("heads", "width"), [(2, 1), (2, 32), (2, 300), (3, 7), (3, 33), (3, 130), (4, 64), (8, 1), (8, 8)]
)
def test_sddmm_of_heads_equals_reference(device: str, heads: int, width: int) -> None:
    """Several heads in a tile, one, and slices of one; with scales of heads, of rows, of all, and without."""
    rows, by_head = _codes(GRAPH, heads * width, device, heads)
    one = torch.full((1,), 0.3, device=device)
    by_row = {name: scale[:, 0].contiguous() for name, scale in by_head.items()}
    mixed = {"target_scale": one, "source_scale": by_head["source_scale"]}
    for scales in (by_head, [by_row, mixed, {}][heads % 3]):
        assert torch.equal(sddmm(*rows, heads=heads, **scales), reference.sddmm(*rows, heads=heads, **scales))
    options = {"op": "add", "heads": heads, **by_head}
    assert torch.equal(sddmm(*rows, **options), reference.sddmm(*rows, **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 33, 300])
def test_sums_of_floats_equal_reference(device: str, dtype: torch.dtype, width: int) -> None:
    edge_index, S, N = GRAPH
    rows = [torch.randn(n, width, device=device).to(dtype) for n in (N, S)]
    graph = csr(edge_index, N, device)
    assert torch.equal(sddmm(*graph, *rows, op="add"), reference.sddmm(*graph, *rows, op="add"))


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


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 33, 300])
def test_sddmm_of_floats_is_within_its_error_bound(device: str, dtype: torch.dtype, width: int, heads: int) -> None:
    """D products and D - 1 additions, each rounded once."""
    edge_index, S, N = GRAPH
    indptr, index = csr(edge_index, N, device, torch.int64)
    target, source = (torch.randn(n, heads * width, device=device).to(dtype) for n in (N, S))
    terms = target.double()[torch.repeat_interleave(indptr.diff())] * source.double()[index]
    terms = terms.view(-1, heads, width)
    out = sddmm(indptr, index, target, source, heads=heads)
    assert out.dtype == torch.float32
    assert_within(out.view(-1, heads), terms.sum(2), 1.01 * (width + 1) * UNIT * terms.abs().sum(2))
    assert torch.equal(out, sddmm(indptr, index, target, source, heads=heads))


@pytest.mark.parametrize(("op", "heads"), [("dot", 1), ("dot", 3), ("add", 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sddmm_takes_any_strides(device: str, layout: str, op: str, heads: int) -> None:
    rows, scales = _codes(GRAPH, 33, device, heads)
    strided = [v.repeat_interleave(2)[::2] for v in rows[:2]] + [LAYOUTS[layout](v) for v in rows[2:]]
    strided_scales = {name: v.repeat_interleave(2, dim=-1)[..., ::2] for name, v in scales.items()}
    options = {"op": op, "heads": heads}
    assert torch.equal(sddmm(*strided, **options, **strided_scales), sddmm(*rows, **options, **scales))


@pytest.mark.parametrize("far", ["target", "source"])
def test_sddmm_finds_columns_beyond_32_bit_offsets(device: str, far: str) -> None:
    (indptr, index, target, source), scales = _codes(GRAPH, 5, device)
    rows = (far_columns(target), source) if far == "target" else (target, far_columns(source))
    assert torch.equal(sddmm(indptr, index, *rows, **scales), sddmm(indptr, index, target, source, **scales))


@pytest.mark.parametrize(("op", "width"), [*(("dot", width) for width in SIZES), ("add", 33)])
def test_sddmm_uses_nothing_outside_a_view(device: str, op: str, width: int) -> None:
    (indptr, index, *codes), scales = _codes(GRAPH, width, device)
    out = sddmm(indptr, index, *(surrounded(x, 99) for x in codes), op=op, **scales)
    assert torch.equal(out, sddmm(indptr, index, *codes, op=op, **scales))
    floats = [x.float() for x in codes]
    for heads in (1, width):
        out = sddmm(indptr, index, *(surrounded(x, float("nan")) for x in floats), op=op, heads=heads)
        assert torch.equal(out, sddmm(indptr, index, *floats, op=op, heads=heads))


def test_sddmm_leaves_its_inputs_alone(device: str) -> None:
    rows, scales = _codes(GRAPH, 33, device)
    inputs = [*rows, *scales.values()]
    before = [x.clone() for x in inputs]
    sddmm(*rows, **scales)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@quiet
@pytest.mark.parametrize(("op", "heads"), [("dot", 1), ("dot", 3), ("add", 1)])
def test_poison_reaches_the_edges_of_its_rows_and_no_other(device: str, op: str, heads: int) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    (indptr, index, _, _), _ = _codes((edge_index, num_nodes, num_nodes), 1, device)
    x = torch.randn(num_nodes, 33, device=device)
    expected = sddmm(indptr, index, x, x, op=op, heads=heads)
    poisoned = x.clone()
    poisoned[0, 22:] = float("nan")  # of the row that masked lanes point at, the last head
    row = torch.repeat_interleave(indptr.diff().long())
    reached = ((row == 0) | (index == 0)).view(-1, *[1] * (expected.dim() - 1)).expand_as(expected).clone()
    if expected.dim() == 2:
        reached[:, : expected.shape[1] * 2 // 3] = False
    out = sddmm(indptr, index, poisoned, poisoned, op=op, heads=heads)
    assert torch.equal(out.isnan(), reached)
    assert torch.equal(out[~reached], expected[~reached])


def test_sddmm_of_rows_without_columns_is_zero(device: str) -> None:
    (indptr, index, *_), _ = _codes(GRAPH, 1, device)
    rows = [torch.zeros((n, 0), dtype=torch.int8, device=device) for n in (GRAPH[2], GRAPH[1])]
    assert torch.equal(sddmm(indptr, index, *rows), torch.zeros(index.numel(), device=device))
    assert torch.equal(sddmm(indptr, index, *rows, heads=2), torch.zeros((index.numel(), 2), device=device))
    assert sddmm(indptr, index, *rows, op="add").shape == (index.numel(), 0)


@pytest.mark.parametrize("codes", ["target", "source"])
def test_sddmm_refuses_codes_with_floats(device: str, codes: str) -> None:
    (indptr, index, target, source), _ = _codes(GRAPH, 7, device)
    rows = (target, source.float()) if codes == "target" else (target.float(), source)
    names = r"torch\.int8 and torch\.float32" if codes == "target" else r"torch\.float32 and torch\.int8"
    with pytest.raises(TypeError, match=rf"both operands in int8 or both in a floating-point type \(got {names}\)"):
        sddmm(indptr, index, *rows)


def test_sddmm_refuses_sums_that_int32_cannot_hold(device: str) -> None:
    row = torch.zeros((1, 1), dtype=torch.int8, device=device).expand(1, tuning.MAX_INT32_TERMS + 1)
    indptr, index = torch.tensor([0, 1], device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="'sddmm' expects at most 131071 columns of codes"):
        sddmm(indptr, index, row, row)
