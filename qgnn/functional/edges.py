"""Values of edges: scores from the nodes at their ends, and softmax over the edges into a node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn import ops
from qgnn.config import QConfig, check_product_config
from qgnn.functional._checks import (
    check_device,
    check_float,
    check_rows,
    codes_or_rows,
    draw_seed,
    graph_between,
    structure,
)
from qgnn.functional._operands import stream_of
from qgnn.functional._rounded import rounded, rounded_attention
from qgnn.graph import Graph, as_graph, identity, to_edges
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached

_OPS = ("dot", "add")


def sddmm(
    graph: Any,
    x_source: Tensor | QTensor,
    x_target: Tensor | QTensor,
    op: str = "dot",
    *,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""One result an edge from the rows of its ends: :math:`\langle x_i, x_j \rangle`, or :math:`x_i + x_j`.

    Dot products of int8 rows are exact integers, times two scales. Rows with several heads are multiplied head by head,
    and rounded with a scale a head. Both sides are rounded independently, so with stochastic rounding the product is
    unbiased; so are its gradients, which are sums in full precision over the other side's rows.

    Args:
        graph: Edges; weights of theirs play no part.
        x_source: One row a source node; a :class:`qgnn.QTensor` has no gradient.
        x_target: One row a target node, of the same width and type.
        op: ``"dot"`` or ``"add"``.
        config: How to quantize rows for dot products; ``None`` multiplies them as they are. With granularity ``"row"``
            a head of a row has its own scale, with ``"tensor"`` each side has one.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``x_source [S, F]`` or ``[S, H, D]``, ``x_target [T, F]`` or ``[T, H, D]``
        - **output:** ``[E]`` or ``[E, H]`` with ``"dot"``, ``[E, F]`` or ``[E, H, D]`` with ``"add"``; of the type of
          the rows, in the order of the given edges

    Raises:
        TypeError: If the rows hold no floats or their types disagree, or ``config`` is no QConfig.
        ValueError: If sizes or devices disagree, ``op`` is unknown, or ``config`` is given with ``op="add"``.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> x = torch.randn(3, 8)
        >>> score = qgnn.functional.sddmm(edge_index, x, x, config=qgnn.QConfig())
    """
    check_product_config(config, "sddmm")
    if op not in _OPS:
        raise ValueError(f"'sddmm' expects 'op' to be one of {_OPS} (got {op!r})")
    if op == "add" and config is not None:
        raise ValueError("'sddmm' quantizes with op='dot' only (got a config with op='add'); use config=None")
    _check_rows(x_source, x_target)
    graph = graph_between(graph, x_source.shape[0], x_target.shape[0])
    for name, x in (("x_source", x_source), ("x_target", x_target)):
        check_device("sddmm", name, x, graph.device)
    if config is not None and not config.is_integer:
        x_source, x_target = _rounded_ends(x_source, x_target, config, seed)
        config = None
    if config is None and isinstance(x_source, QTensor) != isinstance(x_target, QTensor):
        x_source, x_target = (x.dequantize() if isinstance(x, QTensor) else x for x in (x_source, x_target))
    shape = x_source.shape[1:]
    heads = shape[0] if len(shape) == 2 else 1
    (source, source_scale), (target, target_scale) = _flat(x_source), _flat(x_target)
    learns = torch.is_grad_enabled() and (source.requires_grad or target.requires_grad)
    out, *_ = ops.sddmm(
        target,
        target_scale,
        source,
        source_scale,
        *structure(graph, source, target),
        None if config is None else draw_seed(config, seed, source),
        0 if config is None else config.bits,
        "row" if config is None else config.granularity,
        op,
        heads,
        learns and config is not None and config.keeps_codes,
    )
    out = out.view(graph.num_edges, *(shape if op == "add" else shape[:-1]))
    return graph.to_given_order(out.to(x_source.dtype))


def edge_softmax(
    graph: Any, scores: Tensor, *, config: QConfig | None = None, seed: int | Tensor | None = None
) -> Tensor:
    r"""Softmax over the edges into each target: :math:`\exp(s_e) / \sum_{k \to i} \exp(s_k)`, head by head.

    The largest score is subtracted first. A score of -inf gives 0. A NaN, an inf, or nothing but -inf among the scores
    of a target and head makes all its results NaN, as in :func:`torch.softmax`.

    Args:
        graph: Edges. What does not tell its number of nodes is searched for the largest one; a :class:`qgnn.Graph`
            spares that, and is what a compiled function needs.
        scores: One score an edge, or one an edge and head, in the order of the given edges.
        config: The format of its component ``"attention"`` is that of the results, with scales along the edges sorted
            by target, over which a target sums; there is none unless it is named.
        seed: Seed of stochastic rounding.

    Shapes:
        - **input:** ``scores [E]`` or ``[E, H]``
        - **output:** as ``scores``, of the same type; computed in fp32 (float64 for float64 scores)

    Raises:
        TypeError: If ``scores`` holds no floats, or ``config`` is no QConfig.
        ValueError: If there is not one score (or row of them) an edge, or it lies on another device.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 0]])
        >>> alpha = qgnn.functional.edge_softmax(edge_index, torch.randn(3, 4))
    """
    check_product_config(config, "edge_softmax")
    check_float("edge_softmax", "scores", scores)
    graph = _graph_of_edges(graph)
    if scores.dim() not in (1, 2) or scores.shape[0] != graph.num_edges:
        raise ValueError(
            f"'edge_softmax' expects 'scores' of shape [{graph.num_edges}] or [{graph.num_edges}, H], a row an edge "
            f"(got {list(scores.shape)})"
        )
    check_device("edge_softmax", "scores", scores, graph.device)
    by_head = graph.to_csr_order(scores if scores.dim() == 2 else scores.unsqueeze(1))
    weights = ops.softmax(by_head, graph.csr.indptr)
    if config is not None:
        weights = rounded_attention(weights, config, draw_seed(config, seed, weights))
    return graph.to_given_order(weights.view(scores.shape))


