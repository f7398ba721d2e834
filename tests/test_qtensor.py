"""QTensor: what codes and scales stand for, its bytes, its description."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import soak_files
from qgnn import QConfig, QTensor, functional
from qgnn.formats import MSFP, MXFP4, FixedPoint, Format, Int
from soak_draw import Draw

CODES = torch.tensor([[1, -2, 3, 0, 5], [-127, 127, 0, 1, -1]], dtype=torch.int8)


def test_dequantize_with_a_scale_a_row() -> None:
    q = QTensor(CODES, torch.tensor([[2.0], [0.5]]))
    assert torch.equal(q.dequantize(), torch.tensor([[2.0, -4, 6, 0, 10], [-63.5, 63.5, 0, 0.5, -0.5]]))


def test_dequantize_with_a_scale_a_tensor() -> None:
    q = QTensor(CODES, torch.tensor([[0.25]]))
    assert torch.equal(q.dequantize(), CODES * 0.25)


def test_dequantize_with_a_scale_a_block() -> None:
    """Blocks of two columns; the last one is cut."""
    q = QTensor(CODES, torch.tensor([[1.0, 2, 4], [0.5, 1, 0]]), block_size=2)
    assert torch.equal(q.dequantize(), CODES * torch.tensor([[1.0, 1, 2, 2, 4], [0.5, 0.5, 1, 1, 0]]))


def test_dequantize_with_a_zero_point() -> None:
    codes = torch.tensor([[0, 255], [3, 4]], dtype=torch.uint8)
    q = QTensor(codes, torch.tensor([[0.5], [2.0]]), zero=torch.tensor([[-1.0], [10.0]]))
    assert torch.equal(q.dequantize(), torch.tensor([[-1.0, 126.5], [16, 18]]))


def test_dequantize_along_another_dimension() -> None:
    q = QTensor(CODES, torch.arange(5.0)[None])
    assert torch.equal(q.dequantize(), CODES * torch.arange(5.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dequantize_returns_the_quantized_type(dtype: torch.dtype) -> None:
    value = QTensor(CODES, torch.tensor([[0.1], [0.3]]), dtype=dtype).dequantize()
    assert torch.equal(value, (CODES * torch.tensor([[0.1], [0.3]])).to(dtype))


@pytest.mark.parametrize("dim", [-1, -2, 0])
@pytest.mark.parametrize("fmt", [Int(4, symmetric=False), FixedPoint(12), MSFP(3), MXFP4()], ids=str)
def test_large_tensors_are_decoded_by_parts(fmt: Format, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same values; those whose codes lie along the first dimension as a whole."""
    q = fmt.encode(torch.randn(5, 9, 40).bfloat16(), dim)
    whole, sizes, decoded = q.dequantize(), [], QTensor._decoded
    monkeypatch.setattr("qgnn.qtensor.CHUNK", 2 * 9 * 40)
    monkeypatch.setattr(QTensor, "_decoded", lambda q: sizes.append(len(q.codes)) or decoded(q))
    assert torch.equal(q.dequantize(), whole)
    assert sizes == ([5] if dim == 0 else [2, 2, 1])


def test_dequantize_shows_a_poisoned_row() -> None:
    value = QTensor(CODES, torch.tensor([[float("nan")], [1.0]])).dequantize()
    assert value[0].isnan().all()
    assert torch.equal(value[1], CODES[1].float())


def test_dequantize_leaves_the_record_alone() -> None:
    q = QTensor(CODES.clone(), torch.ones(2, 1), zero=torch.ones(2, 1))
    q.dequantize().zero_()
    assert torch.equal(q.codes, CODES)
    assert torch.equal(q.zero, torch.ones(2, 1))


def test_shape_and_nbytes() -> None:
    q = QTensor(CODES, torch.ones(2, 1))
    assert q.shape == (2, 5)
    assert q.nbytes == 10 + 2 * 4
    assert QTensor(CODES, torch.ones(2, 1), zero=torch.zeros(2, 1)).nbytes == 10 + 2 * 4 + 2 * 4
    assert QTensor(CODES, torch.ones(2, 3), block_size=2).nbytes == 10 + 6 * 4
    assert QTensor(CODES[:0], torch.ones(0, 1)).nbytes == 0


