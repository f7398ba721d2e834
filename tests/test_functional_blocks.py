"""``functional.compress`` and ``decompress``: the bytes against the reference, errors, rows, and what is kept."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from block_cases import BITS, METADATA, assert_same, codes_of, error_bound
from op_checks import assert_unbiased
from qgnn import CompressedTensor, functional, reference, rng
from qgnn.bins import best_block_size, optimal_bins
from qgnn.functional import blocks as module
from qgnn.functional import compress, decompress
from qgnn.ops._backends import STREAM_PACKED, STREAM_PROJECTION
from statistics_checks import EPS

KINDS: dict[str, dict[str, Any]] = {
    **{f"int{bits}": {"bits": bits} for bits in BITS},
    "int2-vm": {"bits": 2, "bins": "optimal"},
    "int4-vm": {"bits": 4, "bins": "optimal"},
    "int2-rp4": {"bits": 2, "projection": 4},
    "int8-rp2": {"bits": 8, "projection": 2},
    "int2-rp4-vm": {"bits": 2, "bins": "optimal", "projection": 4},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
FP16_LIMIT = 2.0**14


def num_coded(c: CompressedTensor) -> int:
    return math.prod(c.shape[:-1]) * c.columns if c.columns else math.prod(c.shape)


# --- the bytes, and the values that they stand for


@EVERY_KIND
@pytest.mark.parametrize("block_size", [8, 40, 4096])
@pytest.mark.parametrize("shape", [(13, 33), (5, 2, 9)], ids=str)
def test_compression_is_that_of_the_reference(shape: tuple[int, ...], block_size: int, kind: dict[str, Any]) -> None:
    x, seed = torch.randn(shape), rng.make_seed(5)
    c = compress(x, block_size=block_size, seed=seed, **kind)
    options: dict[str, Any] = {}
    if kind.get("bins") == "optimal":
        options["edges"] = optimal_bins(c.blocks.bits, block_size)
    if "projection" in kind:
        columns = max(1, round(shape[-1] / kind["projection"]))
        options |= {"projection": columns, "projection_seed": seed, "projection_stream": STREAM_PROJECTION}
    expected = reference.blocks_pack(
        x.flatten(0, -2),
        bits=c.blocks.bits,
        block_size=block_size,
        metadata_dtype=torch.bfloat16,
        seed=seed,
        stream=STREAM_PACKED,
        **options,
    )
    assert c.columns == options.get("projection", 0)
    if "projection" not in kind:  # whose sums each backend adds in an order of its own
        assert_same((c.packed, c.low, c.step), expected)
        assert_same(
            [decompress(c).flatten()],
            [reference.blocks_unpack(*expected, bits=c.blocks.bits, size=x.numel(), **options)],
        )
    restored = reference.blocks_unpack(
        *(c.packed, c.low, c.step), bits=c.blocks.bits, size=num_coded(c), num_columns=shape[-1], **options
    )
    torch.testing.assert_close(decompress(c), restored.view(shape), rtol=1e-5, atol=1e-5)


@given(st.data(), st.sampled_from(BITS), st.sampled_from(METADATA))
def test_a_value_is_at_most_a_step_off(data: st.DataObject, bits: int, metadata_dtype: torch.dtype) -> None:
    block_size = 8 // bits * data.draw(st.integers(1, 8))
    limit = FP16_LIMIT if metadata_dtype == torch.float16 else 2.0**100
    x = torch.tensor(data.draw(st.lists(st.floats(-limit, limit, width=32), min_size=1, max_size=70)))
    c = compress(x, bits, block_size, metadata_dtype=metadata_dtype, seed=data.draw(st.integers(0, 2**64 - 1)))
    bound = error_bound(c.low, c.step, bits, nearest=False).repeat_interleave(block_size)[: len(x)]
    assert ((decompress(c).double() - x).abs() <= bound).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block_size", [8, 128, 2048, 65536])
def test_the_last_block_is_coded_like_the_others(bits: int, block_size: int) -> None:
    """Of all lengths that it can have: its own range, and zeros behind its values."""
    for n in {1, block_size // 2 + 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 3}:
        x = 7 + torch.randn(n)
        x[n - 1] = 9
        c = compress(x, bits, block_size, metadata_dtype=torch.float32, seed=3)
        assert c.packed.shape == (-(-n // block_size), block_size * bits // 8)
        rest = x[(n - 1) // block_size * block_size :]
        assert c.low[-1] == rest.min()
        bound = error_bound(c.low, c.step, bits, nearest=False)
        assert ((decompress(c).double() - x).abs() <= bound.repeat_interleave(block_size)[:n]).all()
        if block_size < 65536:
            assert codes_of(c.packed[-1:], bits)[0, len(rest) :].eq(0).all()
        kept = slice(max(0, len(c.packed) - 1), None)  # alone it gets the same range
        alone = compress(rest, bits, block_size, metadata_dtype=torch.float32, seed=3)
        assert_same([alone.low, alone.step], [c.low[kept], c.step[kept]])


@pytest.mark.parametrize("metadata_dtype", METADATA)
@pytest.mark.parametrize(("bits", "bins"), [(1, "uniform"), (4, "uniform"), (4, "optimal")])
def test_the_mean_over_seeds_is_the_input_far_from_zero(bits: int, bins: str, metadata_dtype: torch.dtype) -> None:
    """Numbers of bf16 lie 4 apart here, and those of fp16 0.5: were offsets rounded after the coding, the mean would be
    off by up to half of that."""
    x = 777.7 + torch.rand(3, 21)

    def draw(seed: int) -> dict[str, Tensor]:
        return {"x": decompress(compress(x, bits, 16, bins, metadata_dtype=metadata_dtype, seed=seed))}

    assert_unbiased(draw, {"x": x}, 400)


@pytest.mark.parametrize("metadata_dtype", METADATA)
def test_constant_rows(metadata_dtype: torch.dtype) -> None:
    """Exact where the value is a number of the metadata's type; else the next number below and a step up."""
    x = torch.tensor([3.5, -2.25, 0.0, 1e-35, 0.1])[:, None].expand(5, 8)
    c = compress(x, 2, 8, metadata_dtype=metadata_dtype, seed=1)
    values = decompress(c)
    assert torch.equal(values[:3], x[:3])
    assert (values[3].abs() <= 1e-30).all()
    allowed = 0.0 if metadata_dtype == torch.float32 else 0.1 * torch.finfo(metadata_dtype).eps
    assert ((values[4] - x[4]).abs() <= allowed * (1 + 4 * EPS)).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bins", ["uniform", "optimal"])
