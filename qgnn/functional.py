"""The stateless API: quantized products and aggregations as plain functions of tensors.

Each takes ``config`` (``None``: full precision) and ``seed`` (an int or an int64 tensor; ``None`` draws one from
torch's generator). Edges run from ``edge_index[0]`` (source) to ``edge_index[1]`` (target); ``graph`` may be a
:class:`qgnn.Graph` or whatever PyG takes as edges.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from qgnn import ops, trace
from qgnn.config import QConfig, check_config, check_product_config
from qgnn.formats import Int
from qgnn.graph import Graph, as_graph, check_edge_weight
from qgnn.qtensor import QTensor
from qgnn.rng import make_seed

__all__ = ["dequantize", "graph_linear", "linear", "quantize", "spmm"]

_REDUCES = ("sum", "mean")


def quantize(x: Tensor, fmt_or_config: QConfig | Int | None = None, *, seed: int | Tensor | None = None) -> QTensor:
    """Quantize a tensor to integer codes.

    A :class:`qgnn.QConfig` uses the fused kernels, with its granularity and rounding; a format of :mod:`qgnn.formats`
    encodes along the last dimension, and rounds at random only if a ``seed`` is given. Constant input features can be
    quantized once and passed to layers in place of ``x``.

    Args:
        x: Values.
        fmt_or_config: ``None`` means ``QConfig()``: int8, a scale a row, stochastic rounding.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``[..., F]``
        - **output:** codes ``[..., F]``, scale ``[..., 1]`` (row), ``[1, ..., 1]`` (tensor) or
          ``[..., ceil(F / block_size)]`` (block)

    Raises:
        TypeError: If ``x`` is not floating point, or ``fmt_or_config`` is neither a config nor a format.

    Example:
        >>> q = qgnn.functional.quantize(torch.randn(5, 16), qgnn.QConfig(bits=4))
        >>> (q.dequantize() - x).abs().max() <= q.scale.max()
    """
    _check_float("quantize", "x", x)
    if isinstance(fmt_or_config, Int):
        return fmt_or_config.encode(x, seed=seed)
    config = QConfig() if fmt_or_config is None else fmt_or_config
    check_config(config, "quantize")
    if x.dim() == 0:
        raise ValueError("'quantize' expects 'x' with at least one dimension (got a scalar)")
    rows = x.detach().reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((x.shape[:-1].numel(), x.shape[-1]))
    codes, scale = ops.quantize(rows, _seed(config, seed, x), config.bits, config.granularity, config.block_size)
    per_block = config.granularity == "block"
    leading = (1,) * (x.dim() - 1) if config.granularity == "tensor" else x.shape[:-1]
    return QTensor(
        codes=codes.view(x.shape),
        scale=scale.view(*leading, scale.shape[-1] if per_block else 1),
        block_size=config.block_size if per_block else None,
        dtype=x.dtype,
    )


def dequantize(q: QTensor) -> Tensor:
    """The values that the codes of ``q`` stand for."""
    if not isinstance(q, QTensor):
        raise TypeError(f"'dequantize' expects a QTensor (got {type(q).__name__})")
    return q.dequantize()


def linear(
    x: Tensor | QTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Dense product :math:`y = x W^{\top} + b`, forward and backward on integer operands.

    Activations and gradients get a scale a row (or one a tensor), weights one a column of the product. With stochastic
    rounding ``y`` and the gradients are unbiased. After `"Tango: Rethinking Quantization for Graph Neural Network
    Training on GPUs" <https://arxiv.org/abs/2308.00890>`_.

    Args:
        x: Input rows; a :class:`qgnn.QTensor` of row or tensor granularity is used as it is.
        weight: As in :class:`torch.nn.Linear`.
        bias: Added in fp32.
        config: How to quantize; ``None`` is :func:`torch.nn.functional.linear`.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``x [..., K]``, ``weight [M, K]``, ``bias [M]``
        - **output:** ``[..., M]``, of ``x``'s type (of ``weight``'s, if ``x`` is a QTensor)

    Raises:
        ValueError: If the widths disagree.

    Example:
        >>> y = qgnn.functional.linear(torch.randn(9, 16), torch.randn(4, 16), config=qgnn.QConfig())
    """
    check_product_config(config, "linear")
    _check_product("linear", x, weight, bias)
    if config is None:
        value = x.dequantize().to(weight.dtype) if isinstance(x, QTensor) else x
        y = torch.nn.functional.linear(value, weight, bias)
        if not torch.compiler.is_compiling() and trace.recording():
            trace.report("matmul.forward", str(y.dtype).removeprefix("torch."), "torch", (value, weight, bias, y))
        return y
    codes_or_x, scale = _operand("linear", x)
    rows = codes_or_x.reshape(prod(codes_or_x.shape[:-1]), codes_or_x.shape[-1])
    y, _, _ = ops.matmul(
        rows,
        scale,
        weight,
        bias,
        _seed(config, seed, rows),
        config.bits,
        config.granularity,
        _keeps_codes(config, weight),
    )
    return y.view(*codes_or_x.shape[:-1], weight.shape[0])