def attention_weights(graph: Any, score_source: Tensor, score_target: Tensor, negative_slope: float = 0.2) -> Tensor:
    r"""Weights of a graph attention layer:
    :math:`\alpha_{ji} = \mathrm{softmax}_{j \to i}(\mathrm{LeakyReLU}(s_j + t_i))`.

    Gather, sum, LeakyReLU and softmax are one pass over the edges, which keeps the result alone for the backward pass.
    After `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_. It differs from :func:`edge_softmax` of a
    sum in speed only; NaN and infinite scores are treated as there.

    Args:
        graph: Edges; weights of theirs play no part.
        score_source: One score a source node and head.
        score_target: One score a target node and head, of the same type.
        negative_slope: Slope of the LeakyReLU below 0.

    Shapes:
        - **input:** ``score_source [S, H]``, ``score_target [T, H]``
        - **output:** ``[E, H]``, of the scores' type, in the order of the given edges

    Raises:
        TypeError: If the scores hold no floats, or are of two types.
        ValueError: If the scores are no matrices with a column a head, have not one row a node, or lie on different
            devices.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 0]])
        >>> alpha = qgnn.functional.attention_weights(edge_index, torch.randn(3, 4), torch.randn(3, 4))
    """
    for name, score in (("score_source", score_source), ("score_target", score_target)):
        check_float("attention_weights", name, score)
        if score.dim() != 2 or score.shape[1] != score_source.shape[-1]:
            raise ValueError(
                f"'attention_weights' expects '{name}' of shape [N, H], with a column a head of both scores (got "
                f"{list(score_source.shape)} and {list(score_target.shape)})"
            )
    if score_source.dtype != score_target.dtype:
        raise TypeError(
            f"'attention_weights' expects scores of one type (got {score_source.dtype} and {score_target.dtype})"
        )
    graph = graph_between(graph, score_source.shape[0], score_target.shape[0])
    check_device("attention_weights", "score_source", score_source, graph.device)
    check_device("attention_weights", "score_target", score_target, graph.device)
    indptr, index, indptr_t, _, order_t = structure(graph, score_source, score_target)
    weights = ops.attention_scores(score_target, score_source, indptr, index, indptr_t, order_t, float(negative_slope))
    return graph.to_given_order(weights)


def _rounded_ends(
    x_source: Tensor | QTensor, x_target: Tensor | QTensor, config: QConfig, seed: int | Tensor | None
) -> list[Tensor | QTensor]:
    """Both ends' rows in the format of messages."""
    rounding = draw_seed(config, seed, x_source.scale if isinstance(x_source, QTensor) else x_source)
    fmt = config.format_of("messages")
    return [
        x if isinstance(x, QTensor) else rounded(x, fmt, config.granularity, stream_of(rounding, number))
        for number, x in enumerate((x_source, x_target))
    ]


def _check_rows(x_source: Tensor | QTensor, x_target: Tensor | QTensor) -> None:
    for name, x in (("x_source", x_source), ("x_target", x_target)):
        check_rows("sddmm", name, x)
        if len(x.shape) not in (2, 3) or (len(x.shape) == 3 and x.shape[1] == 0):
            raise ValueError(f"'sddmm' expects '{name}' of shape [N, F] or [N, H, D], H > 0 (got {list(x.shape)})")
    if x_source.shape[1:] != x_target.shape[1:]:
        raise ValueError(
            f"'sddmm' expects rows of one shape (got {list(x_source.shape)} for 'x_source' and {list(x_target.shape)} "
            f"for 'x_target')"
        )
    if x_source.dtype != x_target.dtype:
        raise TypeError(
            f"'sddmm' expects rows of one type (got {x_source.dtype} for 'x_source' and {x_target.dtype} for "
            f"'x_target')"
        )


def _flat(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None]:
    """Rows or codes [N, F] without a dimension of heads, and scales [1], [N] or [N, H]."""
    rows, scale, origin = codes_or_rows("sddmm", x)
    if origin is not None:
        raise ValueError("'sddmm' has no gradient for codes (got some with an origin); give it their 'origin' itself")
    if rows.dim() == 2:
        return rows, scale
    num_rows, heads, width = rows.shape
    if scale is not None and scale.numel() == num_rows * heads and heads > 1:
        scale = scale.view(num_rows, heads)
    return rows.reshape(num_rows, heads * width), scale


def _graph_of_edges(edges: Any) -> Graph:
    """The graph of edges without rows to tell how many nodes there are."""
    if isinstance(edges, Graph):
        return edges

    def count() -> int:
        edge_index = to_edges(edges)[0]
        return int(edge_index.max()) + 1 if edge_index.numel() else 0

    return as_graph(edges, cached(identity(edges, weights=False), "num_nodes", count))