def test_poison_stays_in_its_block(poison: float, bins: str) -> None:
    x = torch.randn(6, 16)
    clean = decompress(compress(x, 2, 16, bins, seed=1))
    x[2, 3] = poison
    values = decompress(compress(x, 2, 16, bins, seed=1))
    others = [0, 1, 3, 4, 5]
    assert values[2].isnan().all()
    assert torch.equal(values[others], clean[others])


def test_what_metadata_cannot_hold_is_poison_and_not_clamped() -> None:
    x = torch.ones(2, 8)
    x[1, 0] = 1e6
    values = decompress(compress(x, 2, 8, metadata_dtype=torch.float16, seed=1))
    assert torch.equal(values[0], x[0])
    assert values[1].isnan().all()


# --- types, layouts, seeds


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_comes_back(dtype: torch.dtype, kind: dict[str, Any]) -> None:
    """The values are those of the fp32 copy, converted."""
    x = torch.randn(9, 12).to(dtype)
    values = decompress(compress(x, block_size=24, seed=2, **kind))
    assert values.dtype == dtype
    copied = decompress(compress(x.float(), block_size=24, seed=2, **kind))
    torch.testing.assert_close(values, copied.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@EVERY_KIND
def test_strides_do_not_matter(kind: dict[str, Any]) -> None:
    whole = torch.randn(12, 18)
    for x in (whole.t(), whole[::2, 1::3], whole[:, :1].expand(12, 18), whole.flip(0)):
        values = decompress(compress(x, block_size=24, seed=2, **kind))
        assert torch.equal(values, decompress(compress(x.contiguous(), block_size=24, seed=2, **kind)))
        assert values.is_contiguous()


@EVERY_KIND
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 4), (3, 4, 0), (4, 1), (1, 2)], ids=str)
def test_shapes_of_nothing_and_of_one_column(shape: tuple[int, ...], kind: dict[str, Any]) -> None:
    c = compress(torch.ones(shape), block_size=8, seed=0, **kind)
    assert decompress(c).shape == shape
    assert decompress(c, slice(0, 1)).shape == (min(1, shape[0]), *shape[1:])
    if shape[-1] < 2:  # nothing to mix
        assert c.columns == 0
        assert torch.equal(decompress(c), torch.ones(shape))


@pytest.mark.parametrize("shape", [(), (1,), (7,)], ids=str)
def test_scalars_and_vectors(shape: tuple[int, ...]) -> None:
    assert torch.equal(decompress(compress(torch.ones(shape), 2, 8)), torch.ones(shape))


