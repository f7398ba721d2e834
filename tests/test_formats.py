"""``formats.Int``: round trips, dimensions, types, empty tensors, bad input; and the fields of ``formats.Blocks``."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from qgnn.formats import Blocks, Int
from statistics_checks import EPS, nearest_bound

BITS = range(2, 9)


@pytest.mark.parametrize("bits", BITS)
def test_int_asymmetric_error_is_at_most_half_a_step(bits: int) -> None:
    """The differences to the smallest value and the decoded sum add roundings relative to the largest magnitude."""
    x = torch.rand(30, 65) * 5 - 1
    q = Int(bits, symmetric=False).encode(x)
    assert q.codes.dtype == torch.uint8
    assert q.codes.max() == 2**bits - 1
    assert q.codes.min() == 0
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    assert torch.equal(q.zero, low)
    step = (high - low).double() / (2**bits - 1)
    error = (q.dequantize().double() - x).abs()
    assert (error <= nearest_bound(bits + 1) * step + 4 * EPS * x.abs().amax(1, keepdim=True)).all()


def test_int_asymmetric_constant_slices_are_exact() -> None:
    x = torch.tensor([[3.5] * 6, [-2.25] * 6, [0.0] * 6])
    assert torch.equal(Int(2, symmetric=False).quantize(x), x)


def test_int_asymmetric_poison_stays_in_its_slice() -> None:
    x = torch.randn(3, 9)
    x[0, 1], x[2, 1] = math.nan, math.inf
    value = Int(8, symmetric=False).quantize(x)
    assert value[[0, 2]].isnan().all()
    assert torch.equal(value[1], Int(8, symmetric=False).quantize(x[1:2])[0])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_int_encodes_along_any_dimension(dim: int, symmetric: bool) -> None:
    x = torch.randn(4, 6, 9)
    fmt = Int(8, symmetric)
    q = fmt.encode(x, dim)
    expected_scale = list(x.shape)
    expected_scale[dim] = 1
    assert list(q.scale.shape) == expected_scale
    moved = fmt.encode(x.movedim(dim, -1).contiguous())
    assert torch.equal(q.codes.movedim(dim, -1), moved.codes)
    assert torch.equal(q.dequantize(), moved.dequantize().movedim(-1, dim))
    assert torch.equal(fmt.quantize(x, dim), fmt.decode(q))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_int_round_trip_is_a_fixed_point(bits: int, symmetric: bool) -> None:
    """Codes of decoded values are the codes: encoding twice loses nothing more."""
    x = torch.randn(20, 50)
    q = Int(bits, symmetric).encode(x)
    again = Int(bits, symmetric).encode(q.dequantize())
    assert torch.equal(again.codes, q.codes)
    torch.testing.assert_close(again.scale, q.scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_decodes_to_the_encoded_type(dtype: torch.dtype, symmetric: bool) -> None:
    q = Int(4, symmetric).encode(torch.randn(3, 8, dtype=dtype))
    assert q.scale.dtype == torch.float32
    assert q.dequantize().dtype == dtype


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (0, 1), (1,)], ids=str)
def test_int_empty_tensors(shape: tuple[int, ...], seed: int | None, symmetric: bool) -> None:
    q = Int(8, symmetric).encode(torch.ones(shape), seed=seed)
    assert q.codes.shape == shape
    assert q.scale.shape == (*shape[:-1], 1)
    assert q.dequantize().shape == shape


def test_int_takes_no_gradient_and_leaves_its_input_alone() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    before = x.detach().clone()
    q = Int(8, symmetric=False).encode(x, seed=1)
    assert not q.dequantize().requires_grad
    assert torch.equal(x, before)
    assert x._version == 0


@pytest.mark.parametrize("bits", BITS)
def test_int_bits_per_value(bits: int) -> None:
    assert Int(bits).bits_per_value == bits
    assert isinstance(Int(bits, False).bits_per_value, float)


def test_int_is_a_frozen_value() -> None:
    assert Int(4) == Int(bits=4, symmetric=True)
    assert len({Int(4), Int(4), Int(4, False), Int(8)}) == 3
    assert Int() == Int(8, True)
    assert repr(Int(4)) == "Int(bits=4, symmetric=True)"
    with pytest.raises(AttributeError):
        Int().bits = 4


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((1,), ValueError, r"'Int' expects 'bits' from 2 to 8 \(got 1\)"),
        ((9,), ValueError, r"'Int' expects 'bits' from 2 to 8 \(got 9\); wider codes do not fit"),
        ((-8,), ValueError, r"\(got -8\)"),
        ((8.0,), TypeError, r"'Int' expects 'bits' to be an int \(got float\)"),
        ((True,), TypeError, r"\(got bool\)"),
        (("8",), TypeError, r"\(got str\)"),
        ((8, 1), TypeError, r"'Int' expects 'symmetric' to be a bool \(got int\)"),
        ((8, "affine"), TypeError, r"'symmetric' to be a bool \(got str\)"),
        ((8, None), TypeError, r"\(got NoneType\)"),
    ],
)
def test_int_rejects(fields: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Int(*fields)


def test_int_encode_rejects() -> None:
    with pytest.raises(
        TypeError, match=r"'Int.encode' expects a floating-point tensor \(got torch.int64\); convert it"
    ):
        Int().encode(torch.arange(4))
    with pytest.raises(ValueError, match=r"at least one dimension \(got a scalar\)"):
        Int().encode(torch.tensor(1.0))
    with pytest.raises(IndexError, match=r"'Int.encode' expects 'dim' from -2 to 1 \(got 2\)"):
        Int().encode(torch.ones(3, 4), dim=2)


@pytest.mark.parametrize("bits", [2, 8])
def test_int_flushes_what_has_no_inverse(bits: int) -> None:
    """At 1e-30, which fp32 rounds up: the number below it becomes zero, the one above it a code."""
    flush = torch.tensor(1e-30)
    below, above = torch.nextafter(flush, -flush), torch.nextafter(flush, torch.tensor(1.0))
    x = torch.stack([-below, -above])[:, None]
    assert Int(bits).encode(x).codes.flatten().tolist() == [0, -(2 ** (bits - 1) - 1)]
    pairs = torch.stack([torch.zeros(2), torch.stack([below, above])], 1)
    assert Int(bits, symmetric=False).encode(pairs).codes.tolist() == [[0, 0], [0, 2**bits - 1]]


# --- Blocks


def test_blocks_is_a_frozen_value() -> None:
    assert Blocks() == Blocks(bits=2, block_size=None, projection=None, bins="uniform", metadata_dtype=torch.bfloat16)
    assert len({Blocks(), Blocks(2), Blocks(4), Blocks(2, 16), Blocks(2, 16, 8), Blocks(2, bins="optimal")}) == 5
    with pytest.raises(AttributeError):
        Blocks().bits = 4


@pytest.mark.parametrize(
    ("blocks", "name", "bits_per_value"),
    [
        (Blocks(8), "int8", 8.0),
        (Blocks(1, 8), "int1-g8", 1 + 32 / 8),
        (Blocks(2, 1024, metadata_dtype=torch.float32), "int2-g1024", 2 + 64 / 1024),
        (Blocks(2, 16, 8), "int2-rp8-g16", (2 + 32 / 16) / 8),
        (Blocks(4, projection=4, bins="optimal"), "int4-rp4-vm", 4 / 4),
        (Blocks(2, 65536, bins="optimal", metadata_dtype=torch.float16), "int2-vm-g65536", 2 + 32 / 65536),
    ],
    ids=str,
)
def test_blocks_names_and_bits(blocks: Blocks, name: str, bits_per_value: float) -> None:
    assert str(blocks) == name
    assert blocks.bits_per_value == bits_per_value
    for spelled in (name, name.upper()):
        assert replace(Blocks.parse(spelled), metadata_dtype=blocks.metadata_dtype) == blocks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, r"expects a name such as 'int2', .* \(got ")
            for name in ("", "int", "2", "int2 ", "int2-", "int2_rp8")
        ),
        *((name, r"expects a name such as 'int2', .* \(got ") for name in ("int2-vm-rp8", "int2-g64-g64", "int2-rp-8")),
        ("int" + "2" * 5000, r"expects a name such as"),  # more digits than Python converts
        ("int3", r"'bits' to be one of \(1, 2, 4, 8\) \(got 3\)"),
        ("int2-rp1", r"'projection' to be a ratio of at least 2"),
        ("int2-g6", r"'block_size' to be a multiple of 4"),
        ("int8-vm", r"bins='uniform' for 8-bit codes"),
    ],
)
def test_blocks_rejects_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"'Blocks' .*{message}"):
        Blocks.parse(name)


@pytest.mark.parametrize(
    ("projection", "num_columns", "columns"),
    [(None, 128, 0), (8, 128, 16), (8, 100, 12), (8, 3, 1), (8, 1, 0), (8, 0, 0), (2, 3, 2), (2, 1_000_000, 65535)],
)
def test_blocks_columns_of_a_projection(projection: int | None, num_columns: int, columns: int) -> None:
    assert Blocks(projection=projection).columns(num_columns) == columns


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"bits": 3}, ValueError, r"'Blocks' expects 'bits' to be one of \(1, 2, 4, 8\) \(got 3\)"),
        ({"bits": True}, TypeError, r"'Blocks' expects 'bits' to be an int \(got True\)"),
        ({"bits": None}, TypeError, r"'bits' to be an int \(got None\)"),
        ({"bits": 2.0}, TypeError, r"'bits' to be an int \(got 2.0\)"),
        ({"block_size": "16"}, TypeError, r"'block_size' to be an int \(got '16'\)"),
        ({"block_size": 0}, ValueError, r"'block_size' to be a multiple of 4 up to 65536, for whole bytes of 2-bit"),
        ({"block_size": 6}, ValueError, r"\(got 6\)"),
        ({"bits": 8, "block_size": 65537}, ValueError, r"a multiple of 1 up to 65536.*\(got 65537\)"),
        ({"projection": 1}, ValueError, r"'projection' to be a ratio of at least 2, or None \(got 1\)"),
        ({"projection": 8.0}, TypeError, r"'projection' to be an int \(got 8.0\)"),
        ({"bins": "normal"}, ValueError, r"'bins' to be one of \('uniform', 'optimal'\) \(got 'normal'\)"),
        ({"bins": "optimal", "bits": 1}, ValueError, r"bins='uniform' for 1-bit codes \(got 'optimal'\)"),
        ({"bins": "optimal", "bits": 8}, ValueError, r"bins='uniform' for 8-bit codes"),
        ({"metadata_dtype": torch.float64}, TypeError, r"torch.bfloat16 or torch.float16 \(got torch.float64\)"),
    ],
)
def test_blocks_rejects(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Blocks(**fields)
