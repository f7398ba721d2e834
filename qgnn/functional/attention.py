"""Graph attention: neighbor rows weighted by a softmax over the edges of a target."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qgnn import ops
from qgnn.activation import dropout_threshold
from qgnn.config import QConfig, check_config
from qgnn.functional._checks import check_device, check_float, check_probability, draw_seed, graph_between, structure
from qgnn.functional._operands import stream_of
from qgnn.functional._rounded import aggregated, attention_config, rounded
from qgnn.graph import Graph
from qgnn.rng import make_seed


def attention(
    graph: Any,
    x: Tensor,
    score_source: Tensor,
    score_target: Tensor,
    negative_slope: float = 0.2,
    dropout: float = 0,
    *,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Attention of a GAT layer: :math:`y_i = \sum_{j \to i} \alpha_{ji} x_j` with
    :math:`\alpha_{ji} = \mathrm{softmax}_{j \to i}(\mathrm{LeakyReLU}(s_j + t_i + W e_{ji}))`.

    After `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_. Gather, scores, softmax, dropout and sum are
    one pass over the edges, and two backward, by target and by source. No tensor with a value an edge is made, but for
    the scores of ``edge_attr``, made anew in each pass. For the backward pass the rows are kept, their codes with a
    ``config``, and one number a target and head. An edge whose weight is dropped has a gradient of its score all the
    same, since the softmax counted it.

    With a ``config`` rows and the incoming gradient are rounded, with a scale for each head of a row. Scores, softmax
    and sums are full precision, so with stochastic rounding the result is unbiased, and given it, so is every gradient;
    that of ``score_target`` is exact, and 0 where the scores of a target's edges all have one sign. The codes that
    kernels gather have one scale a head of a row: rows of other formats than one symmetric integer are rounded before,
    and what is kept of them are their values.

    Args:
        graph: Edges; weights of theirs play no part.
        x: One row a head of each source.
        score_source: One score a head of each source.
        score_target: One score a head of each target.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout: Probability of dropping an edge's weight, in steps of 2**-16; drawn anew for each head. It is applied
            whenever it is not 0: a layer passes 0 in eval mode.
        edge_attr: Features of edges, in the order of the given edges.
        edge_weight: What turns them into one score a head; given together with ``edge_attr``.
        config: How to quantize; ``None`` computes in full precision. Its granularity has to be ``"row"``, and whatever
            its ``save`` says, what is kept are the codes.
        seed: Seed of stochastic rounding and of dropout.

    Shapes:
        - **input:** ``x [S, H, D]``, ``score_source [S, H]``, ``score_target [T, H]``, ``edge_attr [E, K]``,
          ``edge_weight [H, K]``
        - **output:** ``[T, H, D]``, of the type of ``x``; sums are fp32 (float64 for float64 rows)

    Raises:
        TypeError: If an operand is no tensor of floats, or ``config`` no QConfig.
        ValueError: If sizes or devices disagree, ``dropout`` is no probability, one of ``edge_attr`` and
            ``edge_weight`` is missing, or ``config`` asks for another granularity.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 0]])
        >>> x, score = torch.randn(3, 4, 8), torch.randn(3, 4)
        >>> y = qgnn.functional.attention(edge_index, x, score, score, dropout=0.5, config=qgnn.QConfig())
    """
    call = _Call("attention", config, dropout, seed)
    call.check_rows("x", x)
    heads = x.shape[1]
    for name, score in (("score_source", score_source), ("score_target", score_target)):
        check_float("attention", name, score)
        if score.dim() != 2 or score.shape[1] != heads or (name == "score_source" and score.shape[0] != x.shape[0]):
            rows = f"{x.shape[0]}" if name == "score_source" else "T"
            raise ValueError(f"'attention' expects '{name}' of shape [{rows}, {heads}] (got {list(score.shape)})")
    (x,) = call.rounded(x)
    operands = {"x": x, "score_source": score_source, "score_target": score_target}
    graph = call.graph_of(graph, x.shape[0], score_target.shape[0], operands)
    edges = call.edges_of(graph, edge_attr, edge_weight, heads)
    out, *_ = ops.attention(
        x.flatten(1),
        None,
        score_target,
        score_source,
        *edges,
        *structure(graph, *operands.values(), *edges[:2]),
        *call.rounding(x),
        call.slope(negative_slope),
        call.keeps(*operands.values(), *edges[:2]),
    )
    return call.finished(out.view(-1, *x.shape[1:]))