@EVERY_KIND
def test_seeds_and_the_global_generator(kind: dict[str, Any]) -> None:
    x = torch.randn(20, 16)

    def of(seed: int | Tensor | None) -> Tensor:
        return decompress(compress(x, block_size=32, seed=seed, **kind))

    assert torch.equal(of(1), of(1))
    assert torch.equal(of(1), of(rng.make_seed(1)))
    assert not torch.equal(of(1), of(2))
    torch.manual_seed(4)
    first = of(None)
    assert not torch.equal(first, of(None))
    torch.manual_seed(4)
    assert torch.equal(first, of(None))


def test_the_input_is_left_alone_and_gets_no_gradient() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    before = x.detach().clone()
    for projection in (None, 2):
        c = compress(x, 2, 8, projection=projection)
        assert not any(t.requires_grad for t in (*c.tensors, decompress(c)))
    assert torch.equal(x, before)
    assert x._version == 0


# --- rows


@given(st.data(), st.sampled_from(list(KINDS.values())))
def test_rows_are_those_of_the_whole(data: st.DataObject, kind: dict[str, Any]) -> None:
    integers = st.integers(0, 6)
    shape = (data.draw(st.integers(0, 30)), *data.draw(st.sampled_from([(1,), (7,), (8,), (13,), (3, 5), (0,)])))
    block_size = 8 // kind["bits"] * data.draw(st.sampled_from([1, 2, 3, 5, 8, 16, 100]))
    c = compress(torch.randn(shape), block_size=block_size, seed=data.draw(integers), **kind)
    bound = st.one_of(st.none(), st.integers(-35, 35))
    rows = slice(data.draw(bound), data.draw(bound))
    few, whole = decompress(c, rows), decompress(c)[rows]
    assert few.shape == whole.shape
    # A product of fewer rows may add its R' terms P / sqrt(R') in another order.
    largest = (c.low.abs() + (2**c.blocks.bits - 1) * c.step).float().amax().item() if len(c.low) else 0.0
    order = 2 * (c.columns + 4) * EPS * c.columns**0.5 * largest
    torch.testing.assert_close(few, whole, rtol=0, atol=order)


def test_rows_of_a_vector() -> None:
    c = compress(torch.randn(50), 4, 8)
    whole = decompress(c)
    for first, last in ((13, 30), (-5, None), (None, -4), (20, 10), (7, 10**6), (-(10**6), 3)):
        assert torch.equal(decompress(c, slice(first, last)), whole[first:last])
    assert torch.equal(decompress(c, slice(np.int8(3), np.int8(30))), whole[3:30])
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        decompress(c, slice(1.5, 3))


