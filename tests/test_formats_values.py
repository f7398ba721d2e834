"""What values become in each number format: its definition in float64, written down without a grid."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grid_cases import HURTING, hurting_rows
from qgnn.formats import MSFP, FixedPoint, Float8, Format, Int, parse
from statistics_checks import SIGMAS

NAMES = [
    "fixed2",
    "fixed8",
    "fixed16",
    "fixed4-affine",
    "fixed16-affine",
    "msfp10",
    "msfp12",
    "msfp16",
    "msfp12-g4",
    "mxint8",
    "mxfp8-e4m3",
    "mxfp8-e5m2",
    "mxfp6-e2m3",
    "mxfp6-e3m2",
    "mxfp4",
    "fp8-e4m3",
    "fp8-e5m2",
]
ALL = [*NAMES, "int8", "int3", "int4-affine"]


def table(kind: str) -> Tensor:
    """All magnitudes of a floating-point element, ascending, in float64; even codes have even places."""
    if kind in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
        return values[values.isfinite()]
    exponent_bits, mantissa_bits = int(kind[1]), int(kind[3])
    bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    subnormal = [i / ones * 2.0 ** (1 - bias) for i in range(ones)]
    normal = [(1 + i / ones) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for i in range(ones)]
    return torch.tensor(subnormal + normal, dtype=torch.float64)


def nearest(t: Tensor, magnitudes: Tensor) -> Tensor:
    """The element that is nearest to each value; of two as near, the one with the even code."""
    distance = (t.abs()[..., None] - magnitudes).abs()
    best = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(len(magnitudes)) % 2 == 0
    place = (best.double() + (best & even).double()).argmax(-1)
    return magnitudes[place].copysign(t)


def power(exponent: int) -> float:
    return 2.0 ** max(-127, min(127, exponent))


def floor_log2(m: float) -> int:
    return math.frexp(m)[1] - 1 if m else -1000


def ceil_log2(m: float) -> int:
    return floor_log2(m) + (math.ldexp(1.0, floor_log2(m)) != m if m else 0)


def model_block(x: Tensor, name: str) -> Tensor:
    """One block in float64: powers of two are exact there, down to denormals of fp32."""
    fmt, m = parse(name), float(x.abs().amax())
    kind = name.rpartition("-")[2] if "-e" in name else "e2m1"
    if not math.isfinite(m):
        return torch.full_like(x, math.nan)
    if isinstance(fmt, FixedPoint):
        q_max = 2 ** (fmt.bits - 1)
        unit = power(ceil_log2(m)) / q_max
        return (x / unit).round().clamp(-q_max, q_max - 1) * unit
    if isinstance(fmt, MSFP):
        unit = power(ceil_log2(m)) / 2**fmt.mantissa_bits
        return (x / unit).round().clamp(1 - 2**fmt.mantissa_bits, 2**fmt.mantissa_bits - 1) * unit
    if name == "mxint8":
        unit = power(floor_log2(m)) / 64
        return (x / unit).round().clamp(-127, 127) * unit
    magnitudes = table(kind)
    unit = power(floor_log2(m) - floor_log2(float(magnitudes[-1])))
    return nearest(x / unit, magnitudes) * unit


def model_affine(x: Tensor, bits: int) -> Tensor:
    """One slice in fp32, as an affine scale is rounded."""
    low, width = x.amin(), x.amax() - x.amin()
    last = torch.tensor(2.0**bits - 1)
    if not width.isfinite():
        return torch.full_like(x, math.nan)
    codes = ((x - low) * (last / width if width > 1e-30 else 0.0)).round().clamp(0.0, float(last))
    return codes * (width / last) + low


def model_float8(x: Tensor, kind: str) -> Tensor:
    """One slice: scaled in fp32, rounded by torch's own type."""
    dtype, largest = (torch.float8_e4m3fn, 448.0) if kind == "e4m3" else (torch.float8_e5m2, 57344.0)
    m = x.abs().amax()
    if not m.isfinite():
        return torch.full_like(x, math.nan)
    if m <= 1e-30:
        return torch.zeros_like(x)
    units = x * (torch.tensor(largest) / m)
    return units.clamp(-largest, largest).to(dtype).float() * (m * (1 / largest))


