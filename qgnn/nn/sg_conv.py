"""QSGConv: simple graph convolution with int8 aggregations and an int8 product."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import SGConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.graph import Graph, identity
from qgnn.halo_graph import HaloGraph
from qgnn.nn._common import active_config, aggregate, initialize_lazy, operand
from qgnn.nn._propagation import PropagationConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached, is_recorded


class QSGConv(PropagationConv, SGConv):
    r"""The simple graph convolution of `"Simplifying Graph Convolutional Networks" <https://arxiv.org/abs/1902.07153>`_
    on integer operands:

    .. math::
        \mathbf{X}^{\prime} = {\left( \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2} \right)}^K
        \mathbf{X} \mathbf{\Theta} + \mathbf{b}.

    Each of the :math:`K` aggregations and the product round their operands to int8. A
    :class:`torch_geometric.nn.SGConv` with the same parameters and state dict.

    With ``cached`` the aggregated features are remembered as in PyG, but for these features and this graph only, while
    both live unchanged, and only where neither needs a gradient; they are rounded to nearest. So another graph is
    noticed, and features or edge weights that are learned get their gradient in every step.

    Args:
        in_channels: Size of each input row, or ``-1`` to take it from the first input.
        out_channels: Size of each output row.
        K: Number of hops.
        cached: Whether to remember the aggregated features.
        add_self_loops: Whether to add self-loops.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result, in the product's own pass where it can.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`; ``aggr`` may be ``"add"`` or
            ``"mean"``.

    Shapes:
        - **input:** node features ``[N, F_in]`` or ``[B, N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), edges
          ``[2, E]``, a sparse matrix or a :class:`qgnn.Graph`, edge weights ``[E]`` *(optional)*
        - **output:** node features ``[N, F_out]`` or ``[B, N, F_out]``

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together.

    Example:
        >>> conv = QSGConv(512, 7, K=2, cached=True)
        >>> out = conv(x, edge_index)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        K: int = 1,
        cached: bool = False,
        add_self_loops: bool = True,
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, K, cached, add_self_loops, bias, **kwargs)
        self.configure(config, epilogue)

    def forward(self, x: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Aggregate ``x`` over ``K`` hops of the graph, then multiply it with the weight.

        Args:
            x: Node features, as above.
            edge_index: Edges, as above.
            edge_weight: One weight an edge; ``None`` for ones.
        """
        if self.reduce is None or self.needs_messages(self.lin):
            return self.messages(x, edge_index, edge_weight)
        self.check_rows(x)
        initialize_lazy(self.lin, x)
        graph = self.normalized(x, edge_index, edge_weight)
        config = self.active
        rows = (x,) if isinstance(x, Tensor) else (x.storage, x.scales) if x.origin is None else (x.origin,)
        edges = edge_index.inner if isinstance(edge_index, HaloGraph) else edge_index  # made with it, for it alone
        sources = (*rows, *identity(edges, weights=True), *(() if edge_weight is None else (edge_weight,)))
        if self.cached and self.K > 0 and not any(t.requires_grad or is_recorded(t) for t in sources):
            nearest = active_config(False, config)
            key = ("hops", self.K, self.add_self_loops, self.flow, self.reduce, nearest)
            x = cached(sources, key, lambda: self._hops(graph, x, nearest))
        else:
            x = self._hops(graph, operand(x, config), config)
        options: dict[str, Any] = {"config": config, **self.in_kernel()}
        return self.behind_kernel(functional.linear(operand(x, config), self.lin.weight, self.lin.bias, **options))

    def _hops(self, graph: Graph, x: Tensor | QTensor, config: QConfig | None) -> Tensor | QTensor:
        for _ in range(self.K):
            x = aggregate(graph, x, reduce=self.reduce or "sum", config=config)
        return x
