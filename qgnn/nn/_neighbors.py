"""What layers share that combine what a node gathers from its neighbors with a row of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn.dense.linear import Linear

from qgnn import functional
from qgnn.graph import Graph, as_graph, kind_of
from qgnn.nn._common import aggregate, by_set, check_flow, float_rows, graph_for, initialize_lazy, operand
from qgnn.nn._layer import QuantizedConv
from qgnn.qtensor import QTensor

Rows = Tensor | QTensor

_REDUCE = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min"}


class Ends(NamedTuple):
    """Rows of both ends of the edges; ``target`` is ``source`` itself in a graph of one kind of node, and ``None``
    where targets have no rows."""

    source: Rows
    target: Rows | None
    graph: Graph


class NeighborConv(QuantizedConv):
    """A convolution over pairs of source and target rows."""

    reduces: tuple[str, ...] = ("sum", "mean", "max", "min")  # what its own path can aggregate with
    weighted = False  # whether it takes edge weights: PyG's layers without drop the values of a SparseTensor

    @property
    def reduce(self) -> str | None:
        """The aggregation as functions name it, or ``None`` where it is left to PyG."""
        reduce = _REDUCE.get(self.aggr) if isinstance(self.aggr, str) else None
        return reduce if reduce in self.reduces else None

    @property
    def note(self) -> str | None:
        """What a summary of a model has to say about this layer."""
        return super().note if self.reduce else f"aggregation {self.aggr!r} runs on PyG's path in full precision"

    @property
    def operands(self) -> str:
        """What a summary says that this layer computes with."""
        return super().operands if self.reduce else "fp32"

    def takes_messages(self, x: Any, *linears: nn.Module) -> bool:
        """Whether PyG's own path has to run."""
        rows = x[0] if isinstance(x, (tuple, list)) else x
        return self.reduce is None or self.needs_messages(*linears) or self.nodes_elsewhere(rows)

    def ends(self, x: Any, edges: Any, size: Any, edge_weight: Tensor | None = None) -> Ends:
        """The graph of ``edges`` between the rows of ``x``, checked to fit together as PyG checks them."""
        name = type(self).__name__
        source, target = x if isinstance(x, (tuple, list)) else (x, x)
        expected = _sizes(edges, size)
        for rows, number, end in ((source, expected[0], "source"), (target, expected[1], "target")):
            if rows is None and end == "target":
                continue
            if not isinstance(rows, (Tensor, QTensor)):  # no name of a union: torch.compile knows none before 2.12
                raise TypeError(f"'{name}' expects the rows of {end} nodes as a tensor (got {type(rows).__name__})")
            if len(rows.shape) not in (2, 3):
                raise ValueError(f"'{name}' expects 'x' of shape [N, F] or [B, N, F] (got {list(rows.shape)})")
            if number is not None and rows.shape[-2] != number:
                raise ValueError(f"'{name}' expects a row for each of {number} {end} nodes (got {rows.shape[-2]})")
        num_sources, num_targets = source.shape[-2], None
        if target is not source:
            # PyG's reversed flow takes the targets' number from the sources, where targets have no rows.
            given = expected[1] if self.flow == "source_to_target" else None
            num_targets = given
            if target is not None:
                num_targets = target.shape[-2]
                check_flow(self, num_sources, num_targets)
        graph = graph_for(self, edges, num_sources, num_targets)
        if kind_of(edges) == "torch_sparse" and not self.weighted:
            graph = graph.with_weight(None)
        if edge_weight is not None:
            graph = as_graph(graph, (graph.num_sources, graph.num_targets), edge_weight)
        return Ends(source, target, graph)

    def combine(self, ends: Ends, linear: Linear, root: Linear | None, normalize: bool = False) -> Tensor:
        """``linear(aggregate(source)) + root(target)``, with rows of length 1 if wanted, behind the epilogue.

        Of a sum or mean, the product comes first if it makes rows narrower: it is the gathering that costs.
        """
        config, reduce, (source, target, graph) = self.active, self.reduce, ends
        assert reduce is not None
        initialize_lazy(linear, source)
        shared = root is not None and target is source
        source = operand(source, config, shared=shared)
        options: dict[str, Any] = {"config": config}
        if root is None and not normalize:
            options |= self.in_kernel()
        narrows = linear.weight.shape[0] <= linear.weight.shape[1]
        if narrows and reduce in ("sum", "mean"):
            weights = (linear.weight, linear.bias)
            out = by_set(lambda rows: functional.graph_linear(graph, rows, *weights, reduce=reduce, **options), source)
        else:
            rows = aggregate(graph, source, reduce=reduce, config=config)
            out = functional.linear(rows, linear.weight, linear.bias, **options)
        if root is None and not normalize:
            return self.behind_kernel(out)
        residual = None
        if root is not None:
            assert target is not None
            initialize_lazy(root, target)
            residual = functional.linear(
                source if shared else operand(target, config), root.weight, root.bias, config=config
            )
        if normalize:
            out, residual = nn.functional.normalize(out if residual is None else out + residual, dim=-1), None
        return self.finish(out, residual=residual)


def add_root(out: Tensor, target: Rows | None, eps: Tensor) -> Tensor:
    """``out + (1 + eps) * target`` in full precision, of the type of ``out``."""
    return out if target is None else torch.addcmul(out, float_rows(target), (1 + eps).to(out.dtype))


def _sizes(edges: Any, size: Any) -> tuple[int | None, int | None]:
    """How many nodes ``edges`` have at each end: what they know themselves, or else ``size``."""
    if isinstance(edges, Graph):
        return edges.num_sources, edges.num_targets
    if isinstance(edges, EdgeIndex):
        return edges.num_rows, edges.num_cols
    if kind_of(edges) != "edge_index":
        return edges.size(1), edges.size(0)
    return (None, None) if size is None else tuple(size)
