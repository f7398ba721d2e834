"""``qgnn::quantize``: codes and scales of a matrix. Integer codes carry no gradient, so this op has none."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.ops._backends import STREAM_INPUT, Backend, fake_codes
from qgnn.ops._checks import GRANULARITIES, INT8_BITS, POSITIVE, Signature
from qgnn.ops._operator import define


def _quantize(
    backend: Backend, x: Tensor, seed: Tensor | None, bits: int, granularity: str, block_size: int
) -> tuple[Tensor, Tensor]:
    return backend.call(
        "quantize",
        "quantize.forward",
        x,
        bits=bits,
        granularity=granularity,
        block_size=block_size,
        seed=seed,
        stream=STREAM_INPUT,
    )


def _fake_quantize(
    x: Tensor, seed: Tensor | None, bits: int, granularity: str, block_size: int
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    scale_shape = {
        "row": (num_rows,),
        "tensor": (1,),
        "block": (num_rows, (width + block_size - 1) // block_size),
    }[granularity]
    return fake_codes(x, num_rows, width), x.new_empty(scale_shape, dtype=torch.float32)


quantize = define(
    "quantize",
    _quantize,
    "(Tensor x, Tensor? seed, int bits, str granularity, int block_size) -> (Tensor, Tensor)",
    _fake_quantize,
    Signature(
        {"x": "N F"},
        choices={"bits": INT8_BITS, "granularity": (*GRANULARITIES, "block"), "block_size": POSITIVE},
    ),
)