def attention_gatv2(
    graph: Any,
    x_source: Tensor,
    x_target: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    dropout: float = 0,
    *,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Attention of a GATv2 layer: :math:`y_i = \sum_{j \to i} \alpha_{ji} x_j` with
    :math:`\alpha_{ji} = \mathrm{softmax}_{j \to i}(a^\top \mathrm{LeakyReLU}(x_j + z_i + W e_{ji}))`.

    After `"How Attentive are Graph Attention Networks?" <https://arxiv.org/abs/2105.14491>`_. What :func:`attention`
    says of passes, memory and dropout holds here too. It differs in what rounding does: the scores are made of rounded
    rows, so the result is that of the rounded rows, and the gradients are those of this result without bias.

    With ``edge_attr`` the rows :math:`W e` of all edges, ``[E, H * D]``, are made in each pass and let go at its end,
    and backward their gradient beside them.

    Args:
        graph: Edges; weights of theirs play no part.
        x_source: One row a head of each source, :math:`x`.
        x_target: One row a head of each target, :math:`z`, of the same type.
        att: One vector a head, :math:`a`.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout: As in :func:`attention`.
        edge_attr: Features of edges, in the order of the given edges.
        edge_weight: :math:`W`; given together with ``edge_attr``.
        config: As in :func:`attention`.
        seed: Seed of stochastic rounding and of dropout.

    Shapes:
        - **input:** ``x_source [S, H, D]``, ``x_target [T, H, D]``, ``att [H, D]``, ``edge_attr [E, K]``,
          ``edge_weight [H * D, K]``
        - **output:** ``[T, H, D]``, of the type of ``x_source``; sums are fp32 (float64 for float64 rows)

    Raises:
        TypeError: If an operand is no tensor of floats, the rows' types disagree, or ``config`` is no QConfig.
        ValueError: As :func:`attention`.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 0]])
        >>> x = torch.randn(3, 4, 8)
        >>> y = qgnn.functional.attention_gatv2(edge_index, x, x, torch.randn(4, 8), config=qgnn.QConfig())
    """
    call = _Call("attention_gatv2", config, dropout, seed)
    call.check_rows("x_source", x_source)
    call.check_rows("x_target", x_target, like=x_source)
    heads, width = x_source.shape[1:]
    check_float("attention_gatv2", "att", att)
    if tuple(att.shape) != (heads, width):
        raise ValueError(f"'attention_gatv2' expects 'att' of shape [{heads}, {width}] (got {list(att.shape)})")
    x_source, x_target = call.rounded(x_source, x_target)
    operands = {"x_source": x_source, "x_target": x_target, "att": att}
    graph = call.graph_of(graph, x_source.shape[0], x_target.shape[0], operands)
    edges = call.edges_of(graph, edge_attr, edge_weight, heads * width)
    out, *_ = ops.attention_gatv2(
        x_target.flatten(1),
        None,
        x_source.flatten(1),
        None,
        att,
        *edges,
        *structure(graph, *operands.values(), *edges[:2]),
        *call.rounding(x_source),
        call.slope(negative_slope),
        call.keeps(*operands.values(), *edges[:2]),
    )
    return call.finished(out.view(x_target.shape))


def attention_dot(
    graph: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0,
    *,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Attention of a graph transformer: :math:`y_i = \sum_{j \to i} \alpha_{ji} (v_j + W e_{ji})` with
    :math:`\alpha_{ji} = \mathrm{softmax}_{j \to i}(\langle q_i, k_j + W e_{ji} \rangle / \sqrt{D})`.

    After `"Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification"
    <https://arxiv.org/abs/2009.03509>`_. What :func:`attention_gatv2` says holds here too.

    Args:
        graph: Edges; weights of theirs play no part.
        query: One row a head of each target, :math:`q`.
        key: One row a head of each source, :math:`k`, of the same type.
        value: One row a head of each source, :math:`v`, of the same type and width.
        dropout: As in :func:`attention`.
        edge_attr: Features of edges, in the order of the given edges.
        edge_weight: :math:`W`; given together with ``edge_attr``.
        config: As in :func:`attention`.
        seed: Seed of stochastic rounding and of dropout.

    Shapes:
        - **input:** ``query [T, H, D]``, ``key`` and ``value`` ``[S, H, D]``, ``edge_attr [E, K]``,
          ``edge_weight [H * D, K]``
        - **output:** ``[T, H, D]``, of the type of ``value``; sums are fp32 (float64 for float64 rows)

    Raises:
        TypeError: If an operand is no tensor of floats, the rows' types disagree, or ``config`` is no QConfig.
        ValueError: As :func:`attention`.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 0]])
        >>> q, k, v = torch.randn(3, 3, 4, 8)
        >>> y = qgnn.functional.attention_dot(edge_index, q, k, v, config=qgnn.QConfig())
    """
    call = _Call("attention_dot", config, dropout, seed)
    call.check_rows("value", value)
    call.check_rows("key", key, like=value)
    call.check_rows("query", query, like=value)
    if key.shape[0] != value.shape[0]:
        raise ValueError(
            f"'attention_dot' expects 'key' with {value.shape[0]} rows, as 'value' has (got {key.shape[0]})"
        )
    query, key, value = call.rounded(query, key, value)
    operands = {"query": query, "key": key, "value": value}
    graph = call.graph_of(graph, value.shape[0], query.shape[0], operands)
    heads, width = value.shape[1:]
    edges = call.edges_of(graph, edge_attr, edge_weight, heads * width)
    rows = (t for x in operands.values() for t in (x.flatten(1), None))
    out, *_ = ops.attention_dot(
        *rows,
        *edges,
        *structure(graph, *operands.values(), *edges[:2]),
        heads,
        *call.rounding(value),
        call.keeps(*operands.values(), *edges[:2]),
    )
    return call.finished(out.view(query.shape))


