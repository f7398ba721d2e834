"""Sums over neighbors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from qgnn import ops
from qgnn.config import QConfig, check_product_config
from qgnn.edge_checks import check_edge_weight
from qgnn.functional._checks import (
    check_device,
    check_float,
    check_matrix,
    check_product,
    check_rows,
    codes_or_rows,
    compute_dtype,
    draw_seed,
    epilogue_of,
    graph_of,
    keeps_codes,
    structure,
)
from qgnn.functional._packed import kept_rows
from qgnn.functional._rounded import aggregated, message_rows, own_nodes_seed, rounded
from qgnn.functional.activation import activation as activation_behind
from qgnn.functional.dense import linear
from qgnn.graph import Graph, as_graph
from qgnn.halo_graph import HaloGraph
from qgnn.qtensor import QTensor

_SUMS = ("sum", "mean")
_EXTREMA = ("max", "min")
_SIDES = ("target", "source")


def spmm(
    graph: Any,
    x: Tensor | QTensor,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    activation: str | None = None,
    dropout: float = 0,  # an integer: torch.compile makes a symbol of a float
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Neighbor aggregation :math:`y_i = \sum_{j \to i} w_{ji} x_j`, or the mean, maximum or minimum of the same terms.

    Rows of ``x`` are rounded to codes before they are gathered, and so are the rows of a sum's gradient, with a scale
    of their own; sums are fp32. Maximum and minimum are taken element by element; the gradient of each goes, unrounded,
    to the one term that it came from, the first of equal ones. A node without incoming edges gets 0. ``edge_weight``
    may need a gradient.

    Args:
        graph: Edges; an ``edge_index`` is sorted once and remembered, a
            :class:`qgnn.distributed.PartitionedGraph` takes sums and means.
        x: One row a source node. A :class:`qgnn.QTensor` of row or tensor granularity is used as it is, with or without
            ``config``: so constant features, or rows that several products share, are quantized once.
        edge_weight: One weight an edge, in the order of the given edges; for a sum or mean also one an edge and head,
            the ``F / H`` columns of a head each with their own.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        activation: ``"relu"`` to apply it to a sum or mean, in the aggregation's own pass; what is kept of it is one
            bit an element.
        dropout: Probability that an element of a sum or mean is dropped after that, in steps of ``2**-16``. In
            evaluation, give 0.
        config: How to quantize; ``None`` keeps ``x``'s type, through the same kernels.
        seed: Seed of stochastic rounding and dropout.

    Shapes:
        - **input:** ``x [S, F]``, ``edge_weight [E]``, ``[E, 1]`` or ``[E, H]``
        - **output:** ``[T, F]``, of ``x``'s type (of the type that was quantized, if ``x`` is a QTensor)

    Raises:
        TypeError: If ``x`` is no tensor of floats, or ``config`` no QConfig.
        ValueError: If ``x`` has not one row a source node, ``edge_weight`` not one value an edge or head, ``reduce`` or
            ``activation`` is unknown, ``dropout`` is no probability, maxima or minima get an epilogue, weights are
            given twice, or tensors lie on different devices.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
        >>> y = qgnn.functional.spmm(edge_index, torch.randn(3, 8), reduce="mean", config=qgnn.QConfig())
    """
    check_product_config(config, "spmm")
    check_rows("spmm", "x", x)
    check_matrix("spmm", "x", x)
    graph = graph_of("spmm", graph, x)
    if reduce in _EXTREMA and not isinstance(graph, HaloGraph):
        if activation is not None or dropout:
            raise ValueError(
                f"'spmm' applies 'activation' and 'dropout' to sums and means (got reduce={reduce!r}); apply them to "
                f"its result"
            )
        return _extremum(graph, x, edge_weight, reduce == "max", config, seed)
    return _aggregate(
        "spmm", graph, x, edge_weight, reduce, None, (activation, dropout), config, seed, _SUMS + _EXTREMA
    )


