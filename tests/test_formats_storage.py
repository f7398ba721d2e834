"""Storage of every number format: bytes, dimensions, types, empty tensors; names, widths, densities, bad fields."""

import copy
import io
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from qgnn import QTensor
from qgnn.formats import MSFP, MXFP4, MXFP6, MXFP8, MXINT8, FixedPoint, Float8, Format, Int, parse
from qgnn.formats.names import NAMES

FORMATS: dict[str, Format] = {
    "int8": Int(8),
    "int4": Int(4),
    "int3-affine": Int(3, symmetric=False),
    "fixed8": FixedPoint(),
    "fixed5": FixedPoint(5),
    "fixed16": FixedPoint(16),
    "fixed8-affine": FixedPoint(8, affine=True),
    "fixed11-affine": FixedPoint(11, affine=True),
    "msfp12": MSFP(3),
    "msfp16": MSFP(7),
    "msfp12-g32": MSFP(3, 32),
    "mxint8": MXINT8(),
    "mxfp8-e4m3": MXFP8(),
    "mxfp8-e5m2": MXFP8("e5m2"),
    "mxfp6-e2m3": MXFP6(),
    "mxfp6-e3m2": MXFP6("e3m2"),
    "mxfp4": MXFP4(),
    "fp8-e4m3": Float8(),
    "fp8-e5m2": Float8("e5m2"),
}
SLICES = ("int", "fixed", "fp8")  # with a scale a slice, which bits_per_value leaves out
ALL = pytest.mark.parametrize("name", FORMATS)


def same(a: QTensor, b: QTensor) -> bool:
    """Whether all that is stored is the same."""
    pairs = [(a.storage, b.storage), (a.scales, b.scales), *([] if a.zero is None else [(a.zero, b.zero)])]
    return all(torch.equal(s.contiguous().view(torch.uint8), t.contiguous().view(torch.uint8)) for s, t in pairs)


@ALL
def test_stored_bytes_are_the_bits_per_value(name: str) -> None:
    """Exactly, for whole blocks; a scale and a zero point of 4 bytes each a slice come on top."""
    fmt, x = FORMATS[name], torch.randn(24, 64)
    for dim in (0, 1):
        q = fmt.encode(x, dim)
        metadata = x.shape[1 - dim] * 4 * (1 + name.endswith("affine")) if name.startswith(SLICES) else 0
        if x.shape[dim] % (q.block_size or 8) == 0:
            assert q.nbytes == fmt.bits_per_value * x.numel() / 8 + metadata
        assert q.nbytes == sum(t.contiguous().nbytes for t in (q.storage, q.scales, q.zero) if t is not None)
        assert q.shape == x.shape
    if name.startswith(SLICES[:2]):
        assert fmt.encode(x, None).nbytes == fmt.bits_per_value * x.numel() / 8 + 4 * (1 + name.endswith("affine"))


