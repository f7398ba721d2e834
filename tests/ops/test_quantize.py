"""``qgnn::quantize``: the operator around ``reference.quantize``, whose arithmetic tests/test_rounding.py holds."""

import importlib
import importlib.util

import pytest
import torch

from dense import seed_of
from op_checks import opcheck
from qgnn import ops, reference, rng
from qgnn.ops import _backends
from qgnn.ops._backends import triton_backend

GRANULARITIES = ("row", "tensor", "block")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantize_opcheck(granularity: str, seed: int | None, dtype: torch.dtype) -> None:
    x = torch.randn(5, 33).to(dtype)
    opcheck(ops.quantize, (x, seed_of(seed), 8, granularity, 16), compiled=dtype == torch.float32)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("shape", [(13, 33), (0, 5), (5, 0), (1, 1)], ids=str)
def test_quantize_is_the_reference(shape: tuple[int, int], bits: int, granularity: str) -> None:
    x = torch.randn(shape)
    for seed in (None, rng.make_seed(3)):
        codes, scale = ops.quantize(x, seed, bits, granularity, 16)
        expected, expected_scale = reference.quantize(
            x, bits=bits, granularity=granularity, block_size=16, seed=seed, stream=0
        )
        assert torch.equal(codes, expected)
        assert torch.equal(scale, expected_scale)


def test_quantize_seeds() -> None:
    x = torch.randn(13, 33)
    codes = [ops.quantize(x, rng.make_seed(number), 8, "row", 16)[0] for number in (1, 1, 2)]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


def test_streams_of_an_operator_are_distinct() -> None:
    streams = [value for name, value in vars(_backends).items() if name.startswith("STREAM_")]
    assert len(streams) == 11
    assert len(set(streams)) == 11


def test_quantize_leaves_its_input_alone() -> None:
    x, seed = torch.randn(13, 33)[::2], rng.make_seed(1)
    before, seed_before = x.clone(), seed.clone()
    ops.quantize(x, seed, 8, "row", 16)
    assert torch.equal(x, before)
    assert torch.equal(seed, seed_before)
    assert x._version == seed._version == 0


def test_quantize_gives_no_gradient() -> None:
    codes, scale = ops.quantize(torch.randn(3, 4, requires_grad=True), None, 8, "row", 16)
    assert not codes.requires_grad
    with pytest.raises(RuntimeError, match="has no derivative"):
        scale.sum().backward()


def test_quantize_under_autocast() -> None:
    x = torch.randn(5, 33)
    plain = ops.quantize(x, None, 8, "row", 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = ops.quantize(x, None, 8, "row", 16)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize_on_the_kernels(granularity: str, device: str) -> None:
    from qgnn.ops.quantize import _quantize

    x = torch.randn(5, 33)
    for seed in (None, 1):
        codes, scale = _quantize(triton_backend(), x.to(device), _on(seed, device), 8, granularity, 16)
        expected, expected_scale = ops.quantize(x, seed_of(seed), 8, granularity, 16)
        assert torch.equal(codes.cpu(), expected)
        assert torch.equal(scale.cpu(), expected_scale)


def _on(seed: int | None, device: str) -> torch.Tensor | None:
    return None if seed is None else rng.make_seed(seed, device)


def test_what_has_a_triton_kernel_runs_on_it() -> None:
    for name, home in _backends._HOMES.items():
        in_triton = importlib.util.find_spec(f"qgnn.kernels.{home}") is not None
        has_kernel = in_triton and hasattr(importlib.import_module(f"qgnn.kernels.{home}"), name)
        assert has_kernel != (name in _backends._WITHOUT_TRITON), name
