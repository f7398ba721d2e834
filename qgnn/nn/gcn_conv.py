"""QGCNConv: graph convolution with int8 products and int8 aggregation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GCNConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._common import by_set, initialize_lazy, operand
from qgnn.nn._propagation import PropagationConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class QGCNConv(PropagationConv, GCNConv):
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
        epilogue: What to apply to the result, in the aggregation's own pass where it can.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`; ``aggr`` may be ``"add"`` or
            ``"mean"``.

    Shapes:
        - **input:** node features ``[N, F_in]`` or ``[B, N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), edges
          ``[2, E]``, a sparse matrix or a :class:`qgnn.Graph`, edge weights ``[E]`` *(optional)*
        - **output:** node features ``[N, F_out]`` or ``[B, N, F_out]``, of ``x``'s type

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
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, improved, cached, add_self_loops, normalize, bias, **kwargs)
        self.configure(config, epilogue)

    def forward(self, x: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolve ``x`` over the graph.

        Args:
            x: Node features, as above.
            edge_index: Edges, as above.
            edge_weight: One weight an edge; ``None`` for ones.
        """
        reduce, config = self.reduce, self.active
        if reduce is None or self.needs_messages(self.lin):
            return self.messages(x, edge_index, edge_weight)
        self.check_rows(x)
        initialize_lazy(self.lin, x)
        graph = self.normalized(x, edge_index, edge_weight)
        x = operand(x, config)
        options = {"reduce": reduce, "config": config, **self.in_kernel()}
        out = by_set(lambda rows: functional.graph_linear(graph, rows, self.lin.weight, self.bias, **options), x)
        return self.behind_kernel(out)
