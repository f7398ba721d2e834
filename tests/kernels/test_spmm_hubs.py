"""Long rows in chunks, and what follows a sum: every kernel that writes rows meets both."""

import pytest
import torch
from qgnn.kernels.spmm import make_plan, spmm, spmm_requantize
from torch import Tensor

from kernel_cases import random_codes
from qgnn import reference, rng
from qgnn.activation import Activation, mask_width
from spmm_cases import assert_spmm_within_bound, graph


def _exact_case(name: str, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers and weights that are powers of two: sums are exact in whatever order they are formed."""
    indptr, index, S, _ = graph(name, device)
    x = random_codes(S, width, device).to(dtype)
    return indptr, index, x, 2.0 ** torch.randint(-2, 3, (index.numel(),), device=device)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize(
    ("name", "cap", "width"),
    [("hub", 64, 33), ("power_law", 20, 7), ("one_target", 8, 7), ("random", 5, 7), ("wide", 12, 130)],
)
def test_sums_of_chunks_equal_those_of_rows(device: str, dtype: torch.dtype, name: str, cap: int, width: int) -> None:
    indptr, index, x, weight = _exact_case(name, width, dtype, device)
    plan = make_plan(indptr, index.numel(), cap=cap)
    assert plan.counts[1] > 0
    expected = reference.spmm(indptr, index, x, weight=weight)
    assert torch.equal(spmm(indptr, index, x, weight=weight, plan=plan), expected.to(torch.float32))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 1), (torch.bfloat16, 33), (torch.int8, 7), (torch.int8, 33), (torch.int8, 256)]
)
def test_chunks_stay_within_the_bound(device: str, dtype: torch.dtype, width: int, index_dtype: torch.dtype) -> None:
    indptr, index, S, N = graph("hub", device, index_dtype)
    x = random_codes(S, width, device) if dtype == torch.int8 else torch.randn(S, width, device=device).to(dtype)
    assert_spmm_within_bound(
        indptr,
        index,
        x,
        weight=torch.randn(index.numel(), device=device),
        bias=torch.randn(width, device=device),
        row_factor=torch.rand(N, device=device),
        plan=make_plan(indptr, index.numel(), cap=64),
    )


@pytest.mark.parametrize("width", [7, 33, 130])
@pytest.mark.parametrize("stochastic", [False, True])
def test_requantized_chunks_equal_reference_on_exact_sums(device: str, width: int, stochastic: bool) -> None:
    indptr, index, x, weight = _exact_case("hub", width, torch.int8, device)
    options = {"weight": weight, "seed": rng.make_seed(6, device) if stochastic else None, "stream": 3}
    found = spmm_requantize(indptr, index, x, **options, plan=make_plan(indptr, index.numel(), cap=64))
    expected = reference.spmm_requantize(indptr, index, x, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 33, 64, 130])
@pytest.mark.parametrize(("relu", "probability"), [(True, 0.0), (False, 0.3), (True, 0.5), (True, 1.0)])
def test_activations_equal_reference_on_exact_sums(
    device: str, dtype: torch.dtype, width: int, relu: bool, probability: float
) -> None:
    """The rows and the bits of groups and of hubs in chunks, with row factor, bias, ReLU and dropout."""
    indptr, index, x, weight = _exact_case("wide", width, dtype, device)
    N = indptr.numel() - 1
    results = []
    for function, options in [(spmm, {"plan": make_plan(indptr, index.numel(), cap=12)}), (reference.spmm, {})]:
        mask = torch.full((N, mask_width(width)), 0xAA, dtype=torch.uint8, device=device)
        seed = rng.make_seed(8, device) if probability else None
        activation = Activation(relu, round(probability * 2**16), seed, 2, mask)
        torch.manual_seed(1)
        out = function(
            indptr,
            index,
            x,
            weight=weight,
            row_factor=torch.randn(N).to(device),
            bias=torch.randn(width).to(device),
            activation=activation,
            **options,
        )
        results.append((out, mask))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_activation_without_a_mask_writes_rows_only(device: str) -> None:
    indptr, index, x, weight = _exact_case("random", 40, torch.int8, device)
    activation = Activation(True, 0, None, 0, None)
    out = spmm(indptr, index, x, weight=weight, activation=activation, out_dtype=torch.float16)
    assert torch.equal(out, reference.spmm(indptr, index, x, weight=weight).relu().half())
