"""Epilogues and activations that the kernel tests share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_cases import UNIT, assert_within
from qgnn import reference, rng
from qgnn.activation import Activation, derivative_steps, dropout_threshold, mask_width

# ReLU, the probability of dropping an element, and whether the bits are kept
ACTIVATIONS = {
    "relu": (True, 0.0, True),
    "dropout": (False, 0.3, True),
    "relu_dropout": (True, 0.5, True),
    "relu_dropout_no_mask": (True, 0.5, False),
    "drop_everything": (True, 1.0, True),
}


def activation(name: str, num_rows: int, num_columns: int, device: str, seed: int = 5) -> Activation:
    """An epilogue whose mask holds bits that none would write."""
    relu, probability, keeps_mask = ACTIVATIONS[name]
    shape = (num_rows, mask_width(num_columns))
    return Activation(
        relu=relu,
        threshold=dropout_threshold(probability),
        seed=rng.make_seed(seed, device) if probability else None,
        stream=2,
        mask=torch.full(shape, 0xA5, dtype=torch.uint8, device=device) if keeps_mask else None,
    )


def random_mask(num_rows: int, num_columns: int, device: str) -> Tensor:
    """Bits of a mask; those behind the last column are 0."""
    bits = torch.rand(num_rows, 8 * mask_width(num_columns), device=device) < 0.5
    bits[:, num_columns:] = False
    weights = 1 << torch.arange(8, device=device)
    return (bits.view(num_rows, mask_width(num_columns), 8) * weights).sum(2).to(torch.uint8)


# What is kept of each kind; 1.2 times what its derivative is scaled with is above the largest code
KEPT = {
    "none": {"kind": "none", "slope": 0.0},
    "relu": {"kind": "relu", "slope": 0.0},
    "leaky_relu": {"kind": "leaky_relu", "slope": -1.5},
    "elu_values": {"kind": "elu", "slope": 0.7},
    "elu_codes": {"kind": "elu", "slope": 1.2},
}


def dropout_of(p: float, device: str, seed: int = 5) -> Activation | None:
    return Activation(False, dropout_threshold(p), rng.make_seed(seed, device), 2, None) if p else None


def room(name: str, x: Tensor) -> dict[str, Tensor]:
    """Memory for what is kept, full of what none would write."""
    if name in ("relu", "leaky_relu"):
        shape = (x.shape[0], mask_width(x.shape[1]))
        return {"mask": torch.full(shape, 0xA5, dtype=torch.uint8, device=x.device)}
    if name == "elu_codes":
        return {"derivative": torch.full(x.shape, 0xA5, dtype=torch.uint8, device=x.device)}
    return (
        {"derivative": torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)} if name == "elu_values" else {}
    )


def forward_options(name: str, p: float, device: str, seed: int | None = 3) -> dict[str, Any]:
    rounding = {"steps": derivative_steps(KEPT[name]["slope"]), "seed": rng.make_seed(seed, device), "stream": 8}
    return {
        **KEPT[name],
        "dropout": dropout_of(p, device),
        **(rounding if seed is not None else {"steps": rounding["steps"]}),
    }


def assert_no_code_overflows(function: Callable[..., Tensor], device: str) -> None:
    """The largest code, with 4 times as many elements as random bits have values: what they round up to 256 is 0."""
    kept = room("elu_codes", torch.empty(4096, 64, device=device))
    function(torch.zeros(4096, 64, device=device), **forward_options("elu_codes", 0.0, device), **kept)
    assert (kept["derivative"] == 255).all()


def assert_stored(actual: Tensor, expected: Tensor, rounded: float) -> None:
    """Equal values, each stored with a relative error of at most ``rounded``; fp16 is subnormal below 2^-14."""
    tolerance = (
        {"rtol": 2 * rounded, "atol": 2.0**-24} if rounded and actual.is_floating_point() else {"rtol": 0, "atol": 0}
    )
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


def assert_forward_equals_reference(
    function: Callable[..., Tensor],
    name: str,
    p: float,
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    seed: int | None = 3,
    rounded: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows, bits and codes in every bit; half types to within what storing them is off by, if that is given."""
    options = forward_options(name, p, str(x.device), seed)
    ours, theirs = room(name, x), room(name, x)
    y = function(x, bias, residual, **options, **ours)
    expected = reference.activation(x, bias, residual, **options, **theirs)
    for actual, wanted in ((y, expected), *((ours[key], theirs[key]) for key in ours)):
        assert actual.dtype == wanted.dtype
        assert_stored(actual, wanted, rounded)
    return y, ours


def backward_operands(name: str, N: int, F: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if name in ("relu", "leaky_relu"):
        return {"mask": random_mask(N, F, device), "slope": KEPT[name]["slope"]}
    if name == "elu_codes":
        return {"derivative": torch.randint(256, (N, F), dtype=torch.uint8, device=device)}
    return {"derivative": torch.rand(N, F, device=device).to(dtype)} if name == "elu_values" else {}


def assert_backward_equals_reference(
    function: Callable[..., tuple[Tensor, Tensor | None]], grad: Tensor, rounded: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Gradients in every bit, or rounded once; sums of N fp32 values to within N roundings, in whatever order."""
    dx, sums = function(grad, factor=1 / 0.6, **options)
    expected, wanted = reference.activation_backward(grad, factor=1 / 0.6, **options)
    assert dx.dtype == expected.dtype
    assert_stored(dx, expected, rounded)
    assert (sums is None) == (wanted is None)
    if sums is not None and wanted is not None:
        wide, _ = reference.activation_backward(grad.float(), factor=1 / 0.6, **options | {"out_dtype": None})
        assert sums.dtype == torch.float32
        assert sums.shape == wanted.shape
        assert_within(sums, wide.double().sum(0), grad.shape[0] * UNIT * wide.double().abs().sum(0))
    return dx, sums