def test_an_encoded_matrix_needs_a_quarter_of_its_bytes() -> None:
    x = torch.randn(100, 256)
    assert Int(8).encode(x).nbytes == 100 * 256 + 100 * 4
    assert Int(8, symmetric=False).encode(x).nbytes == 100 * 256 + 100 * 8


def test_repr_tells_sizes_and_no_values() -> None:
    assert repr(QTensor(CODES, torch.ones(2, 1), dtype=torch.float16)) == (
        "QTensor(torch.int8 (2, 5), scale (2, 1), 18 bytes for 10 values of torch.float16)"
    )


def test_qtensor_is_frozen_and_no_tensor() -> None:
    q = QTensor(CODES, torch.ones(2, 1))
    assert not isinstance(q, torch.Tensor)
    with pytest.raises(FrozenInstanceError):
        q.scale = torch.zeros(2, 1)


def test_qtensor_survives_copies() -> None:
    q = Int(4, symmetric=False).encode(torch.randn(3, 7))
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert torch.equal(other.dequantize(), q.dequantize())
        assert other.codes.data_ptr() != q.codes.data_ptr()


@pytest.mark.parametrize("fmt", [Int(4), MSFP(3)], ids=str)
def test_part_holds_the_rows_of_the_whole(fmt: Format) -> None:
    x = torch.randn(11, 40)
    q = fmt.encode(x)
    for rows in (slice(2, 5), slice(0, 100), slice(-2, None), slice(7, 3)):
        assert torch.equal(q.part(rows).dequantize(), q.dequantize()[rows])
        assert q.part(rows).shape == q.dequantize()[rows].shape
    with pytest.raises(ValueError, match="'part' expects consecutive rows of codes along the columns"):
        q.part(slice(0, 6, 2))
    with pytest.raises(ValueError, match="along the columns"):
        fmt.encode(x, 0).part(slice(0, 2))


# ---- rows, and other places ----


@pytest.mark.parametrize("fmt", [Int(8), Int(4, symmetric=False), FixedPoint(12), MSFP(3), MXFP4()], ids=str)
def test_rows_in_any_order(fmt: Format) -> None:
    x, index = torch.randn(6, 40), torch.tensor([4, 0, 4, 5])
    q = fmt.encode(x)
    rows = q.index_select(0, index)
    assert torch.equal(rows.dequantize(), q.dequantize()[index])
    assert rows.shape == (4, 40)
    assert q.index_select(0, index[:0]).shape == (0, 40)


def test_rows_of_codes_with_one_scale() -> None:
    q = QTensor(CODES, torch.tensor([[0.25]]), origin=torch.arange(10.0).view(2, 5).requires_grad_())
    rows = q.index_select(0, torch.tensor([1, 1]))
    assert torch.equal(rows.dequantize(), CODES[[1, 1]] * 0.25)
    assert rows.origin is not None
    rows.origin.sum().backward()
    assert torch.equal(q.origin.grad, torch.tensor([[0.0], [2.0]]).expand(2, 5))


def test_rows_that_codes_lie_along_are_not_taken() -> None:
    with pytest.raises(ValueError, match=r"rows \(dim=0\) of codes along the columns \(got dim=0, QTensor"):
        MSFP(3).encode(torch.randn(20, 4), 0).index_select(0, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"got dim=1"):
        Int(8).encode(torch.randn(20, 4)).index_select(1, torch.tensor([1]))
    with pytest.raises(IndexError):
        Int(8).encode(torch.randn(20, 4)).index_select(0, torch.tensor([20]))