@pytest.mark.parametrize(
    ("projection", "first", "last"),
    [(None, 3, 7), (4, 2, 8)],  # values 30 to 60 of 10 a row in blocks of 8; with R' = 4 two rows are a block
)
def test_only_blocks_of_the_rows_are_read(
    projection: int | None, first: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = compress(torch.randn(40, 16 if projection else 10), 8, 8, projection=projection)
    rows = slice(4, 15) if projection else slice(3, 6)
    expected = decompress(c, rows)
    unpack, read = module.ops.blocks_unpack, []

    def recording(packed: Tensor, *options: Any) -> Tensor:
        read.append(packed)
        return unpack(packed, *options)

    monkeypatch.setattr(module.ops, "blocks_unpack", recording)
    assert torch.equal(decompress(c, rows), expected)
    assert torch.equal(read[0], c.packed[first : last + 1] if projection is None else c.packed[first:last])


# --- what is kept


@pytest.mark.parametrize("metadata_dtype", METADATA)
@EVERY_KIND
def test_bytes_are_those_of_the_formula(kind: dict[str, Any], metadata_dtype: torch.dtype) -> None:
    """Codes and two numbers a block, and 8 bytes of seed for signs: the matrix of signs is kept nowhere."""
    N, F, G = 100, 48, 64
    c = compress(torch.randn(N, F), block_size=G, metadata_dtype=metadata_dtype, **kind)
    values = N * F // kind.get("projection", 1)
    blocks = -(-values // G)
    seed = 8 if "projection" in kind else 0
    assert c.nbytes == blocks * (G * kind["bits"] // 8 + 2 * metadata_dtype.itemsize) + seed
    assert c.nbytes == sum(t.untyped_storage().nbytes() for t in c.tensors)
    kept = [value for value in vars(c).values() if isinstance(value, Tensor)]
    assert len(kept) == len(c.tensors) == (4 if "projection" in kind else 3)
    assert c.blocks.bits_per_value == pytest.approx(
        (kind["bits"] + 16 * metadata_dtype.itemsize / G) / kind.get("projection", 1)
    )


def test_a_length_is_chosen_and_kept() -> None:
    c = compress(torch.randn(300, 64), 2)
    assert isinstance(c.blocks.block_size, int)
    assert c.packed.shape[1] * 8 // 2 == c.blocks.block_size


def test_a_record_is_copied_pickled_and_told() -> None:
    c = compress(torch.randn(10, 16), 2, 16, projection=4, seed=1)
    for other in (copy.deepcopy(c), pickle.loads(pickle.dumps(c))):
        assert torch.equal(decompress(other), decompress(c))
    assert repr(c) == "CompressedTensor(torch.float32 (10, 16), int2-rp4-g16, 32 bytes)"
    with pytest.raises(AttributeError):
        c.columns = 3


# --- under torch.compile


@pytest.mark.parametrize("kind", ["int2", "int2-vm", "int2-rp4"])
def test_compiles_in_one_graph(kind: str) -> None:
    def through(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        c = compress(x, block_size=16, seed=seed, **KINDS[kind])
        return decompress(c), decompress(c, slice(2, 5))

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    x = torch.randn(11, 12)
    for number in (1, 2):
        seed = rng.make_seed(number)
        assert_same(compiled(x, seed), through(x, seed))


@pytest.mark.parametrize("block_size", [16, None])
def test_compiles_once_for_any_number_of_rows(block_size: int | None) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, seed: decompress(compress(x, 2, block_size, seed=seed)), fullgraph=True, dynamic=True, backend=counter
    )
    size = block_size or best_block_size(2, 1 << 30)  # that of large tensors
    for rows in (110, 400, 70):
        x, seed = torch.randn(rows, 12), rng.make_seed(rows)
        assert torch.equal(compiled(x, seed), decompress(compress(x, 2, size, seed=seed)))
    assert counter.frame_count == 1


# --- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compress([1.0]), TypeError, r"'compress' expects 'x' to be a tensor \(got list\)"),
        (lambda: compress(torch.arange(4)), TypeError, r"'x' in a floating-point type \(got torch.int64\); use 'x.fl"),
        (lambda: compress(torch.eye(3).to_sparse()), TypeError, r"'x' to be dense .*; use 'x.to_dense\(\)'"),
        (lambda: compress(torch.ones(4), 3), ValueError, r"'bits' to be one of \(1, 2, 4, 8\) \(got 3\)"),
        (lambda: compress(torch.ones(4), 2, 6), ValueError, r"'block_size' to be a multiple of 4 .*\(got 6\)"),
        (
            lambda: compress(torch.ones(4), projection=2),
            ValueError,
            r"'compress' expects 'x' with at least two dimensions .*\(got \[4\]\); give projection=None",
        ),
        (lambda: compress(torch.ones(4, 4), projection=1), ValueError, r"ratio of at least 2, or None \(got 1\)"),
        (lambda: compress(torch.ones(4), seed="1"), TypeError, r"'seed' expects an int.*\(got str\)"),
        (lambda: decompress(torch.ones(4)), TypeError, r"a CompressedTensor \(got Tensor\); make one with 'compress'"),
        (lambda: decompress(compress(torch.ones(4)), 2), TypeError, r"'rows' to be a slice or None \(got 2\)"),
        (lambda: decompress(compress(torch.ones(4)), slice(0, 4, 2)), ValueError, r"without a step.*of \[4\]"),
        (lambda: decompress(compress(torch.ones(())), slice(0, 1)), ValueError, r"a tensor with rows .*of \[\]"),
    ],
)
def test_rejects(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_names_are_public() -> None:
    assert functional.compress is compress
    assert {"compress", "decompress"} <= set(functional.__all__)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"packed": None}, TypeError, r"got NoneType as its 'packed'\)"),
        ({"blocks": "int2"}, TypeError, r"got str as its 'blocks'\)"),
        ({"shape": (9, 33)}, TypeError, r"got tuple as its 'shape'\)"),
        ({"dtype": torch.int8}, TypeError, r"got values of torch.int8\)"),
        ({"packed": torch.zeros(4, 9, dtype=torch.uint8)}, ValueError, r"'packed' \[5, 16\], .* \(got \[4, 9\], \[5\]"),
        ({"low": torch.zeros(4)}, ValueError, r"\(got \[5, 16\], \[4\], \[5\]\)"),
        ({"shape": torch.Size([9, 40])}, ValueError, r"'packed' \[6, 16\], 'low' and 'step' \[6\]"),
        ({"columns": 4}, ValueError, r"got int2-g64, 4 columns, seed None\)"),
        ({"projection_seed": torch.tensor([1])}, ValueError, r"0 columns, seed tensor"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    c = replace(compress(torch.randn(9, 33), bits=2, block_size=64), **fields)
    for rows in (None, slice(0, 2)):
        with pytest.raises(error, match=f"'decompress' expects 'c' as 'compress' makes it.*{message}"):
            decompress(c, rows)
