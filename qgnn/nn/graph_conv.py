"""QGraphConv: the higher-order graph convolution with int8 products and int8 aggregation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GraphConv

from qgnn.config import QConfig
from qgnn.nn._neighbors import NeighborConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class QGraphConv(NeighborConv, GraphConv):
    r"""The operator of `"Weisfeiler and Leman Go Neural: Higher-order Graph Neural Networks"
    <https://arxiv.org/abs/1810.02244>`_ on integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \sum_{j \in \mathcal{N}(i)} e_{j,i} \cdot
        \mathbf{x}_j + \mathbf{b}.

    A :class:`torch_geometric.nn.GraphConv` with the same parameters and state dict. It differs from
    :class:`QSAGEConv` in its edge weights, which stay full precision and may need a gradient; what is said there of
    order, rounding, aggregations and the gradient of equal terms holds here too. A mean divides by the number of edges,
    not by their weights.

    Args:
        in_channels: Size of each input row, a pair of sizes of source and target rows, or ``-1`` for what is taken from
            the first input.
        out_channels: Size of each output row.
        aggr: ``"add"``, ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``, or any other aggregation of PyG.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** as :class:`QSAGEConv`, and edge weights ``[E]`` or ``[E, 1]`` *(optional)*
        - **output:** ``[N, F_out]``, ``[B, N, F_out]`` or ``[T, F_out]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges, their weights, node features and ``size`` do not fit together.

    Example:
        >>> conv = QGraphConv(512, 64, config=qgnn.QConfig(bits=8))
        >>> out = conv(x, edge_index, edge_weight)
    """

    weighted = True

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "add",
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, aggr, bias, **kwargs)
        self.configure(config, epilogue)

    def forward(
        self,
        x: Tensor | QTensor | tuple[Tensor | QTensor, Tensor | QTensor | None],
        edge_index: Any,
        edge_weight: Tensor | None = None,
        size: tuple[int | None, int | None] | None = None,
    ) -> Tensor:
        """Convolve ``x`` over the graph.

        Args:
            x: Node features, or a pair of those of sources and targets, as above.
            edge_index: Edges, as above.
            edge_weight: One weight an edge; ``None`` for ones.
            size: Numbers of sources and targets, ``(S, T)``; ``None`` takes them from ``x``.
        """
        if self.takes_messages(x, self.lin_rel, self.lin_root):
            return self.messages(x, edge_index, edge_weight, size)
        ends = self.ends(x, edge_index, size, edge_weight)
        return self.combine(ends, self.lin_rel, None if ends.target is None else self.lin_root)
