"""QChebConv: Chebyshev graph convolution with int8 products and int8 aggregations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, lerp
from torch.nn.functional import pad
from torch_geometric.nn.conv import ChebConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.edge_checks import check_edge_index, check_edge_weight
from qgnn.graph import Graph, check_num_nodes, identity, to_edges, weight_of
from qgnn.nn._common import aggregate, float_rows, initialize_lazy, operand
from qgnn.nn._propagation import SUM, PropagationConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached


class QChebConv(PropagationConv, ChebConv):
    r"""The Chebyshev convolution of `"Convolutional Neural Networks on Graphs with Fast Localized Spectral Filtering"
    <https://arxiv.org/abs/1606.09375>`_ on integer operands:

    .. math::
        \mathbf{X}^{\prime} = \sum_{k=1}^{K} \mathbf{Z}^{(k)} \mathbf{\Theta}^{(k)} + \mathbf{b}, \quad
        \mathbf{Z}^{(1)} = \mathbf{X}, \quad \mathbf{Z}^{(2)} = \mathbf{\hat{L}} \mathbf{X}, \quad
        \mathbf{Z}^{(k)} = 2 \mathbf{\hat{L}} \mathbf{Z}^{(k-1)} - \mathbf{Z}^{(k-2)},

    :math:`\mathbf{\hat{L}} = 2 \mathbf{L} / \lambda_{\max} - \mathbf{I}`. The rows of each :math:`\mathbf{Z}^{(k)}` are
    rounded once, for their product and for their aggregation; the recurrence itself is full precision. A
    :class:`torch_geometric.nn.ChebConv` with the same parameters and state dict.

    The scaled Laplacian is made once, and remembered while the tensors that it is made from live unchanged.

    Args:
        in_channels: Size of each input row, or ``-1`` to take it from the first input.
        out_channels: Size of each output row.
        K: Filter size.
        normalization: ``"sym"``, ``"rw"`` or ``None``.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`; ``aggr`` may be ``"add"``.

    Shapes:
        - **input:** node features ``[N, F_in]`` or ``[B, N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), edges
          ``[2, E]``, a sparse matrix or a :class:`qgnn.Graph`, edge weights ``[E]`` *(optional)*, graph of each node
          ``[N]`` *(optional)*, largest eigenvalue, a number or one a graph ``[G]`` *(optional: twice the largest
          entry of the Laplacian)*
        - **output:** node features ``[N, F_out]`` or ``[B, N, F_out]``

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together.

    Example:
        >>> conv = QChebConv(512, 64, K=3)
        >>> out = conv(x, edge_index)
    """

    reduces = SUM

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        K: int,
        normalization: str | None = "sym",
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, K, normalization, bias, **kwargs)
        self.configure(config, epilogue)

    def forward(
        self,
        x: Tensor | QTensor,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        lambda_max: Tensor | float | None = None,
    ) -> Tensor:
        """Filter ``x`` on the graph.

        Args:
            x: Node features, as above.
            edge_index: Edges, as above.
            edge_weight: One weight an edge; ``None`` for ones.
            batch: Graph of each node, ``[N]``, where each has a ``lambda_max`` of its own.
            lambda_max: The largest eigenvalue of the Laplacian, or one a graph; ``None`` takes twice its largest entry.
        """
        if self.reduce is None or self.needs_messages(*self.lins):
            return self.messages(x, edge_index, edge_weight, batch, lambda_max)
        self.check_rows(x)
        graph = self._laplacian(x, edge_index, edge_weight, batch, lambda_max)
        config = self.active
        first, *others = self.lins
        initialize_lazy(first, x)
        rows = operand(x, config, shared=len(others) > 0)  # no bool(others): torch 2.10 compiles none
        term, total = functional.linear(rows, first.weight, config=config), None
        previous, current = x, x
        for k, lin in enumerate(others, 1):
            initialize_lazy(lin, x)
            total = term if total is None else total + term
            hop = aggregate(graph, rows, config=config)
            # beyond the first hop 2 hop - previous, in one pass
            previous, current = current, hop if k == 1 else lerp(float_rows(previous), hop, 2.0)
            rows = operand(current, config, shared=k < len(others))
            term = functional.linear(rows, lin.weight, config=config)
        return self.finish(term, self.bias, residual=total)

    def _laplacian(
        self,
        x: Tensor | QTensor,
        adjacency: Any,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        lambda_max: Tensor | float | None,
    ) -> Graph:
        """The graph with the entries of the scaled Laplacian as weights."""
        num_nodes = x.shape[-2]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

        def structure() -> tuple[Graph, Tensor]:
            edge_index, _ = to_edges(adjacency)
            check_edge_index(edge_index, num_nodes, num_nodes)
            node = torch.arange(num_nodes, dtype=edge_index.dtype, device=edge_index.device).expand(2, -1)
            edges = torch.cat([edge_index, node], dim=1)
            graph = Graph.from_edge_index(edges if self._forward else edges.flip(0), num_nodes)
            return graph, edge_index[0] == edge_index[1]

        def weighted() -> Graph:
            key = ("laplacian edges", num_nodes, self.flow)
            graph, is_loop = cached(identity(adjacency, weights=False), key, structure)
            weight = weight_of(adjacency, edge_weight)
            if weight is None:
                weight = torch.ones_like(is_loop, dtype=dtype)
            # Self-loops stay with weight 0: taking them out would need to know how many there are.
            weight = check_edge_weight(weight, is_loop.shape[0]).to(dtype).masked_fill(is_loop, 0)
            entries = self._scaled(graph, weight, batch, lambda_max)
            return graph.with_weight(graph.to_csr_order(entries))

        if isinstance(adjacency, Graph):
            check_num_nodes(adjacency, num_nodes, num_nodes)
        optional = (edge_weight, batch, lambda_max)
        tensors = (*identity(adjacency, weights=True), *(t for t in optional if isinstance(t, Tensor)))
        given = tuple(isinstance(t, Tensor) or t for t in optional)
        return cached(tensors, ("laplacian", num_nodes, dtype, self.normalization, self.flow, given), weighted)

    def _scaled(self, graph: Graph, weight: Tensor, batch: Tensor | None, lambda_max: Tensor | float | None) -> Tensor:
        """Entries of the scaled Laplacian: those of the given edges, then the diagonal."""
        sides = ("source", "target") if self._forward else ("target", "source")
        source, target = (graph.incidence(side)[2] for side in sides)
        num_edges, num_nodes = weight.shape[0], graph.num_targets
        degree = functional.incidence_sum(graph, pad(weight, (0, num_nodes)), sides[0])
        if self.normalization is None:
            entries = torch.cat([-weight, degree])
        else:
            isolated = degree == 0
            power = -0.5 if self.normalization == "sym" else -1.0
            factor = degree.masked_fill(isolated, 1.0).pow(power).masked_fill(isolated, 0.0)
            weight = weight * factor.index_select(0, source[:num_edges])
            if self.normalization == "sym":
                weight = weight * factor.index_select(0, target[:num_edges])
            entries = torch.cat([-weight, torch.ones_like(degree)])
        if lambda_max is None:
            lambda_max = 2 * pad(entries, (0, 1)).max()  # no diagonal is below 0, and without nodes there is none
        elif not isinstance(lambda_max, Tensor):
            lambda_max = entries.new_full((), lambda_max)
        elif batch is not None and lambda_max.numel() > 1:
            lambda_max = lambda_max.index_select(0, batch.index_select(0, source))
        lambda_max = lambda_max.to(entries.dtype)
        zero = lambda_max == 0
        entries = (2 * entries / lambda_max.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
        return torch.cat([entries[:num_edges], entries[num_edges:] - 1])

    @property
    def _forward(self) -> bool:
        return self.flow == "source_to_target"