class _Call:
    """What the functions of this file check and hand to their operators alike."""

    def __init__(self, owner: str, config: QConfig | None, dropout: float, seed: int | Tensor | None) -> None:
        check_config(config, owner)
        check_probability(owner, "dropout", dropout)
        if config is not None and config.granularity != "row":
            raise ValueError(
                f"'{owner}' rounds each head of a row with a scale of its own (got granularity="
                f"{config.granularity!r}); use 'qgnn.QConfig(granularity=\"row\")'"
            )
        if config is not None and config.format_of("attention") is not None:
            raise ValueError(
                f"'{owner}' keeps its weights in registers, in full precision (got a format for 'attention' in "
                f"'config'); layers round them, and so do 'edge_softmax' and 'spmm' one after the other"
            )
        self.owner, self.seed, self.threshold = owner, seed, dropout_threshold(dropout)
        self.config = self.mixed = None
        if config is not None and (kernel := attention_config(config)) is None:
            self.mixed = config
        elif config is not None:
            self.config = kernel
        self.rounding_seed: Tensor | None = None

    def check_rows(self, name: str, x: Tensor, like: Tensor | None = None) -> None:
        check_float(self.owner, name, x)
        if x.dim() != 3 or 0 in x.shape[1:]:
            raise ValueError(
                f"'{self.owner}' expects '{name}' of shape [N, H, D], H and D > 0 (got {list(x.shape)}); one head is "
                f"'{name}.unsqueeze(1)'"
            )
        if like is not None and x.shape[1:] != like.shape[1:]:
            H, D = like.shape[1:]
            raise ValueError(f"'{self.owner}' expects '{name}' of shape [N, {H}, {D}] (got {list(x.shape)})")
        if like is not None and x.dtype != like.dtype:
            raise TypeError(f"'{self.owner}' expects rows of one type (got {x.dtype} for '{name}' and {like.dtype})")

    def rounded(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Rows ``[N, H, D]`` in the format of messages, where the kernels do not round them."""
        if self.mixed is None:
            return operands
        self.rounding_seed = draw_seed(self.mixed, self.seed, operands[0])
        fmt, granularity = self.mixed.format_of("messages"), self.mixed.granularity
        return tuple(
            rounded(x, fmt, granularity, stream_of(self.rounding_seed, number)) for number, x in enumerate(operands)
        )

    def finished(self, out: Tensor) -> Tensor:
        """The result in its format, and its gradient's, where the kernels do not round that."""
        if self.mixed is None:
            return out
        return aggregated(out, self.mixed, self.rounding_seed, with_gradient=True)

    def slope(self, negative_slope: float) -> float:
        if not isinstance(negative_slope, (int, float)) or not -math.inf < negative_slope < math.inf:
            raise ValueError(f"'{self.owner}' expects 'negative_slope' to be a finite number (got {negative_slope!r})")
        return float(negative_slope)

    def graph_of(self, graph: Any, num_sources: int, num_targets: int, operands: dict[str, Tensor]) -> Graph:
        graph = graph_between(graph, num_sources, num_targets)
        for name, t in operands.items():
            check_device(self.owner, name, t, graph.device)
        return graph

    def edges_of(
        self, graph: Graph, edge_attr: Tensor | None, edge_weight: Tensor | None, num_columns: int
    ) -> tuple[Tensor | None, ...]:
        """Features, their weight, and the order that they are taken in."""
        if edge_attr is None and edge_weight is None:
            return None, None, None
        if edge_attr is None or edge_weight is None:
            missing = "edge_attr" if edge_attr is None else "edge_weight"
            raise ValueError(f"'{self.owner}' expects 'edge_attr' and 'edge_weight' together (got no '{missing}')")
        for name, t in (("edge_attr", edge_attr), ("edge_weight", edge_weight)):
            check_float(self.owner, name, t)
            check_device(self.owner, name, t, graph.device)
        if edge_attr.dim() != 2 or edge_attr.shape[0] != graph.num_edges:
            raise ValueError(
                f"'{self.owner}' expects 'edge_attr' of shape [{graph.num_edges}, K], a row an edge (got "
                f"{list(edge_attr.shape)})"
            )
        if tuple(edge_weight.shape) != (num_columns, edge_attr.shape[1]):
            raise ValueError(
                f"'{self.owner}' expects 'edge_weight' of shape [{num_columns}, {edge_attr.shape[1]}] (got "
                f"{list(edge_weight.shape)})"
            )
        return edge_attr, edge_weight, graph.csr.order

    def rounding(self, x: Tensor) -> tuple[Tensor | None, int, int, Tensor | None]:
        """Seed and bits of the rounding, threshold and seed of the dropout."""
        config = self.config
        seed = None if config is None else draw_seed(config, self.seed, x)
        dropout_seed = make_seed(self.seed, x.device) if self.threshold else None
        return seed, 0 if config is None else config.bits, self.threshold, dropout_seed

    def keeps(self, *operands: Tensor | None) -> bool:
        """Whether a backward pass will need the codes."""
        learns = any(t is not None and t.requires_grad for t in operands)
        return self.config is not None and learns and torch.is_grad_enabled()