def spmm(
    graph: Any,
    x: Tensor,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Neighbor aggregation :math:`y_i = \sum_{j \to i} w_{ji} x_j`, or the mean of the same terms.

    Rows of ``x`` are rounded to codes before they are gathered, and so are the rows of the gradient, with a scale of
    their own; sums are fp32. A node without incoming edges gets 0. ``edge_weight`` may need a gradient.

    Args:
        graph: Edges; an ``edge_index`` is sorted once and remembered.
        x: One row a source node.
        edge_weight: One weight an edge, in the order of the given edges.
        reduce: ``"sum"`` or ``"mean"``.
        config: How to quantize; ``None`` keeps ``x``'s type, through the same kernels.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``x [S, F]``, ``edge_weight [E]`` or ``[E, 1]``
        - **output:** ``[T, F]``, of ``x``'s type (of ``weight``'s, if ``x`` is a QTensor)

    Raises:
        ValueError: If ``x`` has not one row a source node, or ``reduce`` is unknown.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
        >>> y = qgnn.functional.spmm(edge_index, torch.randn(3, 8), reduce="mean", config=qgnn.QConfig())
    """
    check_product_config(config, "spmm")
    _check_float("spmm", "x", x)
    _check_matrix("spmm", "x", x)
    graph = _as_graph("spmm", graph, x)
    return _aggregate(graph, x, edge_weight, reduce, None, config, seed)


def graph_linear(
    graph: Any,
    x: Tensor | QTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Dense product, then aggregation: :math:`y_i = \sum_{j \to i} w_{ji} W x_j + b`.

    :func:`linear` followed by :func:`spmm` in one operator, so that the rows between the two stay int8, forward and
    backward. This is the body of a GCN layer.

    Args:
        graph: Edges, as in :func:`spmm`.
        x: One row a source node, or a :class:`qgnn.QTensor` of them.
        weight: As in :class:`torch.nn.Linear`.
        bias: Added after the aggregation.
        edge_weight: One weight an edge; may need a gradient.
        reduce: ``"sum"`` or ``"mean"``.
        config: How to quantize; ``None`` is full precision.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``x [S, K]``, ``weight [M, K]``, ``bias [M]``, ``edge_weight [E]``
        - **output:** ``[T, M]``, of ``x``'s type (of ``weight``'s, if ``x`` is a QTensor)

    Raises:
        ValueError: If sizes disagree or ``reduce`` is unknown.
    """
    check_product_config(config, "graph_linear")
    _check_product("graph_linear", x, weight, bias)
    _check_matrix("graph_linear", "x", x)
    graph = _as_graph("graph_linear", graph, x)
    if config is None:
        return _aggregate(graph, linear(x, weight), edge_weight, reduce, bias, None, None)
    codes_or_x, scale = _operand("graph_linear", x)
    csr_weight, csc_weight = _edge_weights("graph_linear", graph, edge_weight, weight.dtype)
    learns_weight = csr_weight is not None and csr_weight.requires_grad and torch.is_grad_enabled()
    out, *_ = ops.graph_linear(
        codes_or_x,
        scale,
        weight,
        bias,
        csr_weight,
        csc_weight,
        _row_factor("graph_linear", graph, reduce, weight.dtype),
        *_structure(graph, codes_or_x, weight, csr_weight),
        _seed(config, seed, codes_or_x),
        config.bits,
        config.granularity,
        _keeps_codes(config, weight),
        learns_weight,
    )
    return out


def _aggregate(
    graph: Graph,
    x: Tensor,
    edge_weight: Tensor | None,
    reduce: str,
    bias: Tensor | None,
    config: QConfig | None,
    seed: int | Tensor | None,
) -> Tensor:
    csr_weight, csc_weight = _edge_weights("spmm", graph, edge_weight, x.dtype)
    learns_weight = csr_weight is not None and csr_weight.requires_grad and torch.is_grad_enabled()
    out, _, _ = ops.spmm(
        x,
        csr_weight,
        csc_weight,
        _row_factor("spmm", graph, reduce, x.dtype),
        bias,
        *_structure(graph, x, csr_weight),
        None if config is None else _seed(config, seed, x),
        0 if config is None else config.bits,
        "row" if config is None else config.granularity,
        learns_weight and config is not None and config.save == "int8",
    )
    return out


def _seed(config: QConfig, seed: int | Tensor | None, x: Tensor) -> Tensor | None:
    return make_seed(seed, x.device) if config.stochastic else None


def _keeps_codes(config: QConfig, weight: Tensor) -> bool:
    return config.save == "int8" and weight.requires_grad and torch.is_grad_enabled()


