"""``qgnn::matmul_codes``, ``matmul_codes_dw`` and ``matmul_shared``: products of operands that are codes already, each
in a format of its own. Integer codes carry no gradient, so these ops have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops._backends import Backend
from qgnn.ops._checks import Signature
from qgnn.ops._operator import define
from qgnn.rounding import MAX_SHARED_BLOCK_SIZE, MAX_SHARED_FRACTION_BITS

PASSES = ("forward", "backward_dx", "backward_dw")


def _matmul_codes(
    backend: Backend,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    pass_: str,
    format_name: str,
) -> Tensor:
    operands = (x, x_scale, weight, weight_scale.expand(weight.shape[0]).contiguous(), bias)
    return backend.call("matmul", f"matmul.{pass_}", *operands, format_name=format_name)


def _fake_product(x: Tensor, x_scale: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


matmul_codes = define(
    "matmul_codes",
    _matmul_codes,
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, str pass_, str format_name) ->"
    " Tensor",
    _fake_product,
    Signature(
        {"x": "N K", "x_scale": "N|1", "weight": "M K", "weight_scale": "M|1", "bias": "M"},
        choices={"pass_": PASSES},
        int32_sums=("K",),
    ),
)


def _matmul_codes_dw(
    backend: Backend, grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, format_name: str
) -> Tensor:
    operands = (grad, grad_scale, x, x_scale)
    return backend.call("matmul_dw", "matmul.backward_dw", *operands, format_name=format_name)


def _fake_matmul_codes_dw(grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, format_name: str) -> Tensor:
    return x.new_empty((grad.shape[1], x.shape[1]), dtype=torch.float32)


matmul_codes_dw = define(
    "matmul_codes_dw",
    _matmul_codes_dw,
    "(Tensor grad, Tensor grad_scale, Tensor x, Tensor x_scale, str format_name) -> Tensor",
    _fake_matmul_codes_dw,
    Signature({"grad": "N M", "grad_scale": "N|1", "x": "N K", "x_scale": "N|1"}),
)


def _matmul_shared(
    backend: Backend,
    x: Tensor,
    x_exponent: Tensor,
    weight: Tensor,
    weight_exponent: Tensor,
    bias: Tensor | None,
    block_size: int,
    fraction_bits: int,
    pass_: str,
    format_name: str,
) -> Tensor:
    return backend.call(
        "matmul_shared",
        f"matmul.{pass_}",
        *(x, x_exponent, weight, weight_exponent, bias),
        block_size=block_size,
        fraction_bits=fraction_bits,
        out_dtype=torch.float32,
        format_name=format_name,
    )


matmul_shared = define(
    "matmul_shared",
    _matmul_shared,
    "(Tensor x, Tensor x_exponent, Tensor weight, Tensor weight_exponent, Tensor? bias, int block_size,"
    " int fraction_bits, str pass_, str format_name) -> Tensor",
    _fake_product,
    Signature(
        {"x": "N K", "x_exponent": "N K/G", "weight": "M K", "weight_exponent": "M K/G", "bias": "M"},
        sizes={"block_size": "G"},
        choices={
            "block_size": range(1, MAX_SHARED_BLOCK_SIZE + 1),
            "fraction_bits": range(MAX_SHARED_FRACTION_BITS + 1),
            "pass_": PASSES,
        },
    ),
)