def model(x: Tensor, name: str) -> Tensor:
    fmt = parse(name)
    size = {MSFP: getattr(fmt, "block_size", 0), FixedPoint: x.shape[1], Float8: x.shape[1]}.get(type(fmt), 32)

    def block(values: Tensor) -> Tensor:
        if isinstance(fmt, Float8):
            return model_float8(values, fmt.kind)
        if isinstance(fmt, FixedPoint) and fmt.affine:
            return model_affine(values, fmt.bits)
        return model_block(values.double(), name).float()

    return torch.stack([torch.cat([block(part) for part in row.split(size)]) for row in x])


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=400)  # some for each format
@given(st.data(), st.sampled_from(NAMES))
def test_values_are_those_of_the_definition(data: st.DataObject, name: str) -> None:
    """Zeros, denormals, powers of two, the largest numbers, infinities, NaN."""
    width = data.draw(st.integers(1, 36))
    x = torch.tensor([data.draw(st.lists(HURTING, min_size=width, max_size=width))], dtype=torch.float32)
    fmt = parse(name)
    assert_equal(fmt.quantize(x), model(x, name))
    assert_equal(fmt.decode(fmt.encode(x)), model(x, name))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_all_magnitudes_are_those_of_the_definition(name: str) -> None:
    """Every row beside those with an infinity or NaN is finite: nothing else is poisoned, nothing overflows."""
    x, fmt = hurting_rows(65), parse(name)
    y = fmt.quantize(x)
    assert_equal(y, model(x, name))
    poisoned = ~x.isfinite().all(1)
    poisoned[10] |= name.endswith("affine")  # a range of twice the largest number
    assert torch.equal(y.isnan().any(1), poisoned)
    assert y[~poisoned].isfinite().all()


@pytest.mark.parametrize("name", ["msfp12", "mxint8", "mxfp8-e4m3", "mxfp6-e3m2", "mxfp4"])
def test_poison_stays_in_its_block(name: str) -> None:
    x, fmt = torch.randn(2, 96), parse(name)
    clean = fmt.quantize(x)
    x[0, 40] = math.inf
    for y in (fmt.quantize(x), fmt.decode(fmt.encode(x))):
        size = fmt.encode(x).block_size
        block = 40 // size
        assert y[0, block * size : (block + 1) * size].isnan().all()
        assert y.isnan().sum() == size
        assert torch.equal(y[~y.isnan()], clean[~y.isnan()])


@pytest.mark.parametrize("bits", range(2, 9))
def test_msfp_clamps_a_largest_magnitude_that_is_a_power_of_two(bits: int) -> None:
    """Of the code 2**m only 2**m - 1 is left; a little less keeps its exponent, a little more gets the next one."""
    fmt, top = MSFP(bits - 1), 2.0 ** (bits - 1)
    x = torch.tensor([[8.0], [-8.0], [8.0 - 2**-20], [8.0 + 2**-20]])
    y = fmt.quantize(x)
    clamped = 8 * (top - 1) / top
    assert y.flatten().tolist()[:3] == [clamped, -clamped, clamped]
    exponents = fmt.encode(x).scales.view(torch.uint8).flatten().tolist()
    assert exponents == [130, 130, 130, 131]


@pytest.mark.parametrize("bits", [2, 8, 11, 12, 16])
def test_fixed_point_overflows_fp16_where_it_says(bits: int) -> None:
    """All numbers of fp16 from -32768 down: those that become the code of -65536, which fp16 does not have."""
    fmt, step = FixedPoint(bits), 2.0 ** (16 - (bits - 1))
    x = -torch.arange(0x7800, 0x7C00, dtype=torch.int16).view(torch.float16)
    infinite = fmt.quantize(x).isinf()
    assert torch.equal(infinite, x.double() <= -65536 + step / 2)
    assert infinite.any() == (bits <= 11)
    assert fmt.quantize(x.float()).isfinite().all()
    for seed in range(5):
        assert not (fmt.quantize(x, seed=seed).isinf() & (x.double() >= -65536 + step)).any()


