"""QGCNConv: graph convolution with int8 products and int8 aggregation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv

from qgnn import functional, trace
from qgnn.config import QConfig, check_product_config
from qgnn.graph import Graph, as_graph, check_edge_weight, identity, one_weight, to_edges
from qgnn.nn._common import active_config, initialize_lazy, needs_message_path, restore_propagate
from qgnn.nn.gcn_norm import GCNStructure
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached

_REDUCE = {"add": "sum", "sum": "sum", "mean": "mean"}


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
        restore_propagate(self)
        self.config = config
        self._is_fused_aggr = isinstance(self.aggr, str) and self.aggr in _REDUCE
        if config is not None and not self._is_fused_aggr:
            raise ValueError(
                f"'{type(self).__name__}' expects 'aggr' to be one of {tuple(_REDUCE)} (got {kwargs['aggr']!r}); "
                f"other aggregations run in full precision with config=None"
            )

    def forward(self, x: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolve ``x`` over the graph."""
        if not self._is_fused_aggr or needs_message_path(self, GCNConv, self.lin):
            return self._forward_messages(x, edge_index, edge_weight)
        name = type(self).__name__
        if isinstance(x, (tuple, list)):
            raise ValueError(f"'{name}' expects one tensor of node features (got {len(x)}); it is no bipartite layer")
        if len(x.shape) != 2 and self.config is None:
            return self._forward_messages(x, edge_index, edge_weight)  # PyG takes batches of features on one graph
        if len(x.shape) != 2:
            raise ValueError(f"'{name}' expects 'x' with two dimensions [N, F] (got {list(x.shape)})")
        initialize_lazy(self.lin, x)
        graph = self._prepare(x.shape[0], edge_index, edge_weight, x.dtype)
        config = active_config(self, self.config)
        return functional.graph_linear(graph, x, self.lin.weight, self.bias, reduce=_REDUCE[self.aggr], config=config)

    def _forward_messages(self, x: Any, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        """PyG's own path, in full precision."""
        if isinstance(edge_index, Graph):
            raise ValueError(
                f"'{type(self).__name__}' expects 'edge_index' as a tensor while an explainer, hooks or a custom "
                f"aggregation are attached (got a Graph)"
            )
        x = x.dequantize() if isinstance(x, QTensor) else x
        try:
            out = super().forward(x, edge_index, edge_weight)
        finally:
            self._cached_edge_index = self._cached_adj_t = None  # PyG would serve them for any graph
        if trace.recording():
            trace.report("messages.forward", str(out.dtype).removeprefix("torch."), "pyg", (x, out))
        return out

    def _prepare(self, num_nodes: int, adjacency: Any, edge_weight: Tensor | None, dtype: torch.dtype) -> Graph:
        """The graph to aggregate over, with its final weights."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        key = (num_nodes, self.add_self_loops, self.flow)
        if isinstance(adjacency, Graph):
            if edge_weight is None and not self.normalize and self.flow == "source_to_target":
                return as_graph(adjacency, num_nodes)
            if edge_weight is not None and adjacency.weight is None:
                edge_weight = adjacency.to_csr_order(check_edge_weight(edge_weight, adjacency.num_edges))

        def structure() -> GCNStructure:
            # A mean counts edges, so there the replaced self-loops really have to go.
            fixed_shape = torch.compiler.is_compiling() and self.aggr != "mean"
            return GCNStructure(adjacency, num_nodes, self.add_self_loops, self.flow, fixed_shape)

        def weighted() -> Graph:
            edges = cached(identity(adjacency, weights=False), ("gcn structure", *key), structure)
            weight = one_weight(edge_weight, to_edges(adjacency)[1])
            return edges.weighted(weight, dtype, self.improved, self.normalize)

        tensors = identity(adjacency, weights=True) + (() if edge_weight is None else (edge_weight,))
        return cached(tensors, ("gcn", dtype, self.improved, self.normalize, *key), weighted)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, config={self.config})"
