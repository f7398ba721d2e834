"""The sets of primitives that ops run on, one a device type, with every call reported to open traces.

Each set offers the functions of ``qgnn.reference`` under the same names and signatures, so an op is written once over a
:class:`Backend` and registered for each device: Triton on CUDA, C on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qgnn import reference, trace
from qgnn.activation import Activation
from qgnn.packing import per_value
from qgnn.rounding import shared_scale
from qgnn.weak_cache import cached

# Streams of one seed: no two roundings of an op call share random bits.
STREAM_INPUT, STREAM_WEIGHT, STREAM_HIDDEN = 0, 1, 2
STREAM_GRAD, STREAM_WEIGHT_T, STREAM_GRAD_HIDDEN = 3, 4, 5
STREAM_DROPOUT = 6
STREAM_PROJECTION = 7
STREAM_DERIVATIVE = 8
STREAM_PACKED, STREAM_UNPACKED = 9, 10

_PROCESS = os.getpid()  # a fork between here and the first call of a native kernel has to be noticed

# The primitives, and the file of kernels/ and kernels/cpu/ that each lives in.
_HOMES = {
    "quantize": "quantize",
    "quantize_grad": "quantize",
    "quantize_dequantize": "quantize_grid",
    "quantize_shared": "quantize_grid",
    "matmul": "matmul",
    "quantize_matmul": "matmul",
    "quantize_matmul_requantize": "matmul",
    "matmul_requantize": "matmul",
    "matmul_dw": "matmul",
    "matmul_shared": "matmul_shared",
    "spmm": "spmm",
    "spmm_requantize": "spmm",
    "spmm_extremum": "spmm",
    "spmm_extremum_dx": "spmm",
    "sddmm": "sddmm",
    "softmax": "softmax",
    "softmax_backward": "softmax",
    "attention_scores": "softmax",
    "attention_scores_backward": "softmax",
    "attention": "attention",
    "attention_backward": "attention",
    "attention_gatv2": "attention",
    "attention_gatv2_backward": "attention",
    "attention_dot": "attention",
    "attention_dot_backward": "attention",
    "blocks_pack": "blocks",
    "blocks_unpack": "blocks",
    "codes_pack": "codes",
    "codes_unpack": "codes",
    "activation": "activation",
    "activation_backward": "activation",
    "adjacency_filter": "adjacency",
    "adjacency_merge": "adjacency",
}
_TAKES_BITS = {
    *("quantize", "quantize_grad", "quantize_matmul", "quantize_matmul_requantize"),
    *("matmul_requantize", "spmm_requantize", "blocks_pack", "blocks_unpack", "codes_pack", "codes_unpack"),
}
_CODES = (torch.int8, torch.uint8)
# Primitives that walk the work items of graphs on a GPU: the arguments that these are handed over as, and which operand
# is the pointer of each. The operand behind it has an entry an edge.
_PLANS = {
    "spmm": {"plan": 0},
    "spmm_requantize": {"plan": 0},
    "spmm_extremum": {"plan": 0},
    "sddmm": {"plan": 0},
    "softmax": {"plan": 0},
    "softmax_backward": {"plan": 0},
    "attention_scores": {"plan": 0},
    "attention_scores_backward": {"plan": 0, "plan_t": 2},
    "attention": {"plan": 0},
    "attention_backward": {"plan": 0, "plan_t": 2},
    "attention_gatv2": {"plan": 0},
    "attention_gatv2_backward": {"plan": 0, "plan_t": 2},
    "attention_dot": {"plan": 0},
    "attention_dot_backward": {"plan": 0, "plan_t": 2},
}
_COPIES = {"adjacency_filter", "adjacency_merge"}  # whatever the type
# Primitives that have no Triton kernel: their reference function runs on CUDA tensors as well.
_WITHOUT_TRITON = {"spmm_extremum_dx", *_COPIES}


class Backend:
    """The primitives of one device type.

    Args:
        name: What a trace shows.
        primitives: The functions, by name.
        serves: Whether ``(primitive, operands, options)`` is among what these functions do; if not, the reference runs.
        engines: For primitives that hand their product to another library: what it runs for these operands.
    """

    def __init__(
        self,
        name: str,
        primitives: dict[str, Callable[..., Any]],
        serves: Callable[[str, tuple[Any, ...], dict[str, Any]], bool] | None = None,
        engines: dict[str, Callable[..., str]] | None = None,
    ) -> None:
        self.name = name
        self._primitives = primitives
        self._serves = serves
        self._engines = engines or {}

    def call(self, primitive: str, trace_name: str, *operands: Tensor | None, bits: int = 8, **options: Any) -> Any:
        """Run ``primitive`` and report it as ``trace_name``; ``bits`` is the width of integer operands. An option
        ``format_name`` is for the trace alone: the format, where it is no integer with a scale of its own."""
        if self._serves is not None and not self._serves(primitive, operands, options):
            return torch_backend().call(primitive, trace_name, *operands, bits=bits, **options)
        format_name = options.pop("format_name", None)
        if primitive in _TAKES_BITS:
            options["bits"] = bits
        result = self._primitives[primitive](*operands, **options)
        if trace.recording():
            results = result if isinstance(result, tuple) else (result,)
            if primitive.startswith("quantize_matmul"):
                self._report_fused(trace_name, operands, options, results, bits)
            else:
                self._report(primitive, trace_name, operands, options, results, bits, format_name=format_name)
        return result

    def _report(
        self,
        primitive: str,
        name: str,
        operands: tuple[Any, ...],
        options: dict[str, Any],
        results: tuple[Any, ...],
        bits: int,
        num_made: int = 0,
        format_name: str | None = None,
    ) -> None:
        """Report a call; the first ``num_made`` operands were made by the same kernel, which does not read them."""
        error = None
        if primitive in ("quantize", "quantize_grad", "quantize_dequantize", "quantize_shared"):
            error = partial(_relative_error, operands[0], results, options)
        tensors = [t for t in operands if t is not None]
        integer = primitive in ("quantize", "quantize_grad", "blocks_pack") or any(t.dtype in _CODES for t in tensors)
        dtypes = [t.dtype for t in tensors if t.is_floating_point()]
        fmt = format_name or (f"int{bits}" if integer else str(dtypes[0]).removeprefix("torch."))
        engine = self._engines.get(primitive)
        backend = self.name if engine is None else f"{self.name}/{engine(*operands)}"
        masks = [value.mask for value in options.values() if isinstance(value, Activation)]
        trace.report(name, fmt, backend, (*operands[num_made:], *options.values(), *masks, *results), error)

    def _report_fused(
        self, name: str, operands: tuple[Any, ...], options: dict[str, Any], results: tuple[Any, ...], bits: int
    ) -> None:
        """A product that rounds its operand first is two primitives."""
        x, *rest = operands
        *products, x_q, x_scale = results
        seed = {"seed": options.pop("seed")}
        self._report("quantize", name.replace("matmul", "quantize"), (x,), seed, (x_q, x_scale), bits)
        primitive = "matmul" if len(products) == 1 else "matmul_requantize"
        self._report(primitive, name, (x_q, x_scale, *rest), options, tuple(products), bits, num_made=2)


def _relative_error(x: Tensor, results: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Frobenius norm of the error of a quantization over that of its operand."""
    grid = options.get("grid")
    if grid is not None and len(results) == 1:
        restored = results[0].float()
    else:
        codes, scale = results[:2]
        if grid is not None:
            scale = shared_scale(scale, grid.fraction_bits)
        block_size = (options.get("block_size") if grid is None else grid.block_size) or x.shape[1]
        per_block = scale.dim() == 2
        scale = per_value(scale, block_size, x.shape[1]) if per_block else scale[:, None]
        restored = codes.float() * scale
    if options.get("mask") is not None:
        x, _ = reference.activation_backward(x, options["mask"], factor=options["factor"])
    return (restored - x.float()).norm() / x.float().norm().clamp_min(1e-30)


