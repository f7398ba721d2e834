"""Checks of arguments, and operands as the operators take them; ``owner`` is the function that an error names."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qgnn import ops
from qgnn.activation import dropout_threshold
from qgnn.config import QConfig
from qgnn.graph import Graph, as_graph
from qgnn.ops._operator import refuse_transforms
from qgnn.qtensor import QTensor
from qgnn.rng import make_rounding_seed, make_seed


def draw_seed(config: QConfig, seed: int | Tensor | None, x: Tensor) -> Tensor | None:
    """The seed of a call, or ``None`` to round to nearest."""
    refuse_transforms()
    return make_rounding_seed(seed, x.device) if config.stochastic else None


def keeps_codes(config: QConfig, weight: Tensor) -> bool:
    """Whether codes of the operand are what is kept for the gradient of ``weight``."""
    return config.keeps_codes and weight.requires_grad and torch.is_grad_enabled()


class Epilogue(NamedTuple):
    """ReLU and dropout of a call, as operators take them."""

    relu: bool
    threshold: int
    dropout_seed: Tensor | None
    keep_mask: bool


def epilogue_of(
    owner: str, activation: str | None, dropout: float, seed: int | Tensor | None, *operands: Tensor | None
) -> Epilogue:
    """The epilogue of a call on ``operands``, whose mask is kept if one of them needs a gradient."""
    if activation not in (None, "relu"):
        raise ValueError(f"'{owner}' expects 'activation' to be 'relu' or None (got {activation!r})")
    check_probability(owner, "dropout", dropout)
    threshold, relu = dropout_threshold(dropout), activation == "relu"
    tensors = [t for t in operands if t is not None]
    keep = (relu or threshold > 0) and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return Epilogue(relu, threshold, make_seed(seed, tensors[0].device) if threshold else None, keep)


def apply_epilogue(owner: str, y: Tensor, activation: str | None, dropout: float, seed: int | Tensor | None) -> Tensor:
    """The epilogue of a call, in a pass of its own behind its result ``y``."""
    relu, threshold, dropout_seed, keep = epilogue_of(owner, activation, dropout, seed, y)
    if not (relu or threshold):
        return y
    rows, kind = y.reshape(prod(y.shape[:-1]), y.shape[-1]), "relu" if relu else "none"
    return ops.activation(rows, *(None,) * 3, dropout_seed, kind, 0.0, threshold, keep, False)[0].view(y.shape)


def structure(graph: Graph, *operands: Tensor | None) -> tuple[Tensor, ...]:
    """The graph's index tensors; the transposed ones only where a backward pass will need them."""
    csr = (graph.csr.indptr, graph.csr.index)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return (*csr, graph.csc.indptr, graph.csc.index, graph.csc.order)
    return (*csr, *csr, graph.csr.order)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are made in, and that weights have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def graph_of(owner: str, graph: Any, x: Tensor | QTensor) -> Graph:
    """The graph of the edges in ``graph``, checked to have a source for each row of ``x``."""
    num_rows = x.shape[0]
    if isinstance(graph, Graph):
        if graph.num_sources != num_rows:
            raise ValueError(
                f"'{owner}' expects 'x' with one row for each of the graph's {graph.num_sources} source nodes "
                f"(got {num_rows})"
            )
    else:
        graph = as_graph(graph, num_rows)
    check_device(owner, "x", x, graph.device)
    return graph


def graph_between(graph: Any, num_sources: int, num_targets: int) -> Graph:
    """The graph of the edges in ``graph``, checked to have so many nodes."""
    if torch.compiler.is_compiling() or num_sources != num_targets:
        return as_graph(graph, (num_sources, num_targets))
    return as_graph(graph, num_sources)  # under the key by which layers and other functions find it in the cache


def codes_or_rows(owner: str, x: Tensor | QTensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(x, None, None)``, or codes and scale ``[N]`` or ``[1]`` of an input that is quantized already, and the tensor
    that its gradient goes to."""
    if isinstance(x, Tensor):
        return x, None, None
    if x.zero is not None or x.code_dtype != torch.int8:
        raise ValueError(
            f"'{owner}' expects symmetric int8 codes (got {x!r}); quantize with 'qgnn.QConfig()', or give the layer a "
            f"config with 'fmt' or 'x.dequantize()'"
        )
    per_row, per_tensor = (*x.shape[:-1], 1), (1,) * len(x.shape)
    if x.block_size is not None or tuple(x.scale.shape) not in (per_row, per_tensor):
        raise ValueError(
            f"'{owner}' expects one scale a row or one a tensor (got scales {list(x.scale.shape)}); give the layer a "
            f"config with 'fmt' or 'x.dequantize()'"
        )
    return x.codes, x.scale.reshape(-1), x.origin


def check_float(owner: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"'{owner}' expects '{name}' to be a tensor (got {type(x).__name__})")
    if not x.is_floating_point():
        raise TypeError(f"'{owner}' expects '{name}' in a floating-point type (got {x.dtype}); use '{name}.float()'")
    if x.dtype == torch.float64 and x.is_cuda:
        raise TypeError(f"'{owner}' expects '{name}' in at most 32 bits on a GPU (got {x.dtype}); use '{name}.float()'")
    if x.layout != torch.strided:
        raise TypeError(f"'{owner}' expects '{name}' to be dense (got layout {x.layout}); use '{name}.to_dense()'")


def check_rows(owner: str, name: str, x: Any) -> None:
    """Raise unless ``x`` holds floats, or codes that fit together."""
    if isinstance(x, QTensor):
        x.check(owner, name)
    else:
        check_float(owner, name, x)


def check_probability(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"'{owner}' expects '{name}' to be a probability from 0 to 1 (got {value!r})")


def check_matrix(owner: str, name: str, x: Tensor | QTensor) -> None:
    if len(x.shape) != 2:
        raise ValueError(f"'{owner}' expects '{name}' with two dimensions [N, F] (got {list(x.shape)})")


def check_product(owner: str, x: Tensor | QTensor, weight: Tensor, bias: Tensor | None) -> None:
    check_rows(owner, "x", x)
    check_float(owner, "weight", weight)
    check_matrix(owner, "weight", weight)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"'{owner}' expects 'x' with {weight.shape[-1]} columns, as 'weight' {list(weight.shape)} has "
            f"(got {list(x.shape)})"
        )
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"'{owner}' expects 'bias' of shape [{weight.shape[0]}] (got {list(bias.shape)})")
    check_device(owner, "weight", weight, x.device)
    if bias is not None:
        check_device(owner, "bias", bias, x.device)


def check_device(owner: str, name: str, t: Tensor | QTensor, device: torch.device) -> None:
    if t.device != device:
        raise ValueError(
            f"'{owner}' expects '{name}' on {device} (got {t.device}); move it with '.to({str(device)!r})'"
        )
