"""QGINConv: graph isomorphism convolution with int8 aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GINConv

from qgnn.config import QConfig
from qgnn.nn._common import aggregate, operand
from qgnn.nn._neighbors import NeighborConv, add_root
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class QGINConv(NeighborConv, GINConv):
    r"""The graph isomorphism operator of `"How Powerful are Graph Neural Networks?"
    <https://arxiv.org/abs/1810.00826>`_ with the sum on integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot \mathbf{x}_i +
        \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right).

    Neighbors are summed as int8 codes, and so is the gradient on its way back; a node's own row and :math:`\epsilon`
    stay full precision. What ``nn`` computes with is its own affair: build it of :class:`QLinear` layers, or convert
    the whole model. A :class:`torch_geometric.nn.GINConv` with the same parameters and state dict.

    Args:
        nn: The network :math:`h_{\mathbf{\Theta}}`.
        eps: :math:`\epsilon`, at first.
        train_eps: Whether to learn it.
        config: How to quantize the sum; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result of ``nn``.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`. ``aggr`` may be ``"mean"``, ``"max"``
            or ``"min"``, too; the gradient of a maximum or minimum of equal rows goes to the first edge's, where PyG's
            layer splits it evenly. Others run on PyG's path in full precision, which :attr:`note` tells.

    Shapes:
        - **input:** node features ``[N, F_in]`` or ``[B, N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), or a pair
          of them, ``([S, F_in], [T, F_in])``, with ``None`` for target nodes without features; edges ``[2, E]``, a
          sparse matrix or a :class:`qgnn.Graph`; ``size`` ``(S, T)`` *(optional)*
        - **output:** ``[N, F_out]``, ``[B, N, F_out]`` or ``[T, F_out]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges, node features and ``size`` do not fit together.

    Example:
        >>> conv = QGINConv(torch_geometric.nn.MLP([64, 64, 32]), train_eps=True)
        >>> out = conv(x, edge_index)
    """

    has_network = True

    def __init__(
        self,
        nn: Callable[..., Any],
        eps: float = 0.0,
        train_eps: bool = False,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(nn, eps, train_eps, **kwargs)
        self.configure(config, epilogue)

    def forward(
        self,
        x: Tensor | QTensor | tuple[Tensor | QTensor, Tensor | QTensor | None],
        edge_index: Any,
        size: tuple[int | None, int | None] | None = None,
    ) -> Tensor:
        """Convolve ``x`` over the graph.

        Args:
            x: Node features, or a pair of those of sources and targets, as above.
            edge_index: Edges, as above.
            size: Numbers of sources and targets, ``(S, T)``; ``None`` takes them from ``x``.
        """
        if self.takes_messages(x):
            return self.messages(x, edge_index, size)
        source, target, graph = self.ends(x, edge_index, size)
        config, reduce = self.active, self.reduce
        assert reduce is not None
        out = aggregate(graph, operand(source, config), reduce=reduce, config=config)
        return self.finish(self.nn(add_root(out, target, self.eps)).to(out.dtype))
