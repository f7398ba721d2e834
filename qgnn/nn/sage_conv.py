"""QSAGEConv: GraphSAGE with int8 products and int8 aggregation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import SAGEConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._common import operand
from qgnn.nn._neighbors import NeighborConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class QSAGEConv(NeighborConv, SAGEConv):
    r"""The GraphSAGE operator of `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ on integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j + \mathbf{b}.

    The products and the aggregation run on int8 codes, forward and backward, and where a node's own row and the rows of
    its neighbors are one tensor, it is rounded once for both products; sums, the bias, ``normalize`` and the parameters
    stay fp32. A :class:`torch_geometric.nn.SAGEConv` with the same parameters and state dict.

    Of a sum or mean, the product comes first where it makes rows narrower (``out_channels <= in_channels``), with int8
    rows in between. A maximum or minimum is one of the rounded rows, and its gradient goes, unrounded, to that row:
    of equal rows to the first edge's, where PyG's layer splits it evenly.
    Other aggregations, such as ``"lstm"``, lists of several and :mod:`torch_geometric.nn.aggr` modules, run on PyG's
    path in full precision whatever ``config`` says, which :attr:`note` tells.

    Args:
        in_channels: Size of each input row, a pair of sizes of source and target rows, or ``-1`` for what is taken from
            the first input.
        out_channels: Size of each output row.
        aggr: ``"mean"``, ``"sum"``, ``"add"``, ``"max"`` or ``"min"``, or any other aggregation of PyG.
        normalize: Whether to scale output rows to length 1.
        root_weight: Whether a node's own row is added.
        project: Whether source rows pass a dense layer and a ReLU first.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** node features ``[N, F_in]`` or ``[B, N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), or a pair
          of them, ``([S, F_s], [T, F_t])``, with ``None`` for target nodes without features; edges ``[2, E]``, a sparse
          matrix or a :class:`qgnn.Graph`; ``size`` ``(S, T)`` *(optional)*
        - **output:** ``[N, F_out]``, ``[B, N, F_out]`` or ``[T, F_out]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges, node features and ``size`` do not fit together.

    Example:
        >>> conv = QSAGEConv((512, 128), 64, config=qgnn.QConfig(bits=8))
        >>> out = conv((x_source, x_target), edge_index)
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str | list[str] | Aggregation | None = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, aggr, normalize, root_weight, project, bias, **kwargs)
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
        linears = (self.lin_l, *((self.lin_r,) if self.root_weight else ()), *((self.lin,) if self.project else ()))
        if self.takes_messages(x, *linears):
            return self.messages(x, edge_index, size)
        ends = self.ends(x, edge_index, size)
        root = self.lin_r if self.root_weight and ends.target is not None else None
        if self.project:
            config, target = self.active, ends.target
            rows = operand(ends.source, config, shared=root is not None and target is ends.source)
            source = functional.linear(rows, self.lin.weight, self.lin.bias, activation="relu", config=config)
            ends = ends._replace(source=source, target=rows if target is ends.source else target)
        return self.combine(ends, self.lin_l, root, self.normalize)
