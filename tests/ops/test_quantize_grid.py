"""``qgnn::quantize_dequantize`` and ``qgnn::quantize_shared``: operators around the reference functions."""

import pytest
import torch

import qgnn
from dense import seed_of
from grid_cases import GRIDS, INTEGERS
from op_checks import assert_inputs_unchanged, opcheck
from qgnn import ops, reference, rng

NAMES = ("fixed8", "fixed8-affine", "msfp12", "mxfp8-e4m3")


@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", NAMES)
def test_quantize_dequantize_opcheck(name: str, seed: int | None) -> None:
    x = torch.randn(5, 33, requires_grad=True)
    opcheck(ops.quantize_dequantize, (x, seed_of(seed), 2, *GRIDS[name]), compiled=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fixed8", "msfp12"])
def test_quantize_shared_opcheck(name: str, dtype: torch.dtype) -> None:
    opcheck(ops.quantize_shared, (torch.randn(5, 33).to(dtype), None, 0, *GRIDS[name]), compiled=dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", GRIDS)
def test_operators_are_the_reference(name: str, dtype: torch.dtype) -> None:
    x, grid, seed = torch.randn(13, 33).to(dtype), GRIDS[name], rng.make_seed(3)
    y = ops.quantize_dequantize(x, seed, 4, *grid)
    assert torch.equal(y, reference.quantize_dequantize(x, grid, seed=seed, stream=4))
    if grid.is_integer:
        results = ops.quantize_shared(x, seed, 4, *grid)
        expected = reference.quantize_shared(x, grid, seed=seed, stream=4)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_passes_unchanged(name: str) -> None:
    """Through what is clamped and what became 0, too."""
    x = (torch.randn(5, 33) * torch.logspace(-20, 20, 33)).requires_grad_()
    upstream = torch.randn(5, 33)
    ops.quantize_dequantize(x, None, 0, *GRIDS[name]).backward(upstream)
    assert torch.equal(x.grad, upstream)
    assert_inputs_unchanged(
        lambda x: ops.quantize_dequantize(x, None, 0, *GRIDS[name]), {"x": torch.randn(3, 5).requires_grad_()}
    )


def test_codes_give_no_gradient() -> None:
    codes, _ = ops.quantize_shared(torch.randn(3, 4, requires_grad=True), None, 0, *GRIDS["msfp12"])
    assert not codes.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_names_the_format_and_measures_its_error(name: str) -> None:
    x, grid = torch.randn(20, 64), GRIDS[name]
    with qgnn.trace() as trace:
        y = ops.quantize_dequantize(x, None, 0, *grid)
        if name in INTEGERS:
            ops.quantize_shared(x, None, 0, *grid)
    rows = trace.ops
    assert set(rows) == {"quantize.dequantize"} | ({"quantize.shared"} if name in INTEGERS else set())
    for row in rows.values():
        assert (row["format"], row["backend"]) == (name, "c")
        assert row["error"] == pytest.approx(float((y - x).norm() / x.norm()))


def test_operators_on_the_kernels(device: str) -> None:
    from qgnn.ops._backends import triton_backend
    from qgnn.ops.quantize_grid import _quantize_dequantize, _quantize_shared

    x, grid = torch.randn(5, 33), GRIDS["msfp12"]
    y = _quantize_dequantize(triton_backend(), x.to(device), None, 0, *grid)
    assert torch.equal(y.cpu(), ops.quantize_dequantize(x, None, 0, *grid))
    results = _quantize_shared(triton_backend(), x.to(device), None, 0, *grid)
    expected = ops.quantize_shared(x, None, 0, *grid)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(results, expected, strict=True))
