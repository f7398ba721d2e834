"""``qgnn::blocks_pack`` and ``qgnn::blocks_unpack``: the operators around the reference, whose arithmetic
tests/test_reference_blocks*.py hold."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import qgnn
from block_cases import BITS, METADATA, assert_same
from dense import seed_of
from op_checks import assert_unbiased, opcheck
from qgnn import ops, reference, rng
from qgnn.ops._backends import STREAM_PACKED, torch_backend
from qgnn.ops.blocks import _blocks_pack, _blocks_unpack

FP32 = torch.float32
PLAIN_PACK, PLAIN_UNPACK = (None, 0, None), (None, 0, None, 0, 0)  # bins of one width, no projection
EDGES = torch.tensor([0, 1.25, 1.75, 3])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("metadata_dtype", METADATA)
def test_blocks_opcheck(bits: int, seed: int | None, metadata_dtype: torch.dtype) -> None:
    x, compiled = torch.randn(5, 33), metadata_dtype == FP32
    opcheck(ops.blocks_pack, (x, seed_of(seed), bits, 16, metadata_dtype, *PLAIN_PACK), compiled=compiled)
    blocks = ops.blocks_pack(x, seed_of(seed), bits, 16, metadata_dtype, *PLAIN_PACK)
    opcheck(ops.blocks_unpack, (*blocks, bits, 165, torch.float16, *PLAIN_UNPACK), compiled=compiled)


@pytest.mark.parametrize("dtype", [FP32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(13, 33), (0, 5), (5, 0), (1,), (), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_blocks_are_the_reference(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for seed in (None, rng.make_seed(3)):
        blocks = ops.blocks_pack(x, seed, bits, 16, torch.bfloat16, *PLAIN_PACK)
        rounding = {"seed": seed, "stream": STREAM_PACKED}
        expected = reference.blocks_pack(x, bits=bits, block_size=16, metadata_dtype=torch.bfloat16, **rounding)
        assert_same(blocks, expected)
        values = ops.blocks_unpack(*blocks, bits, x.numel(), dtype, *PLAIN_UNPACK)
        assert_same([values], [reference.blocks_unpack(*expected, bits=bits, size=x.numel(), dtype=dtype)])
        assert values.dtype == dtype


def test_backends_agree() -> None:
    x, seed = torch.randn(7, 33), rng.make_seed(3)
    blocks = ops.blocks_pack(x, seed, 2, 64, torch.float16, *PLAIN_PACK)
    assert_same(blocks, _blocks_pack(torch_backend(), x, seed, 2, 64, torch.float16, *PLAIN_PACK))
    values = ops.blocks_unpack(*blocks, 2, x.numel(), FP32, *PLAIN_UNPACK)
    assert_same([values], [_blocks_unpack(torch_backend(), *blocks, 2, x.numel(), FP32, *PLAIN_UNPACK)])


def through(x: Tensor, bits: int, block_size: int, edges: Tensor | None, projection: int, seed: int) -> Tensor:
    """Packed and unpacked, with random numbers of this seed."""
    signs = (edges, projection, rng.make_seed(seed + 1))
    blocks = ops.blocks_pack(x, rng.make_seed(seed), bits, block_size, FP32, *signs)
    size = x.shape[0] * projection if projection else x.numel()
    return ops.blocks_unpack(*blocks, bits, size, x.dtype, *signs, x.shape[1], 0)


@pytest.mark.parametrize("projection", [0, 8])
def test_blocks_with_edges_and_projection_opcheck(projection: int) -> None:
    x, options = torch.randn(5, 33), (EDGES, projection, rng.make_seed(2))
    opcheck(ops.blocks_pack, (x, rng.make_seed(1), 2, 16, FP32, *options), compiled=True)
    blocks, size = ops.blocks_pack(x, rng.make_seed(1), 2, 16, FP32, *options), 40 if projection else 165
    opcheck(ops.blocks_unpack, (*blocks, 2, size, torch.float16, *options, 33, 0), compiled=True)


@pytest.mark.parametrize("edges", [None, EDGES], ids=["uniform", "edges"])
@pytest.mark.parametrize("projection", [0, 8])
def test_the_mean_over_seeds_is_the_input(edges: Tensor | None, projection: int) -> None:
    x = torch.randn(4, 10)
    assert_unbiased(lambda seed: {"x": through(x, 2, 8, edges, projection, seed).view_as(x)}, {"x": x}, 400)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 7)], ids=str)
def test_projections_of_any_shape(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    assert through(x, 4, 8, None, 12, 1).shape == shape


def test_a_trace_shows_the_width() -> None:
    with qgnn.trace() as t:
        blocks = ops.blocks_pack(torch.randn(64), None, 2, 16, FP32, *PLAIN_PACK)
        ops.blocks_unpack(*blocks, 2, 64, FP32, *PLAIN_UNPACK)
    assert t.ops["blocks.pack"]["format"] == t.ops["blocks.unpack"]["format"] == "int2"
    assert t.ops["blocks.unpack"]["bytes"] == 16 + 2 * 4 * 4 + 64 * 4


def test_blocks_compile_with_unknown_sizes() -> None:
    def through(x: Tensor) -> Tensor:
        blocks = ops.blocks_pack(x, None, 2, 16, FP32, *PLAIN_PACK)
        return ops.blocks_unpack(*blocks, 2, x.numel(), x.dtype, *PLAIN_UNPACK).view_as(x)

    compiled = torch.compile(through, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((5, 33), (6, 32), (9, 7)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), through(x))


def test_packed_blocks_give_no_gradient() -> None:
    packed, low, _ = ops.blocks_pack(torch.randn(16, requires_grad=True), None, 2, 16, FP32, *PLAIN_PACK)
    assert not packed.requires_grad
    with pytest.raises(RuntimeError, match="has no derivative"):
        low.sum().backward()


def test_blocks_under_autocast() -> None:
    x = torch.randn(5, 33)
    plain = ops.blocks_pack(x, None, 2, 16, FP32, *PLAIN_PACK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = ops.blocks_pack(x, None, 2, 16, FP32, *PLAIN_PACK)
        values = ops.blocks_unpack(*mixed, 2, 165, FP32, *PLAIN_UNPACK)
    assert_same(mixed, plain)
    assert_same([values], [ops.blocks_unpack(*plain, 2, 165, FP32, *PLAIN_UNPACK)])


BAD_PACKS = {
    "three bits": (ValueError, {"bits": 3}, "'bits' to be one of (1, 2, 4, 8) (got 3)"),
    "no bits": (ValueError, {"bits": 0}, "(got 0)"),
    "sixteen bits": (ValueError, {"bits": 16}, "(got 16)"),
    "no block": (ValueError, {"block_size": 0}, "'block_size' from 1 to 65536 values (got 0)"),
    "negative": (ValueError, {"block_size": -16}, "(got -16)"),
    "absurd": (ValueError, {"block_size": 65540}, "(got 65540)"),
    "torn byte": (ValueError, {"block_size": 30}, "multiple of 4 for 2-bit codes, so that a block takes whole bytes"),
    "torn bits": (ValueError, {"block_size": 12, "bits": 1}, "multiple of 8 for 1-bit codes"),
    "integers": (
        TypeError,
        {"x": torch.arange(9)},
        "'x' in a floating-point type (got torch.int64); use 'x.float()'",
    ),
    "edges of bytes": (
        ValueError,
        {"bits": 8, "edges": torch.arange(256.0)},
        "no 'edges' with codes of more than 4 bits",
    ),
    "three edges": (ValueError, {"edges": torch.arange(3.0)}, "'edges' in torch.float32, of shape [4] for 2-bit codes"),
    "wide edges": (ValueError, {"edges": EDGES.double()}, "(got torch.float64 of shape [4])"),
    "projected vector": (
        ValueError,
        {"projection": 8, "projection_seed": torch.tensor([1])},
        "'x' of shape [N, F] with a 'projection' of its columns (got [50])",
    ),
    "no signs": (
        ValueError,
        {"projection": 8, "x": torch.randn(5, 5)},
        "'projection_seed' with a 'projection' (got None); make it with 'qgnn.rng.make_seed'",
    ),
    "less than no columns": (ValueError, {"projection": -1}, "'projection' to be from 0 to 65535 (got -1)"),
    "metadata": (TypeError, {"metadata_dtype": torch.float64}, "bfloat16 or torch.float16 (got torch.float64)"),
}


@pytest.mark.parametrize("name", BAD_PACKS)
def test_pack_refuses(name: str) -> None:
    error, change, message = BAD_PACKS[name]
    arguments: dict[str, Any] = {
        **{"x": torch.randn(50), "seed": None, "bits": 2, "block_size": 16, "metadata_dtype": FP32},
        **{"edges": None, "projection": 0, "projection_seed": None},
        **change,
    }
    with pytest.raises(error, match=r"'qgnn::blocks_pack' expects .*" + re.escape(message)):
        ops.blocks_pack(*arguments.values())
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error, match=re.escape(message)):
        ops.blocks_pack(*on_meta.values())


BYTES, ONES = torch.zeros(3, 4, dtype=torch.uint8), torch.ones(3)
BAD_UNPACKS = {
    "bits": (ValueError, {"bits": 5}, "'bits' to be one of (1, 2, 4, 8) (got 5)"),
    "signed": (TypeError, {"packed": BYTES.char()}, "as 'blocks_pack' made it (got torch.int8)"),
    "flat": (ValueError, {"packed": BYTES.flatten()}, "'packed' of shape [B, W] (got [12])"),
    "too few offsets": (ValueError, {"low": ONES[:2]}, "'low' of shape [B] with B = 3 (got [2])"),
    "column of steps": (ValueError, {"step": ONES[:, None]}, "'step' of shape [B] with B = 3 (got [3, 1])"),
    "integer steps": (TypeError, {"step": ONES.int()}, "'step' in a floating-point type (got torch.int32)"),
    "wide steps": (TypeError, {"step": ONES.double()}, "'step' in a type of at most 32 bits (got torch.float64)"),
    "too long": (ValueError, {"size": 49}, "fills 3 blocks of 16 values, the last one at least in part (got 49)"),
    "too short": (ValueError, {"size": 32}, "(got 32)"),
    "negative": (ValueError, {"size": -1}, "(got -1)"),
    "nothing": (ValueError, {"size": 0}, "(got 0)"),
    "absurd": (ValueError, {"packed": BYTES.repeat(1, 4097), "size": 9}, "blocks of up to 65536 values (got 65552)"),
    "edges of bytes": (
        ValueError,
        {"bits": 8, "edges": torch.arange(256.0)},
        "no 'edges' with codes of more than 4 bits",
    ),
    "no signs": (ValueError, {"projection": 8}, "'projection_seed' with a 'projection' (got None)"),
    "torn row": (
        ValueError,
        {"projection": 16, "projection_seed": torch.tensor([1])},
        "a 'size' of whole rows of 'projection' values, and 'num_columns' of the matrix that was packed (got 40",
    ),
    "integers": (TypeError, {"dtype": torch.int32}, "'dtype' to be a floating-point type (got torch.int32)"),
}


@pytest.mark.parametrize("name", BAD_UNPACKS)
def test_unpack_refuses(name: str) -> None:
    error, change, message = BAD_UNPACKS[name]
    arguments: dict[str, Any] = {
        **{"packed": BYTES, "low": ONES, "step": ONES, "bits": 2, "size": 40, "dtype": FP32},
        **{"edges": None, "projection": 0, "projection_seed": None, "num_columns": 0, "first_row": 0},
        **change,
    }
    with pytest.raises(error, match=r"'qgnn::blocks_unpack' expects .*" + re.escape(message)):
        ops.blocks_unpack(*arguments.values())


BAD_EDGES = ([0, 1, 1, 3], [0, 2, 1, 3], [0, 1, 2, 4], [1, 1.5, 2, 3], [0, math.nan, 2, 3], [0, 1, 1 + 2.0**-17, 3])


@pytest.mark.parametrize("edges", BAD_EDGES, ids=str)
def test_edges_have_to_span_the_codes(edges: list[float]) -> None:
    options = (torch.tensor(edges, dtype=FP32), 0, None)
    message = r"expects 'edges' to rise from 0 to 3 by at least 2\*\*-16 each \(got"
    with pytest.raises(ValueError, match=r"'qgnn::blocks_pack' " + message):
        ops.blocks_pack(torch.randn(50), None, 2, 16, FP32, *options)
    with pytest.raises(ValueError, match=r"'qgnn::blocks_unpack' " + message):
        ops.blocks_unpack(BYTES, ONES, ONES, 2, 40, FP32, *options, 0, 0)


def test_unpack_takes_every_size_that_fills_its_blocks() -> None:
    for size in (33, 48):
        assert torch.equal(ops.blocks_unpack(BYTES, ONES, ONES, 2, size, FP32, *PLAIN_UNPACK), torch.ones(size))