def graph_linear(
    graph: Any,
    x: Tensor | QTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    activation: str | None = None,
    dropout: float = 0,  # an integer: torch.compile makes a symbol of a float
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
        edge_weight: One weight an edge, or one an edge and head, the ``M / H`` columns of a head each with their own;
            may need a gradient.
        reduce: ``"sum"`` or ``"mean"``.
        activation: ``"relu"`` to apply it to ``y``, in the aggregation's own pass; what is kept of it is one bit an
            element.
        dropout: Probability that an element of ``y`` is dropped after that, in steps of ``2**-16``. In
            evaluation, give 0.
        config: How to quantize; ``None`` is full precision.
        seed: Seed of stochastic rounding and dropout.

    Shapes:
        - **input:** ``x [S, K]``, ``weight [M, K]``, ``bias [M]``, ``edge_weight [E]``, ``[E, 1]`` or ``[E, H]``; with
          ``config``, ``K`` and ``M`` up to 131,071, which int32 sums hold
        - **output:** ``[T, M]``, of ``x``'s type (of the type that was quantized, if ``x`` is a QTensor)

    Raises:
        TypeError: If ``x``, ``weight`` or ``bias`` hold no floats, or ``config`` is no QConfig.
        ValueError: If sizes or devices disagree, ``reduce`` or ``activation`` is unknown, ``dropout`` is no
            probability, or weights are given twice.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
        >>> weight = torch.randn(4, 8, requires_grad=True)
        >>> y = qgnn.functional.graph_linear(edge_index, torch.randn(3, 8), weight, config=qgnn.QConfig())
    """
    check_product_config(config, "graph_linear")
    check_product("graph_linear", x, weight, bias)
    check_matrix("graph_linear", "x", x)
    graph = graph_of("graph_linear", graph, x)
    if config is None or not config.is_integer or isinstance(graph, HaloGraph):
        y = linear(x, weight, config=config, seed=seed)
        return _aggregate("graph_linear", graph, y, edge_weight, reduce, bias, (activation, dropout), config, seed)
    codes_or_x, scale, x_float = codes_or_rows("graph_linear", x)
    csr_weight, csc_weight = _edge_weights("graph_linear", graph, edge_weight, weight.dtype, heads_of=weight.shape[0])
    learns_weight = csr_weight is not None and csr_weight.requires_grad and torch.is_grad_enabled()
    rounding = draw_seed(config, seed, codes_or_x)
    kept = kept_rows(config, x, weight, seed if rounding is None else rounding)
    out, *_ = ops.graph_linear(
        codes_or_x,
        scale,
        weight,
        bias,
        csr_weight,
        csc_weight,
        _row_factor("graph_linear", graph, reduce, codes_or_x.dtype),
        *structure(graph, codes_or_x, x_float, weight, csr_weight, bias),
        rounding,
        config.bits,
        config.granularity,
        kept.packed is None and keeps_codes(config, weight),
        learns_weight,
        *epilogue_of("graph_linear", activation, dropout, seed, codes_or_x, x_float, weight, bias, csr_weight),
        *kept,
        x_float,
    )
    return out.to(x.dtype)


def incidence_sum(
    graph: Any,
    edge_x: Tensor,
    side: str = "target",
    *,
    num_nodes: int | tuple[int, int] | None = None,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Sum of the values of each node's edges, :math:`y = B x`, with :math:`B` the incidence matrix of one side.

    What the gradient of :math:`e_{ji} = u_i + v_j` needs, for one. In `"Tango: Rethinking Quantization for Graph Neural
    Network Training on GPUs" <https://arxiv.org/abs/2308.00890>`_ it is the product of two operands in place of three;
    here :math:`B` is not even made: it is the permutation that sorts the edges. The gradient of an edge is the row of
    its node, unrounded.

    Args:
        graph: Edges; weights of theirs play no part.
        edge_x: Values of the given edges.
        side: ``"target"`` sums the edges into a node, ``"source"`` those out of it.
        num_nodes: Number of nodes, or ``(num_sources, num_targets)``; a :class:`qgnn.Graph` knows its own.
        config: How to quantize the values; ``None`` sums them as they are.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``edge_x [E]`` or ``[E, ...]``
        - **output:** ``[N]`` or ``[N, ...]``, of ``edge_x``'s type; sums are fp32 (float64 for float64 values)

    Raises:
        TypeError: If ``edge_x`` is no tensor of floats, or ``config`` no QConfig.
        ValueError: If ``edge_x`` has not one row an edge, ``side`` is unknown, ``num_nodes`` is missing or wrong,
            or tensors lie on different devices.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
        >>> y = qgnn.functional.incidence_sum(edge_index, torch.rand(3), num_nodes=3)
    """
    check_product_config(config, "incidence_sum")
    check_float("incidence_sum", "edge_x", edge_x)
    if side not in _SIDES:
        raise ValueError(f"'incidence_sum' expects 'side' to be one of {_SIDES} (got {side!r})")
    if num_nodes is None and not isinstance(graph, Graph):
        raise ValueError("'incidence_sum' expects 'num_nodes' where 'graph' is no qgnn.Graph (got None)")
    graph = graph if num_nodes is None else as_graph(graph, num_nodes)
    check_device("incidence_sum", "edge_x", edge_x, graph.device)
    if edge_x.shape[:1] != (graph.num_edges,):
        raise ValueError(
            f"'incidence_sum' expects 'edge_x' with one row for each of {graph.num_edges} edges (got "
            f"{list(edge_x.shape)})"
        )
    indptr, order, node = graph.incidence(side)
    rows = edge_x.reshape(graph.num_edges, prod(edge_x.shape[1:]))
    if config is not None and not config.is_integer:
        rounding = draw_seed(config, seed, rows)
        rows = rounded(rows, config.format_of("messages"), config.granularity, rounding)
        out = ops.incidence_sum(rows, indptr, order, node, *_rounding(None, seed, rows))
        out = aggregated(out, config, rounding, with_gradient=False)
        return out.view(indptr.shape[0] - 1, *edge_x.shape[1:])
    out = ops.incidence_sum(rows, indptr, order, node, *_rounding(config, seed, rows))
    return out.view(indptr.shape[0] - 1, *edge_x.shape[1:])


def _aggregate(
    owner: str,
    graph: Graph,
    x: Tensor | QTensor,
    edge_weight: Tensor | None,
    reduce: str,
    bias: Tensor | None,
    epilogue: tuple[str | None, float],
    config: QConfig | None,
    seed: int | Tensor | None,
    reduces: tuple[str, ...] = _SUMS,
) -> Tensor:
    if config is not None and not config.is_integer:
        return _mixed_aggregate(owner, graph, x, edge_weight, reduce, bias, epilogue, config, seed, reduces)
    if isinstance(graph, HaloGraph):
        return _halo_aggregate(owner, graph, x, edge_weight, reduce, bias, epilogue, config, seed)
    rows, scale, x_float = codes_or_rows(owner, x)
    csr_weight, csc_weight = _edge_weights(owner, graph, edge_weight, x.dtype, heads_of=x.shape[1])
    out, *_ = ops.spmm(
        rows,
        scale,
        csr_weight,
        csc_weight,
        _row_factor(owner, graph, reduce, rows.dtype, reduces),
        bias,
        *structure(graph, rows, x_float, csr_weight, bias),
        *_rounding(config, seed, rows),
        _keeps_rows(config, csr_weight),
        *epilogue_of(owner, *epilogue, seed, rows, x_float, csr_weight, bias),
        x_float,
    )
    return out.to(x.dtype)


def _mixed_aggregate(
    owner: str,
    graph: Graph,
    x: Tensor | QTensor,
    edge_weight: Tensor | None,
    reduce: str,
    bias: Tensor | None,
    epilogue: tuple[str | None, float],
    config: QConfig,
    seed: int | Tensor | None,
    reduces: tuple[str, ...],
) -> Tensor:
    rounding = draw_seed(config, seed, x.scale if isinstance(x, QTensor) else x)
    rows, kernel = message_rows(x, config, rounding)
    out = _aggregate(owner, graph, rows, edge_weight, reduce, None, (None, 0), kernel, rounding, reduces)
    out = aggregated(out, config, rounding, with_gradient=kernel is None)
    return _finished(out, bias, epilogue, seed)


def _halo_aggregate(
    owner: str,
    graph: HaloGraph,
    x: Tensor | QTensor,
    edge_weight: Tensor | None,
    reduce: str,
    bias: Tensor | None,
    epilogue: tuple[str | None, float],
    config: QConfig | None,
    seed: int | Tensor | None,
) -> Tensor:
    """The rows of own nodes are summed while those of the halo are on their way, which are not rounded once more."""
    if edge_weight is not None:
        raise ValueError(f"'{owner}' expects the weights of {graph!r} within it (got 'edge_weight' beside it)")
    if reduce not in _SUMS:
        raise ValueError(f"'{owner}' expects 'reduce' to be one of {_SUMS} on {graph!r} (got {reduce!r})")
    if reduce == "mean":
        graph = graph.averaged(compute_dtype(x.dtype))
    receive = graph.exchange(x)
    out = _aggregate(owner, graph.inner, x, None, "sum", None, (None, 0), config, own_nodes_seed(config, seed, x))
    out = out + _aggregate(owner, graph.halo, receive(), None, "sum", None, (None, 0), None, None)
    return _finished(out, bias, epilogue, seed)


def _finished(
    out: Tensor, bias: Tensor | None, epilogue: tuple[str | None, float], seed: int | Tensor | None
) -> Tensor:
    """A bias and an epilogue in a pass of their own."""
    kind, dropout = epilogue
    if bias is None and kind is None and not dropout:
        return out
    return activation_behind(out, kind, dropout, bias=bias, seed=seed)


def _extremum(
    graph: Graph,
    x: Tensor | QTensor,
    edge_weight: Tensor | None,
    largest: bool,
    config: QConfig | None,
    seed: int | Tensor | None,
) -> Tensor:
    if config is not None and not config.is_integer:
        rounding = draw_seed(config, seed, x.scale if isinstance(x, QTensor) else x)
        rows, _ = message_rows(x, config, rounding)
        out = _extremum(graph, rows, edge_weight, largest, None, rounding)
        return aggregated(out, config, rounding, with_gradient=False)
    rows, scale, x_float = codes_or_rows("spmm", x)
    csr_weight, _ = _edge_weights("spmm", graph, edge_weight, x.dtype)
    out, *_ = ops.spmm_extremum(
        rows,
        scale,
        csr_weight,
        graph.csr.indptr,
        graph.csr.index,
        *_rounding(config, seed, rows),
        largest,
        _keeps_rows(config, csr_weight),
        x_float,
    )
    return out.to(x.dtype)


def _rounding(config: QConfig | None, seed: int | Tensor | None, x: Tensor) -> tuple[Tensor | None, int, str]:
    """Seed, bits (0: full precision) and granularity."""
    if config is None:
        return None, 0, "row"
    return draw_seed(config, seed, x), config.bits, config.granularity


def _keeps_rows(config: QConfig | None, weight: Tensor | None) -> bool:
    """Whether the codes of the rows are what is kept for the gradient of the edge weights."""
    return config is not None and weight is not None and keeps_codes(config, weight)


def _edge_weights(
    owner: str, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype, heads_of: int | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Weights in CSR order, and in CSC order too if they are constants of the graph; of ``heads_of`` columns, each head
    may have its own."""
    dtype = compute_dtype(dtype)
    if edge_weight is None:
        if graph.weight is None:
            return None, None
        csc_weight = graph.weight_t if torch.is_grad_enabled() and not graph.weight.requires_grad else None
        return graph.weight.to(dtype), None if csc_weight is None else csc_weight.to(dtype)
    if graph.weight is not None:
        raise ValueError(f"'{owner}' got 'edge_weight' and a graph that has weights; give one of them")
    check_device(owner, "edge_weight", edge_weight, graph.device)
    weight = check_edge_weight(edge_weight, graph.num_edges, heads_of)
    return graph.to_csr_order(weight).to(dtype), None


def _row_factor(
    owner: str, graph: Graph, reduce: str, dtype: torch.dtype, reduces: tuple[str, ...] = _SUMS
) -> Tensor | None:
    if reduce not in _SUMS:
        raise ValueError(f"'{owner}' expects 'reduce' to be one of {reduces} (got {reduce!r})")
    if reduce == "sum":
        return None
    return graph.in_degree.clamp_min(1).to(dtype).reciprocal() if dtype == torch.float64 else graph.mean_factor