@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", ALL)
def test_decoded_codes_are_the_quantized_values(name: str, seed: int | None) -> None:
    """Along either dimension, and with one scale for all where a format has scales of slices; to the sign of a zero,
    which integers do not have."""
    x, fmt = torch.randn(37, 50) * torch.logspace(-3, 3, 37)[:, None], parse(name)
    for dim in (0, 1, -1, *([None] if fmt.encode(x).block_size is None else [])):
        q = fmt.encode(x, dim, seed)
        assert torch.equal(fmt.quantize(x, dim, seed), q.dequantize())
        per_value = q._per_value(q.scale)
        value = q.codes * per_value if q.zero is None else q.codes * per_value + q.zero
        assert torch.equal(value, q.dequantize())


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith(("mx", "int", "fp8")) or n.endswith("affine")])
def test_values_of_a_format_stay(name: str) -> None:
    """Scales that are not powers of two are rounded once more. Not so where exponents are rounded up: a largest value
    that became a power of two is clamped."""
    y = parse(name).quantize(torch.randn(20, 64))
    exact = name.startswith("mx")
    torch.testing.assert_close(parse(name).quantize(y), y, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


# --- stochastic rounding


@pytest.mark.parametrize("name", ALL)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """Rows of the same values, between two largest ones that are values of the format themselves and fix the scale.

    A draw lies within a step of the value, the mean of D of them within SIGMAS / (2 sqrt(D)) steps; random bits have 16
    digits, which moves the mean by at most 2**-16 of a step, and the scale of integers by 2**-15."""
    fmt, draws = parse(name), 4000
    ends = torch.tensor([0.75, -0.75] if name != "mxint8" else [63 / 64, -63 / 64])
    row = torch.cat([ends, (torch.rand(14) - 0.5) * 0.7])
    y = fmt.quantize(row.expand(draws, -1), seed=1)[:, 2:]
    values = row[2:]
    step = y.amax(0) - y.amin(0)
    assert (step > 0).sum() >= (1 if name.endswith(("16", "16-affine")) else 10)
    assert ((y - values).abs() <= step + 1e-6).all()
    bound = (SIGMAS / (2 * math.sqrt(draws)) + 2.0**-15) * step + 1e-6
    assert ((y.double().mean(0) - values).abs() <= bound).all()
    assert (fmt.quantize(row[None])[:, 2:] - values).abs().max() > 0  # of nearest values it would be far off


@pytest.mark.parametrize("name", ALL)
def test_seeds_decide_the_codes(name: str) -> None:
    x, fmt = torch.randn(30, 64), parse(name)
    stored = [fmt.encode(x, seed=seed).storage.view(torch.uint8) for seed in (1, 1, 2, None)]
    assert torch.equal(stored[0], stored[1])
    assert not torch.equal(stored[0], stored[2])
    assert not torch.equal(stored[0], stored[3])


# --- gradient


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_passes_straight_through(name: str) -> None:
    """And the value is that of the format in every bit, which x + (y - x) is not."""
    x, weight, fmt = torch.randn(6, 40, requires_grad=True), torch.randn(6, 40), parse(name)
    for dim in (0, 1):
        y = fmt.quantize(x, dim)
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        assert torch.equal(grad, weight)
        assert torch.equal(y, fmt.encode(x, dim).dequantize())
    assert not fmt.encode(x).dequantize().requires_grad


def test_blocks_along_the_other_dimension_are_others() -> None:
    """Rows of very different magnitudes: blocks along the rows keep the small ones, blocks across lose them."""
    x = torch.randn(32, 32) * torch.tensor([1.0, 1e-4]).repeat(16)[:, None]
    formats: list[Format] = [MSFP(3), FixedPoint(8), Float8(), Int(8), parse("mxfp4")]
    for fmt in formats:
        along, across = fmt.quantize(x, 1), fmt.quantize(x, 0)
        small = x[1::2]
        assert (along[1::2] - small).norm() < 0.3 * small.norm()
        assert (across[1::2] - small).norm() > (0.3 if not isinstance(fmt, Float8) else 0.01) * small.norm()
        assert torch.equal(across, fmt.quantize(x.t()).t())
        assert not torch.equal(along, across)