@cache
def torch_backend() -> Backend:
    """Plain PyTorch: the reference functions."""
    return Backend(reference.NAME, {name: getattr(reference, name) for name in _HOMES})


def _has_float64(operands: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (*operands, *options.values()))


def _triton_serves(primitive: str, operands: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return primitive not in _WITHOUT_TRITON and not _has_float64(operands, options)


@cache
def triton_backend() -> Backend:
    """The Triton kernels; imported here, at the first CUDA call."""
    homes = {name: home for name, home in _HOMES.items() if name not in _WITHOUT_TRITON}
    modules = {home: import_module(f"qgnn.kernels.{home}") for home in set(homes.values())}
    primitives = {name: getattr(modules[home], name) for name, home in homes.items()}
    for name in _PLANS.keys() & primitives.keys():
        primitives[name] = _with_plans(primitives[name], modules["spmm"].make_plan, _PLANS[name])
    return Backend("triton", primitives, _triton_serves)


def _with_plans(
    function: Callable[..., Any], make_plan: Callable[[Tensor, int], Any], pointers: dict[str, int]
) -> Callable[..., Any]:
    """Hands ``function`` the work items of its graphs, which are made once and live as long as the graphs' pointers."""

    def plan_of(indptr: Tensor, num_edges: int) -> Any:
        return cached((indptr,), ("spmm plan", num_edges), lambda: make_plan(indptr, num_edges))

    @wraps(function)
    def planned(*operands: Any, **options: Any) -> Any:
        plans = {name: plan_of(operands[i], operands[i + 1].shape[0]) for name, i in pointers.items()}
        return function(*operands, **plans, **options)

    return planned


def _c_serves(primitive: str, operands: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return primitive in _COPIES or not _has_float64(operands, options)


@cache
def c_backend() -> Backend | None:
    """The native kernels, compiled at the first call; ``None`` where they cannot be."""
    if not c_kernels()[0]:
        return None
    modules = {home: import_module(f"qgnn.kernels.cpu.{home}") for home in set(_HOMES.values())}
    engines = {name: modules["matmul"].ENGINES[name] for name in ("matmul", "matmul_requantize", "matmul_dw")}
    return Backend("c", {name: getattr(modules[home], name) for name, home in _HOMES.items()}, _c_serves, engines)


def c_kernels() -> tuple[bool, dict[str, Any]]:
    """Whether the native kernels can be used, and how: where their library is, how it was compiled, why it is not kept
    for other processes, or why there is none (``path``, ``openmp``, ``native``, ``not_kept``, ``missing``)."""
    from qgnn.kernels.cpu import info, library

    if os.getpid() != _PROCESS:
        library.work_alone()
    missing = library.unavailable()
    if missing is not None:
        return False, {"path": None, "openmp": None, "native": None, "not_kept": None, "missing": missing}
    return True, {"path": str(library.path()), **info.info(), "not_kept": library.not_kept(), "missing": None}


def cpu_backend() -> Backend:
    """The native kernels, or plain PyTorch on a machine that cannot compile them; float64 is PyTorch's anyway."""
    return c_backend() or torch_backend()


def fake_codes(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Codes as the device's kernels lay them out: rows of the Triton kernels are padded to whole vectors."""
    if like.device.type != "cuda":
        return like.new_empty((num_rows, width), dtype=torch.int8)
    from qgnn.kernels.memory import code_stride

    return like.new_empty_strided((num_rows, width), (code_stride(int(width)), 1), dtype=torch.int8)


def fresh(reference_tensor: Tensor, results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Results of an operator: an operator cannot return ``None``, so what is not wanted becomes an empty tensor."""
    return tuple(reference_tensor.new_empty(0) if t is None else t for t in results)