def _structure(graph: Graph, *operands: Tensor | None) -> tuple[Tensor, ...]:
    """The graph's index tensors; the transposed ones only where a backward pass will need them."""
    csr = (graph.csr.indptr, graph.csr.index)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return (*csr, graph.csc.indptr, graph.csc.index, graph.csc.order)
    return (*csr, *csr, graph.csr.order)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _edge_weights(
    owner: str, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Weights in CSR order, and in CSC order too if they are constants of the graph."""
    compute_dtype = _compute_dtype(dtype)
    if edge_weight is None:
        if graph.weight is None:
            return None, None
        csc_weight = graph.weight_t if torch.is_grad_enabled() and not graph.weight.requires_grad else None
        return graph.weight.to(compute_dtype), None if csc_weight is None else csc_weight.to(compute_dtype)
    if graph.weight is not None:
        raise ValueError(f"'{owner}' got 'edge_weight' and a graph that has weights; give one of them")
    _check_device(owner, "edge_weight", edge_weight, graph.device)
    return graph.to_csr_order(check_edge_weight(edge_weight, graph.num_edges)).to(compute_dtype), None


def _row_factor(owner: str, graph: Graph, reduce: str, dtype: torch.dtype) -> Tensor | None:
    if reduce not in _REDUCES:
        raise ValueError(f"'{owner}' expects 'reduce' to be one of {_REDUCES} (got {reduce!r})")
    if reduce == "sum":
        return None
    return graph.in_degree.clamp_min(1).to(dtype).reciprocal() if dtype == torch.float64 else graph.mean_factor


def _as_graph(owner: str, graph: Any, x: Tensor | QTensor) -> Graph:
    num_rows = x.shape[0]
    if isinstance(graph, Graph):
        if graph.num_sources != num_rows:
            raise ValueError(
                f"'{owner}' expects 'x' with one row for each of the graph's {graph.num_sources} source nodes "
                f"(got {num_rows})"
            )
    else:
        graph = as_graph(graph, num_rows)
    _check_device(owner, "x", x.codes if isinstance(x, QTensor) else x, graph.device)
    return graph


def _operand(owner: str, x: Tensor | QTensor) -> tuple[Tensor, Tensor | None]:
    """``(x, None)``, or codes and scale ``[N]`` or ``[1]`` of an input that is quantized already."""
    if isinstance(x, Tensor):
        return x, None
    if x.zero is not None or x.codes.dtype != torch.int8:
        raise ValueError(f"'{owner}' expects symmetric int8 codes (got {x!r}); quantize with 'qgnn.QConfig()'")
    per_row, per_tensor = (*x.shape[:-1], 1), (1,) * len(x.shape)
    if x.block_size is not None or tuple(x.scale.shape) not in (per_row, per_tensor):
        raise ValueError(f"'{owner}' expects one scale a row or one a tensor (got scales {list(x.scale.shape)})")
    return x.codes, x.scale.reshape(-1)


def _check_float(owner: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"'{owner}' expects '{name}' to be a tensor (got {type(x).__name__})")
    if not x.is_floating_point():
        raise TypeError(f"'{owner}' expects '{name}' in a floating-point type (got {x.dtype}); use '{name}.float()'")
    if x.dtype == torch.float64 and x.is_cuda:
        raise TypeError(f"'{owner}' expects '{name}' in at most 32 bits on a GPU (got {x.dtype}); use '{name}.float()'")
    if x.layout != torch.strided:
        raise TypeError(f"'{owner}' expects '{name}' to be dense (got layout {x.layout}); use '{name}.to_dense()'")


def _check_matrix(owner: str, name: str, x: Tensor | QTensor) -> None:
    if len(x.shape) != 2:
        raise ValueError(f"'{owner}' expects '{name}' with two dimensions [N, F] (got {list(x.shape)})")


def _check_product(owner: str, x: Tensor | QTensor, weight: Tensor, bias: Tensor | None) -> None:
    if not isinstance(x, QTensor):
        _check_float(owner, "x", x)
    _check_float(owner, "weight", weight)
    _check_matrix(owner, "weight", weight)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"'{owner}' expects 'x' with {weight.shape[-1]} columns, as 'weight' {list(weight.shape)} has "
            f"(got {list(x.shape)})"
        )
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"'{owner}' expects 'bias' of shape [{weight.shape[0]}] (got {list(bias.shape)})")
    device = x.codes.device if isinstance(x, QTensor) else x.device
    _check_device(owner, "weight", weight, device)
    if bias is not None:
        _check_device(owner, "bias", bias, device)


def _check_device(owner: str, name: str, t: Tensor, device: torch.device) -> None:
    if t.device != device:
        raise ValueError(
            f"'{owner}' expects '{name}' on {device} (got {t.device}); move it with '.to({str(device)!r})'"
        )
