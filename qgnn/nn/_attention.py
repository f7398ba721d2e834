"""What the attention layers share: checks, operands, scores in full precision, weights edge by edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch_geometric.nn import MessagePassing

from qgnn import functional
from qgnn.autocast import without_autocast
from qgnn.config import QConfig
from qgnn.graph import Graph, check_num_nodes, identity, kind_of, to_edges
from qgnn.nn._common import check_flow, float_rows, graph_for, initialize_lazy, operand
from qgnn.nn._edges import Edges, edges_with_loops, matrix_with_loops
from qgnn.nn._layer import QuantizedConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached

_SUMS = ("add", "sum")


class AttentionConv(QuantizedConv):
    """A convolution whose neighbors are weighted by a softmax."""

    heads: int
    out_channels: int
    concat: bool
    dropout: float
    edge_dim: int | None
    lin_edge: Any
    res: Any

    def configure(self, config: QConfig | None, epilogue: Epilogue | None = None) -> None:
        """Set what is quantized, and what is applied to the result."""
        super().configure(config, epilogue)
        name = type(self).__name__
        if config is not None and not self._is_sum:
            raise ValueError(
                f"'{name}' expects 'aggr' to be one of {_SUMS} (got {self.aggr!r}); other aggregations run in full "
                f"precision with config=None"
            )
        if config is not None and config.granularity != "row":
            raise ValueError(
                f"'{name}' rounds each head of a row with a scale of its own (got granularity="
                f"{config.granularity!r}); use 'qgnn.QConfig(granularity=\"row\")'"
            )

    @property
    def _is_sum(self) -> bool:
        return isinstance(self.aggr, str) and self.aggr in _SUMS

    @property
    def takes_messages(self) -> bool:
        """Whether PyG's own path has to run."""
        assert isinstance(self, MessagePassing)
        return not self._is_sum or self.needs_messages(*self.products)

    @property
    def rounds_weights(self) -> bool:
        """Whether weights are rounded, which needs them edge by edge."""
        return self.active is not None and self.active.format_of("attention") is not None

    @property
    def weight_dropout(self) -> float:
        """Probability that a weight is dropped in this call."""
        return self.dropout if self.training and self.dropout else 0

    def checked_attr(self, edge_attr: Tensor | None) -> Tensor | None:
        """Features of edges as a matrix, or an error where the layer has no weight for them."""
        if edge_attr is None:
            return None
        if self.edge_dim is None:
            raise ValueError(
                f"'{type(self).__name__}' expects no 'edge_attr' where 'edge_dim' is None (got "
                f"{list(edge_attr.shape)}); give 'edge_dim' to the constructor"
            )
        edge_attr = edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr
        initialize_lazy(self.lin_edge, edge_attr)
        if edge_attr.dim() != 2 or edge_attr.shape[1] != self.lin_edge.weight.shape[1]:
            raise ValueError(
                f"'{type(self).__name__}' expects 'edge_attr' of shape [E, {self.lin_edge.weight.shape[1]}] (got "
                f"{list(edge_attr.shape)})"
            )
        return edge_attr

    def pair_of(self, x: Any, both: bool = False) -> tuple[Any, Any]:
        """Rows of sources and of targets, the latter ``None`` where a layer does not need ``both``."""
        pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
        for rows in pair:
            if rows is not None and len(rows.shape) != 2:
                raise ValueError(
                    f"'{type(self).__name__}' expects node features of shape [N, F] (got {list(rows.shape)}); static "
                    f"graphs, [B, N, F], are not supported"
                )
        if len(pair) != 2 or pair[0] is None or (both and pair[1] is None):
            got = ", ".join("None" if rows is None else str(list(rows.shape)) for rows in pair)
            raise ValueError(
                f"'{type(self).__name__}' expects node features as a tensor or a pair (x_source, x_target) (got "
                f"({got}))"
            )
        return pair

    def codes_of(self, x: tuple[Any, Any], target: bool = True) -> tuple[Any, Any]:
        """Both entries of ``x`` as the layer's products take them, rounded once; rows of targets of their own are left
        as they are unless something reads the codes of the ``target``."""
        first = operand(x[0], self.active, shared=True)
        if x[1] is None or x[1] is x[0]:
            return first, None if x[1] is None else first
        return first, operand(x[1], self.active, shared=True) if target else x[1]

    def heads_of(self, linear: Any, x: Tensor | QTensor) -> Tensor:
        """A row a head of each node, ``[N, H, D]``."""
        initialize_lazy(linear, x)
        rows = functional.linear(x, linear.weight, linear.bias, config=self.active)
        return rows.view(-1, self.heads, self.out_channels)

    def sizes_of(self, x: tuple[Any, Any], size: tuple[int, int] | None = None) -> tuple[int, int]:
        """Number of nodes that messages come from, and that they go to."""
        num_sources = x[0].shape[0]
        num_targets = (num_sources if size is None else size[1]) if x[1] is None else x[1].shape[0]
        check_flow(self, num_sources, num_targets)
        if size is not None and tuple(size) != (num_sources, num_targets):
            raise ValueError(
                f"'{type(self).__name__}' expects 'size' to be the numbers of rows of 'x' (got {tuple(size)}, and "
                f"{num_sources} and {num_targets} rows)"
            )
        return num_sources, num_targets

    def edges_of(
        self,
        adjacency: Any,
        edge_attr: Tensor | None,
        num_nodes: tuple[int, int],
        num_loops: int | None,
        fill_value: Any = None,
        exact: bool = False,
    ) -> Edges:
        """The edges that this layer attends over, sorted once for as long as they live unchanged.

        Args:
            adjacency: Edges in any accepted form.
            edge_attr: Features of the given edges; in place of ``None``, rows that a matrix has for values.
            num_nodes: Number of nodes that messages come from, and that they go to.
            num_loops: How many nodes get a self-loop, in place of those that edges have; ``None`` keeps the edges.
            fill_value: What the features of those are, as in PyG.
            exact: Whether the edges have to be the ones that PyG would return, at shapes that depend on their values.
        """
        reverse = self.flow == "target_to_source"
        kind = kind_of(adjacency)

        def sort() -> Graph:
            edge_index = to_edges(adjacency)[0]
            return Graph.from_edge_index(edge_index.flip(0) if reverse else edge_index, num_nodes)

        if kind == "graph":
            check_num_nodes(adjacency, *(reversed(num_nodes) if reverse else num_nodes))
            if reverse or num_loops is not None:
                given = adjacency
                adjacency = cached(
                    identity(given, weights=False), "given edges", lambda: given.edge_index(as_given=True)
                )
                kind = "edge_index"
        elif kind != "edge_index":
            if num_loops is not None:
                adjacency = matrix_with_loops(adjacency, 1.0 if self.edge_dim is None else fill_value)
            value = to_edges(adjacency)[1]
            if edge_attr is None and value is not None and value.dim() == 2:  # as in PyG, other values are weights
                edge_attr = self.checked_attr(value)
            graph = cached(identity(adjacency, weights=False), ("edges of a matrix", num_nodes, reverse), sort)
            return Edges(graph, edge_attr, adjacency)
        if kind == "edge_index" and num_loops is not None:
            return edges_with_loops(adjacency, edge_attr, num_nodes, num_loops, reverse, fill_value, exact)
        graph = graph_for(self, adjacency, *num_nodes)
        return Edges(graph if graph.weight is None else graph.with_weight(None), edge_attr, adjacency)

    def weighted_sum(self, edges: Edges, rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of ``rows``, the weights as dropout left them, and as they were before: weights edge by edge, for
        callers who ask for them."""
        weights = functional.edge_softmax(edges.graph, scores, config=self.active)
        dropped = dropout(weights, self.weight_dropout)
        out = functional.spmm(edges.graph, rows.flatten(1), dropped, config=self.active)
        return out.view(-1, *rows.shape[1:]), dropped.to(rows.dtype), weights.to(rows.dtype)

    def residual_of(self, x: Any, codes: Any) -> Tensor | None:
        """What the targets' own rows add to the result."""
        if self.res is None or x is None:
            return None
        initialize_lazy(self.res, x)
        return functional.linear(codes, self.res.weight, config=self.active)

    def by_node(self, out: Tensor) -> Tensor:
        """The heads of each node side by side, or their mean."""
        return out.flatten(1) if self.concat else out.mean(1)


def score_weight(att: Tensor, weight: Tensor) -> Tensor:
    """What makes the scores ``<att, W x>`` of each head of ``x`` alone, ``[H, K]`` from ``[1, H, D]`` and
    ``[H * D, K]``: no pass over the rows of ``W x``."""
    dtype = torch.promote_types(att.dtype, torch.float32)
    by_head = weight.to(dtype).view(*att.shape[1:], weight.shape[1])
    return (att.to(dtype).squeeze(0).unsqueeze(2) * by_head).sum(1)


def score_product(x: Tensor | QTensor, codes: Tensor | QTensor, weight: Tensor) -> Tensor:
    """``x weight^T`` in full precision, as the exponential behind scores wants them; of ``x`` what is kept for the
    gradient of ``weight`` are the codes that other products keep anyway. Of activations in formats with blocks, or with
    a zero point, these are the codes of columns, which each product makes of its own: there the rows are kept.

    Args:
        x: Rows.
        codes: The same as the other products take them; kept if they are multiples of one scale a row, or all that
            there is of ``x``.
        weight: Of :func:`score_weight`.
    """
    value = float_rows(x)
    if torch.compiler.is_compiling():  # which decides what is kept
        return value.to(weight.dtype) @ weight.t()
    given = isinstance(x, QTensor) and x.origin is None
    keeps_codes = isinstance(codes, QTensor) and (given or _is_by_row(codes))
    return _ScoreProduct.apply(value, weight, codes if keeps_codes else None)


def _is_by_row(q: QTensor) -> bool:
    """Whether values are codes times one scale a row, which the gradient of a product may be multiplied by instead."""
    return q.zero is None and q.scales.shape[1] == 1


class _ScoreProduct(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, codes: QTensor | None) -> Tensor:
        return x.to(weight.dtype) @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, codes = inputs
        kept = (x, None, None) if codes is None else codes.tensors
        ctx.save_for_backward(weight, *(kept if ctx.needs_input_grad[1] else (None,) * 3))
        ctx.codes, ctx.dtype = None if codes is None else codes.with_tensors(), x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        rows = kept[0] if ctx.codes is None or kept[0] is None else ctx.codes.with_tensors(*kept)
        return *_ScoreGradients.apply(grad, weight, rows, ctx.dtype, ctx.needs_input_grad[0]), None


class _ScoreGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor, weight: Tensor, rows: Tensor | QTensor | None, dtype: torch.dtype, needs_dx: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        with without_autocast(grad.device.type):
            dx = (grad @ weight).to(dtype) if needs_dx else None
            if isinstance(rows, QTensor) and _is_by_row(rows):
                grad, rows = grad * rows.scale, rows.codes
            elif isinstance(rows, QTensor):
                rows = rows.dequantize()
            return dx, None if rows is None else grad.t() @ rows.to(grad.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "attention has no second derivatives, which a gradient of a gradient (create_graph=True) needs; use PyG's "
            "layer there"
        )
