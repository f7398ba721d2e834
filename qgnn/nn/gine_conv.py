"""QGINEConv: graph isomorphism convolution with features of edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GINEConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.graph import Graph, identity, kind_of, to_edges
from qgnn.nn._common import by_set, float_rows, initialize_lazy, operand
from qgnn.nn._neighbors import NeighborConv, add_root
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached


class QGINEConv(NeighborConv, GINEConv):
    r"""The operator of `"Strategies for Pre-training Graph Neural Networks" <https://arxiv.org/abs/1905.12265>`_ on
    integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot \mathbf{x}_i +
        \sum_{j \in \mathcal{N}(i)} \mathrm{ReLU} ( \mathbf{x}_j + \mathbf{e}_{j,i} ) \right).

    It differs from :class:`QGINConv` in the messages, one an edge: rows and edge features meet in full precision, and
    the messages are rounded to int8 to be summed; what is kept of them is one bit a value, the sign. The dense layer of
    ``edge_dim`` runs on int8 codes. A :class:`torch_geometric.nn.GINEConv` with the same parameters and state dict.

    Args:
        nn: The network :math:`h_{\mathbf{\Theta}}`; see :class:`QGINConv`.
        eps: :math:`\epsilon`, at first.
        train_eps: Whether to learn it.
        edge_dim: Size of each row of edge features, which a dense layer then takes to that of ``x``; ``None`` if they
            are of one size.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result of ``nn``.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`. An ``aggr`` other than ``"add"`` runs
            on PyG's path in full precision, which :attr:`note` tells.

    Shapes:
        - **input:** as :class:`QGINConv`, and features of edges ``[E, D]``, which may also be the values of a matrix
        - **output:** ``[N, F_out]``, ``[B, N, F_out]`` or ``[T, F_out]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges, their features, node features and ``size`` do not fit together.

    Example:
        >>> conv = QGINEConv(torch_geometric.nn.MLP([64, 64, 32]), edge_dim=8)
        >>> out = conv(x, edge_index, edge_attr)
    """

    has_network = True
    reduces = ("sum",)

    def __init__(
        self,
        nn: torch.nn.Module,
        eps: float = 0.0,
        train_eps: bool = False,
        edge_dim: int | None = None,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(nn, eps, train_eps, edge_dim, **kwargs)
        self.configure(config, epilogue)

    def forward(
        self,
        x: Tensor | QTensor | tuple[Tensor | QTensor, Tensor | QTensor | None],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int | None, int | None] | None = None,
    ) -> Tensor:
        """Convolve ``x`` over the graph.

        Args:
            x: Node features, or a pair of those of sources and targets, as above.
            edge_index: Edges, as above.
            edge_attr: Features of edges, ``[E, D]``; ``None`` where they are the values of a sparse matrix.
            size: Numbers of sources and targets, ``(S, T)``; ``None`` takes them from ``x``.
        """
        if self.takes_messages(x, *(() if self.lin is None else (self.lin,))):
            return self.messages(x, edge_index, edge_attr, size)
        edge_index, edge_attr = _with_values(edge_index, edge_attr)
        source, target, graph = self.ends(x, edge_index, size)
        edge_rows = self._edge_rows(edge_attr, graph.num_edges, source.shape[-1]).to(source.dtype)

        def sum_of(rows: Tensor) -> Tensor:
            # A sum with nothing gathers rows, and has a gradient that repeats bit for bit.
            nothing = rows.new_zeros(()).expand(graph.num_targets, rows.shape[1])
            gathered = functional.sddmm(graph, rows, nothing, op="add")
            # The slopes play no part; as floats, torch.compile would make symbols of them, and start anew.
            messages = functional.activation(gathered, "relu", residual=edge_rows, negative_slope=0, alpha=0)
            return functional.incidence_sum(graph, messages, config=self.active)

        out = by_set(sum_of, float_rows(source))
        return self.finish(self.nn(add_root(out, target, self.eps)).to(out.dtype))

    def _edge_rows(self, edge_attr: Tensor | None, num_edges: int, width: int) -> Tensor:
        """Features of edges as wide as those of nodes, checked."""
        name = type(self).__name__
        if edge_attr is None or edge_attr.dim() != 2 or edge_attr.shape[0] != num_edges:
            got = None if edge_attr is None else list(edge_attr.shape)
            raise ValueError(f"'{name}' expects 'edge_attr' of shape [{num_edges}, D], a row an edge (got {got})")
        if self.lin is not None:
            initialize_lazy(self.lin, edge_attr)
            self.remember(edge_attr)  # the rows of the layer's own product
            config, weight = self.active, self.lin.weight
            codes = operand(edge_attr.to(weight.dtype), config)
            edge_attr = functional.linear(codes, weight, self.lin.bias, config=config)
        if edge_attr.shape[1] != width:
            raise ValueError(
                f"'{name}' expects node and edge features of one size (got {width} and {edge_attr.shape[1]}); "
                f"give the size of 'edge_attr' as 'edge_dim', and 'nn' the size of 'x'"
            )
        return edge_attr


def _with_values(edges: Any, edge_attr: Tensor | None) -> tuple[Any, Tensor | None]:
    """Edges and their features: in place of ``None``, rows that a matrix has for values, as PyG takes them."""
    if kind_of(edges) not in ("sparse matrix", "torch_sparse"):
        return edges, edge_attr
    edge_index, value = to_edges(edges)
    if value is None or value.dim() != 2:
        return edges, edge_attr
    num_nodes = (edges.size(1), edges.size(0))
    key = ("edges of a matrix", num_nodes, False)
    graph = cached(identity(edges, weights=False), key, lambda: Graph.from_edge_index(edge_index, num_nodes))
    return graph, value if edge_attr is None else edge_attr