@ALL
def test_storage_of_cut_blocks_and_bytes(name: str) -> None:
    """Each slice fills whole bytes; a cut block has a scale of its own."""
    fmt = FORMATS[name]
    q = fmt.encode(torch.randn(3, 37))
    assert q.storage.shape == (3, 37 if fmt.bits == 8 else -(-37 * fmt.bits // 8))
    assert q.scales.shape == (3, 1 if q.block_size is None else -(-37 // q.block_size))
    assert q.scales.dtype == (torch.float32 if q.block_size is None else torch.float8_e8m0fnu)


@ALL
def test_types_of_codes(name: str) -> None:
    """What is stored as it is comes without a copy."""
    fmt, q = FORMATS[name], FORMATS[name].encode(torch.randn(5, 40))
    if "fp" in name.replace("msfp", ""):
        expected = torch.float32
    elif name.endswith("affine"):
        expected = torch.uint8 if fmt.bits <= 8 else torch.int32
    else:
        expected = torch.int8 if fmt.bits <= 8 else torch.int16
    assert q.codes.dtype == expected
    assert q.codes.shape == (5, 40)
    assert (q.codes is q.storage) == (fmt.bits == 8 and expected != torch.float32)
    assert q.scale.dtype == torch.float32
    assert (q.scale is q.scales) == (q.block_size is None)
    assert fmt.bits == 8 or q.storage.dtype == torch.uint8
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    assert q.storage.dtype == kinds.get(name[-4:] if "fp8" in name else "", q.storage.dtype)


@ALL
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
def test_any_dimension_of_any_view(name: str, seed: int | None) -> None:
    """As of the contiguous tensor with that dimension last, and part by part where another is the first one."""
    fmt, base = FORMATS[name], torch.randn(5, 33, 4)
    for dim in (0, 1, 2, -3):
        q = fmt.encode(base, dim, seed)
        moved = fmt.encode(base.movedim(dim, -1).contiguous(), -1, seed)
        assert torch.equal(q.dequantize().movedim(dim, -1), moved.dequantize())
        assert torch.equal(q.codes.movedim(dim, -1), moved.codes)
        assert torch.equal(fmt.quantize(base, dim, seed), q.dequantize())
        parts = q.unbind()
        assert len(parts) == 5
        for part, value in zip(parts, q.dequantize(), strict=True):
            assert part.shape == (33, 4)
            assert torch.equal(part.dequantize(), value)
    view = base[::2, 1:30:3].transpose(0, 2)
    assert same(fmt.encode(view, seed=seed), fmt.encode(view.contiguous(), seed=seed))
    vector = base[:, 0, 0]
    assert torch.equal(fmt.encode(vector, 0).dequantize(), fmt.encode(vector[None]).dequantize()[0])


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(name: str, dtype: torch.dtype) -> None:
    """The codes of the same values in fp32, decoded to the type that was encoded; the largest fp16 number does not
    overflow."""
    fmt, x = FORMATS[name], torch.randn(4, 40).to(dtype)
    x[0, 3] = 65504.0
    q = fmt.encode(x)
    assert same(q, fmt.encode(x.float()))
    assert q.dequantize().dtype == dtype
    assert q.dequantize().isfinite().all()
    assert torch.equal(fmt.quantize(x), q.dequantize())


@ALL
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_empty_tensors(name: str, shape: tuple[int, ...], seed: int | None) -> None:
    fmt, x = FORMATS[name], torch.ones(shape)
    for dim in range(len(shape)):
        q = fmt.encode(x, dim, seed)
        assert q.shape == q.codes.shape == q.dequantize().shape == fmt.quantize(x, dim, seed).shape == shape
        assert q.storage.dtype == fmt.encode(torch.ones(1)).storage.dtype
        assert q.scales.shape[dim] == (1 if q.block_size is None else -(-shape[dim] // q.block_size))


@ALL
def test_large_tensors_are_encoded_by_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as at once, random bits included."""
    fmt, x = FORMATS[name], torch.randn(50, 33)
    whole = fmt.encode(x, seed=3)
    monkeypatch.setattr("qgnn.reference._common.CHUNK_ELEMENTS", 7 * 33)
    assert same(fmt.encode(x, seed=3), whole)


@ALL
def test_records_survive_copies(name: str) -> None:
    q = FORMATS[name].encode(torch.randn(3, 40))
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), torch.load(file, weights_only=False)):
        assert same(other, q)
        assert other.storage.dtype == q.storage.dtype
        assert (other.layout, other.name, other.dtype) == (q.layout, name, torch.float32)
        assert torch.equal(other.dequantize(), q.dequantize())


@ALL
def test_encoding_leaves_its_input_alone(name: str) -> None:
    x = torch.randn(4, 40, requires_grad=True)
    before = x.detach().clone()
    FORMATS[name].encode(x, seed=1)
    FORMATS[name].quantize(x)
    assert torch.equal(x, before)
    assert x._version == 0


def test_repr_tells_the_width() -> None:
    assert repr(MSFP(3).encode(torch.ones(2, 32))) == (
        "QTensor(4-bit codes (2, 32), scale (2, 2), 36 bytes for 64 values of torch.float32)"
    )
    assert repr(MXFP6().encode(torch.ones(1, 32))).startswith("QTensor(6-bit float (1, 32), scale (1, 1), 25 bytes")


# --- names, widths, densities


@ALL
def test_names_and_formats(name: str) -> None:
    fmt = FORMATS[name]
    assert str(fmt) == name
    assert parse(name) == parse(name.upper()) == fmt
    assert hash(parse(name)) == hash(fmt)
    with pytest.raises(FrozenInstanceError):
        fmt.kind = "e4m3"  # type: ignore[attr-defined]


def test_names_among_which_the_closest_is_looked_for_exist() -> None:
    assert [str(parse(name)) for name in NAMES] == list(NAMES)
    assert {name for name in FORMATS if "-g" not in name} <= set(NAMES)
    assert {f"msfp{9 + m}" for m in range(1, 8)} <= set(NAMES), "each width that MSFP takes"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, r"expects the name .*: int2 to .*, fp8-e4m3 or fp8-e5m2$") for name in ("", "q", "real")),
        (" int8", r"did you mean 'int8'\?"),
        ("in8", r"'parse' expects the name of a format \(got 'in8'\): .*; did you mean 'int8'\?"),
        ("MSPF12", r"\(got 'MSPF12'\): .*; did you mean 'msfp12'\?"),
        ("fixd16-affine", r"did you mean 'fixed16-affine'\?"),
        *(
            (name, rf"'parse' expects int2 to int8 \(also with -affine\) \(got '{name}'\)$")
            for name in ("int", "int8 ", "int9", "int16", "INT16", "int8-affin", "int2-g64", "int" + "2" * 5000)
        ),
        *((name, r"expects fixed2 to fixed16 \(also with -affine\)") for name in ("fixed", "fixed17", "fixed1-affine")),
        *(
            (name, r"expects msfp10 to msfp16 \(also with -g and the length of a block, a power of two from 2 to 128\)")
            for name in ("msfp", "msfp9", "msfp17", "msfp12-g24", "msfp12-g1", "msfp12-g256")
        ),
        *((name, r"expects mxfp8-e4m3 or mxfp8-e5m2 \(got ") for name in ("mxfp8", "mxfp8-e3m4")),
        ("mxfp6-e4m3", r"expects mxfp6-e2m3 or mxfp6-e3m2"),
        ("mxfp4-e2m1", r"expects mxfp4 \(got 'mxfp4-e2m1'\)"),
        ("fp8-e3m4", r"expects fp8-e4m3 or fp8-e5m2"),
    ],
)
def test_parse_rejects(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(name)


def test_parse_rejects_what_is_no_name() -> None:
    with pytest.raises(TypeError, match=r"'parse' expects the name of a format \(got Int\)"):
        parse(Int(8))  # type: ignore[arg-type]


def test_densities_are_the_published_ones() -> None:
    """MSFP16 to MSFP11 of Rouhani et al., to two digits behind the point and as they stand there."""
    formats = [MSFP(m) for m in range(7, 1, -1)]
    assert [round(fmt.memory_density, 2) for fmt in formats] == [3.76, 4.27, 4.92, 5.82, 7.11, 9.14]
    assert [fmt.arithmetic_density for fmt in formats] == [8.8, 10.8, 13.9, 18.3, 31.9, 50.9]
    assert (Int(8).arithmetic_density, Int(4).arithmetic_density) == (7.7, 20.9)
    assert FixedPoint(8).arithmetic_density == 7.7
    assert Int(8).memory_density == FixedPoint(8).memory_density == Float8().memory_density == 4
    unpublished = (Int(5), Int(8, False), FixedPoint(4), MSFP(3, 32), MSFP(1), MXINT8(), MXFP8(), MXFP4(), Float8())
    assert {fmt.arithmetic_density for fmt in unpublished} == {None}
    assert MXFP8().memory_density == 32 / 8.25


def test_other_widths() -> None:
    assert Int(8, False).with_bits(3) == Int(3, False)
    assert FixedPoint(8, True).with_bits(16) == FixedPoint(16, True)
    assert MSFP(7, 32).with_bits(4) == MSFP(3, 32)
    for fmt in (MXINT8(), MXFP8("e5m2"), MXFP6(), MXFP4(), Float8()):
        assert fmt.with_bits(fmt.bits) == fmt
        with pytest.raises(
            ValueError, match=rf"'{fmt}' has codes of {fmt.bits} bits only \(got 5\); .* Int, FixedPoint"
        ):
            fmt.with_bits(5)
    with pytest.raises(ValueError, match=r"'MSFP.with_bits' expects 'bits' from 2 to 8 \(got 1\)"):
        MSFP(3).with_bits(1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FixedPoint(1), ValueError, r"'FixedPoint' expects 'bits' from 2 to 16 \(got 1\)"),
        (lambda: FixedPoint(8.0), TypeError, r"'FixedPoint' expects 'bits' to be an int \(got float\)"),
        (lambda: FixedPoint(8, 1), TypeError, r"'affine' to be a bool \(got int\)"),
        (lambda: MSFP(0), ValueError, r"'mantissa_bits' from 1 to 7 \(got 0\)"),
        (lambda: MSFP(True), TypeError, r"'mantissa_bits' to be an int \(got bool\)"),
        (lambda: MSFP(3, "16"), TypeError, r"'block_size' to be an int \(got str\)"),
        (lambda: MXFP8("e3m4"), ValueError, r"'MXFP8' expects 'kind' to be one of \('e4m3', 'e5m2'\) \(got 'e3m4'\)"),
        (lambda: MXFP6(6), TypeError, r"'MXFP6' expects 'kind' to be one of \('e2m3', 'e3m2'\) \(got 6\)"),
        (lambda: Float8(None), TypeError, r"'Float8' expects 'kind'"),
    ],
)
def test_formats_reject(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@ALL
def test_encode_and_quantize_reject(name: str) -> None:
    fmt = FORMATS[name]
    owner = type(fmt).__name__
    with pytest.raises(
        TypeError, match=rf"'{owner}.encode' expects a floating-point tensor \(got torch.int64\); convert"
    ):
        fmt.encode(torch.arange(4))
    with pytest.raises(
        ValueError, match=rf"'{owner}\.\w+' expects a tensor with at least one dimension \(got a scalar\)"
    ):
        fmt.quantize(torch.tensor(1.0))
    for call in (fmt.encode, fmt.quantize):
        for dim in (2, -3):
            with pytest.raises(IndexError, match=rf"'{owner}\.\w+' expects 'dim' from -2 to 1 \(got {dim}\)"):
                call(torch.ones(3, 4), dim=dim)
        for wrong in ([1.0], torch.ones(2, dtype=torch.cfloat), torch.ones(2, dtype=torch.bool)):
            with pytest.raises(TypeError, match=rf"'{owner}\.\w+' expects a floating-point tensor \(got "):
                call(wrong)
    if fmt.encode(torch.ones(1)).block_size is not None:
        with pytest.raises(ValueError, match=r"expects the 'dim' that its blocks lie along \(got None\)"):
            fmt.encode(torch.ones(3, 4), None)
