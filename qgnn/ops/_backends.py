"""The sets of primitives that ops run on, one a device type, with every call reported to open traces.

Each set offers the functions of ``qgnn.reference`` under the same names and signatures, so an op is written once over a
:class:`Backend` and registered for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qgnn import reference, trace

# Streams of one seed: no two roundings of an op call share random bits.
STREAM_INPUT, STREAM_WEIGHT, STREAM_HIDDEN = 0, 1, 2
STREAM_GRAD, STREAM_WEIGHT_T, STREAM_GRAD_HIDDEN = 3, 4, 5

# The functions of a backend, and the kernel file that each lives in.
_HOMES = {
    "quantize": "quantize",
    "matmul": "matmul",
    "matmul_requantize": "matmul",
    "matmul_dw": "matmul",
    "spmm": "spmm",
    "spmm_requantize": "spmm",
    "sddmm": "sddmm",
}
_ROUNDS = {"quantize", "matmul_requantize", "spmm_requantize"}


class Backend:
    """Primitives of one device type.

    Args:
        name: What a trace shows.
        primitives: The functions, by name.
    """

    def __init__(self, name: str, primitives: dict[str, Callable[..., Any]]) -> None:
        self.name = name
        self._primitives = primitives

    def call(self, primitive: str, trace_name: str, *operands: Tensor | None, bits: int = 8, **options: Any) -> Any:
        """Run ``primitive`` and report it as ``trace_name``; ``bits`` is the width of integer operands."""
        if primitive in _ROUNDS:
            options["bits"] = bits
        result = self._primitives[primitive](*operands, **options)
        if trace.recording():
            results = result if isinstance(result, tuple) else (result,)
            error = None
            if primitive == "quantize":
                error = partial(_relative_error, operands, results, options.get("block_size", 0))
            tensors = [t for t in operands if t is not None]
            integer = primitive == "quantize" or any(t.dtype == torch.int8 for t in tensors)
            dtypes = [t.dtype for t in tensors if t.is_floating_point()]
            fmt = f"int{bits}" if integer else str(dtypes[0]).removeprefix("torch.")
            trace.report(trace_name, fmt, self.name, (*operands, *options.values(), *results), error)
        return result


def _relative_error(operands: tuple[Any, ...], results: tuple[Any, ...], block_size: int) -> Tensor:
    """Frobenius norm of the error of ``quantize`` over that of its operand."""
    (x,), (codes, scale) = operands, results
    per_block = scale.dim() == 2
    scale = scale.repeat_interleave(block_size, dim=1)[:, : x.shape[1]] if per_block else scale[:, None]
    return (codes.float() * scale - x.float()).norm() / x.float().norm().clamp_min(1e-30)


@cache
def torch_backend() -> Backend:
    """Plain PyTorch: the reference functions."""
    return Backend(reference.NAME, {name: getattr(reference, name) for name in _HOMES})


@cache
def triton_backend() -> Backend:
    """The Triton kernels; imported here, at the first CUDA call."""
    modules = {home: import_module(f"qgnn.kernels.{home}") for home in set(_HOMES.values())}
    return Backend("triton", {name: getattr(modules[home], name) for name, home in _HOMES.items()})


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Ops compute in the types that they document, whatever autocast would make of the torch calls inside."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def define(name: str, function: Callable[..., Any], schema: str) -> Any:
    """Register ``function(backend, ...)`` as the operator ``qgnn::name`` on CPU and CUDA.

    Args:
        name: Name within the namespace.
        function: The operator over a backend.
        schema: Its schema, without the name.
    """

    def on_cpu(*args: Any) -> Any:
        with _without_autocast("cpu"):
            return function(torch_backend(), *args)

    def on_cuda(*args: Any) -> Any:
        with _without_autocast("cuda"):
            return function(triton_backend(), *args)

    op = torch.library.custom_op(f"qgnn::{name}", on_cpu, mutates_args=(), device_types="cpu", schema=schema)
    op.register_kernel("cuda")(on_cuda)
    return op


def fake_codes(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Codes as the device's kernels lay them out: rows of the Triton kernels are padded to whole vectors."""
    if like.device.type != "cuda":
        return like.new_empty((num_rows, width), dtype=torch.int8)
    from qgnn.kernels.memory import code_stride

    return like.new_empty_strided((num_rows, width), (code_stride(int(width)), 1), dtype=torch.int8)


def fresh(reference_tensor: Tensor, results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Results of an operator: an operator cannot return ``None``, so what is not wanted becomes an empty tensor."""
    return tuple(reference_tensor.new_empty(0) if t is None else t for t in results)
