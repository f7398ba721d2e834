"""QGCNConv: graph convolution with int8 products and int8 aggregation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv

from qgnn import functional
from qgnn.config import QConfig, check_product_config
from qgnn.graph import Graph, cached, check_edge_weight, check_edges, kind_of, needs_weight_grad, to_edges
from qgnn.nn._common import active_config, initialize_lazy, needs_message_path
from qgnn.nn.gcn_norm import add_self_loops, gcn_norm
from qgnn.qtensor import QTensor

_REDUCE = {"add": "sum", "sum": "sum", "mean": "mean"}
_LOOP_MODE = {"torch_sparse": "replace", "sparse matrix": "append"}  # what PyG does with self-loops of these


class QGCNConv(GCNConv):
    r"""The graph convolution of `"Semi-supervised Classification with Graph Convolutional Networks"
    <https://arxiv.org/abs/1609.02907>`_ on integer operands:

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2} \mathbf{X}
        \mathbf{\Theta} + \mathbf{b}.

    The product :math:`\mathbf{X} \mathbf{\Theta}` and the aggregation run on int8 codes, forward and backward, with
    int8 rows in between; the normalization, the bias and the parameters stay fp32. A
    :class:`torch_geometric.nn.GCNConv` with the same parameters and state dict. After `"Tango: Rethinking Quantization
    for Graph Neural Network Training on GPUs" <https://arxiv.org/abs/2308.00890>`_.

    The normalized, sorted graph is prepared once per ``edge_index`` and remembered while that tensor lives unchanged,
    whether or not ``cached`` is set: another graph is always noticed. With an explainer, message hooks or hooks on
    ``lin`` attached, the layer takes PyG's own full-precision path, so that they see every message.

    Args:
        in_channels: Size of each input row, or ``-1`` to take it from the first input.
        out_channels: Size of each output row.
        improved: Whether self-loops weigh 2; as in PyG, on graphs with edge weights only.
        cached: Accepted as in PyG.
        add_self_loops: Whether to add self-loops; follows ``normalize`` by default.
        normalize: Whether to normalize edge weights.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision through the same kernels.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`; ``aggr`` may be ``"add"`` or
            ``"mean"``.

    Shapes:
        - **input:** node features ``[N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), edges ``[2, E]``, a sparse
          matrix or a :class:`qgnn.Graph`, edge weights ``[E]`` *(optional)*
        - **output:** node features ``[N, F_out]``

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together.

    Example:
        >>> conv = QGCNConv(512, 64, config=qgnn.QConfig(bits=8))
        >>> out = conv(x, edge_index)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        **kwargs: Any,
    ) -> None:
        check_product_config(config, type(self).__name__)
        super().__init__(in_channels, out_channels, improved, cached, add_self_loops, normalize, bias, **kwargs)
        self.config = config
        if config is not None and self.aggr not in _REDUCE:
            raise ValueError(
                f"'{type(self).__name__}' expects 'aggr' to be one of {tuple(_REDUCE)} (got {kwargs['aggr']!r}); "
                f"other aggregations run in full precision with config=None"
            )

    def forward(self, x: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolve ``x`` over the graph."""
        if self.aggr not in _REDUCE or needs_message_path(self, GCNConv, self.lin):
            return self._forward_messages(x, edge_index, edge_weight)
        name = type(self).__name__
        if isinstance(x, (tuple, list)):
            raise ValueError(f"'{name}' expects one tensor of node features (got {len(x)}); it is no bipartite layer")
        if len(x.shape) != 2:
            raise ValueError(f"'{name}' expects 'x' with two dimensions [N, F] (got {list(x.shape)})")
        initialize_lazy(self.lin, x)
        graph, learned_weight = self._prepare(x.shape[0], edge_index, edge_weight, x.dtype)
        return functional.graph_linear(
            graph,
            x,
            self.lin.weight,
            self.bias,
            learned_weight,
            _REDUCE[self.aggr],
            config=active_config(self, self.config),
        )

    def _forward_messages(self, x: Any, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        """PyG's own path, in full precision."""
        if isinstance(edge_index, Graph):
            raise ValueError(
                f"'{type(self).__name__}' expects 'edge_index' as a tensor while an explainer, hooks or a custom "
                f"aggregation are attached (got a Graph)"
            )
        self._cached_edge_index = self._cached_adj_t = None  # PyG would serve them for any graph
        return super().forward(x.dequantize() if isinstance(x, QTensor) else x, edge_index, edge_weight)

    def _prepare(
        self, num_nodes: int, adjacency: Any, edge_weight: Tensor | None, dtype: torch.dtype
    ) -> tuple[Graph, Tensor | None]:
        """The graph to aggregate over, and weights of its edges if they need a gradient."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        key = (num_nodes, self.improved, self.add_self_loops, self.normalize, self.flow)

        def edges() -> tuple[Tensor, Tensor | None]:
            return self._weighted_edges(adjacency, edge_weight, num_nodes, dtype)

        cached(adjacency, None, ("checked", num_nodes), lambda: check_edges(adjacency, num_nodes))
        if not needs_weight_grad(adjacency, edge_weight):

            def build() -> Graph:
                edge_index, weight = edges()
                return Graph.from_edge_index(edge_index, num_nodes, weight)

            return cached(adjacency, edge_weight, ("gcn", dtype, *key), build), None
        edge_index, weight = edges()
        structure = cached(
            adjacency, None, ("gcn structure", *key), lambda: Graph.from_edge_index(edge_index, num_nodes)
        )
        return structure, weight

    def _weighted_edges(
        self, adjacency: Any, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Edges with self-loops and normalized weights, as COO; differentiable in the given weights."""
        edge_index, value = to_edges(adjacency)
        if value is not None and edge_weight is not None:
            raise ValueError(f"'{type(self).__name__}' got 'edge_weight' and edges that have values; give one of them")
        weight = edge_weight if value is None else value
        if weight is not None:
            weight = check_edge_weight(weight, edge_index.shape[1]).to(dtype)
            if isinstance(adjacency, Graph) and value is None:  # given in the order of the graph's edges
                weight = adjacency.to_csr_order(weight)
        if self.flow == "target_to_source":
            edge_index = edge_index.flip(0)
        if not self.normalize:
            return edge_index, weight
        # Without edge weights PyG gives every self-loop 1, improved or not.
        fill_value = 2.0 if self.improved and weight is not None else 1.0
        if weight is None:
            weight = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
        if self.add_self_loops:
            mode = _LOOP_MODE.get(kind_of(adjacency), "remaining")
            # A mean counts edges, so there the moved self-loops really have to go.
            fixed_shape = torch.compiler.is_compiling() and self.aggr != "mean"
            edge_index, weight = add_self_loops(edge_index, weight, num_nodes, fill_value, mode, fixed_shape)
        return edge_index, gcn_norm(edge_index, weight, num_nodes)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, config={self.config})"