def test_to_moves_all_of_it() -> None:
    q = QTensor(
        CODES, torch.ones(2, 1), torch.zeros(2, 1), origin=torch.ones(2, 5), columns=Int(8).encode(torch.ones(5, 2))
    )
    moved = q.to("meta")
    assert {t.device.type for t in (*moved.tensors, moved.origin, *moved.columns.tensors) if t is not None} == {"meta"}
    assert (moved.shape, moved.dtype) == (q.shape, q.dtype)
    assert (q.dim(), q.numel(), q.cpu().device.type) == (2, 10, "cpu")
    with pytest.raises(TypeError, match=r"expects a device \(got torch.float16\)"):
        q.to(torch.float16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_other_memory() -> None:
    assert Int(8).encode(torch.randn(5, 4)).cuda().cpu().device.type == "cpu"
    q = Int(8).encode(torch.randn(5, 4)).pin_memory()
    assert q.storage.is_pinned()
    assert q.scales.is_pinned()


X = torch.randn(6, 33, generator=torch.Generator().manual_seed(0))
# The format of a record, and what is put in place of a field: another size, type, block or device, or no tensor at all.
MISFITS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (QConfig(), {"storage": None}, TypeError, r"got NoneType as its 'storage'\)"),
    (QConfig(), {"scales": 3}, TypeError, r"got int as its 'scales'\)"),
    (QConfig(), {"zero": 0.5}, TypeError, r"got float as its 'zero'\)"),
    (QConfig(), {"block_size": True}, TypeError, r"got bool as its 'block_size'\)"),
    (QConfig(), {"dtype": "float32"}, TypeError, r"got str as its 'dtype'\)"),
    (QConfig(), {"dtype": torch.int64}, TypeError, r"got values of torch.int64\)"),
    (QConfig(), {"scales": torch.ones(6, 1).long()}, TypeError, "got storage in torch.int8, scales in torch.int64"),
    (QConfig(), {"storage": torch.zeros(6, 33, dtype=torch.complex64)}, TypeError, "got storage in torch.complex64"),
    (
        QConfig(),
        {"scales": torch.ones(5, 1)},
        ValueError,
        r"got storage \[6, 33\], scales \[5, 1\] and zero points None",
    ),
    (QConfig(), {"scales": torch.ones(6)}, ValueError, r"scales \[6\] and zero points None for values \[6, 33\]"),
    (QConfig(), {"zero": torch.ones(6, 2)}, ValueError, r"zero points \[6, 2\]"),
    (QConfig(), {"scales": torch.ones(6, 1, device="meta")}, ValueError, "got tensors on cpu and meta"),
    (QConfig(), {"block_size": 16}, ValueError, r"scales \[6, 1\] .* in blocks of 16"),
    (QConfig(), {"block_size": 0}, ValueError, "blocks of 0"),
    (Int(4), {"storage": torch.zeros(6, 16, dtype=torch.uint8)}, ValueError, r"got storage \[6, 16\]"),
    (Int(4), {"storage": torch.zeros(6, 17, dtype=torch.int8)}, TypeError, "got storage in torch.int8"),
    (MSFP(3), {"block_size": 8}, ValueError, "in blocks of 8"),
    (MSFP(3), {"block_size": 10**30}, ValueError, "blocks of 1000"),
    (MXFP4(), {"scales": torch.ones(6, 1).to(torch.float8_e8m0fnu)}, ValueError, r"scales \[6, 1\]"),
]


@pytest.mark.parametrize(("fmt", "fields", "error", "message"), MISFITS)
def test_fields_that_do_not_fit_together_are_refused(
    fmt: Any, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    q = replace(functional.quantize(X, fmt), **fields)
    weight, edges = torch.randn(4, 33), torch.tensor([[0, 1], [2, 3]])
    for use, owner, name in (
        (lambda: q.dequantize(), "dequantize", "q"),
        (lambda: functional.linear(q, weight), "linear", "x"),
        (lambda: functional.spmm(edges, q, config=QConfig()), "spmm", "x"),
        (lambda: functional.graph_linear(edges, q, weight), "graph_linear", "x"),
        (lambda: functional.sddmm(edges, q, q), "sddmm", "x_source"),
    ):
        with pytest.raises(error, match=f"'{owner}' expects '{name}' as 'quantize' or a format makes it.*{message}"):
            use()


@settings(max_examples=60)
@given(st.integers(0, 2**63))
def test_any_field_that_is_another_one_is_refused_or_taken(seed: int) -> None:
    """Compressed tensors too."""
    soak_files.storage(Draw(seed))
