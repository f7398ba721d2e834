"""QGCN2Conv: GCNII's convolution with int8 products and int8 aggregation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, lerp
from torch_geometric.nn.conv import GCN2Conv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._common import float_rows, operand
from qgnn.nn._propagation import PropagationConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class QGCN2Conv(PropagationConv, GCN2Conv):
    r"""The graph convolution with initial residual and identity mapping (GCNII) of `"Simple and Deep Graph
    Convolutional Networks" <https://arxiv.org/abs/2007.02133>`_ on integer operands:

    .. math::
        \mathbf{X}^{\prime} = \left( (1 - \alpha) \mathbf{\hat{P}} \mathbf{X} + \alpha \mathbf{X}^{(0)} \right)
        \left( (1 - \beta) \mathbf{I} + \beta \mathbf{\Theta} \right),
        \quad \mathbf{\hat{P}} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}.

    The aggregation and the product with :math:`\mathbf{\Theta}` run on int8 codes, forward and backward. Both residual
    mixes are full precision: the identity is never part of a rounded weight, whose scale it would take from the
    learned part. A :class:`torch_geometric.nn.GCN2Conv` with the same parameters and state dict.

    The normalized, sorted graph is remembered as in :class:`QGCNConv`.

    Args:
        channels: Size of each input and output row.
        alpha: Strength of the initial residual connection.
        theta: Together with ``layer``, gives :math:`\beta = \log(\theta / \ell + 1)`, which is 1 without them.
        layer: Number :math:`\ell` of this layer in its model.
        shared_weights: If ``False``, the initial residual has a weight of its own (GCNII*).
        cached: Accepted as in PyG; another graph is always noticed.
        add_self_loops: Whether to add self-loops where edges are normalized.
        normalize: Whether to normalize edge weights.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`; ``aggr`` may be ``"add"`` or
            ``"mean"``.

    Shapes:
        - **input:** node features ``[N, F]`` and initial node features ``[N, F]`` (tensors or
          :class:`qgnn.QTensor`), edges ``[2, E]``, a sparse matrix or a :class:`qgnn.Graph`, edge weights ``[E]``
          *(optional)*
        - **output:** node features ``[N, F]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or features are no dense floating-point tensors.
        ValueError: If edges and node features do not fit together.

    Example:
        >>> conv = QGCN2Conv(64, alpha=0.1, theta=0.5, layer=1)
        >>> out = conv(x, x_0, edge_index)
    """

    def __init__(
        self,
        channels: int,
        alpha: float,
        theta: float | None = None,
        layer: int | None = None,
        shared_weights: bool = True,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(channels, alpha, theta, layer, shared_weights, cached, add_self_loops, normalize, **kwargs)
        self.configure(config, epilogue)

    def forward(
        self, x: Tensor | QTensor, x_0: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Convolve ``x`` over the graph and mix ``x_0`` in.

        Args:
            x: Node features, as above.
            x_0: The initial features, as above.
            edge_index: Edges, as above.
            edge_weight: One weight an edge; ``None`` for ones.
        """
        reduce, config = self.reduce, self.active
        if reduce is None or self.needs_messages():
            return self.messages(x, x_0, edge_index, edge_weight)
        self.check_rows(x, batched=False)
        graph = self.normalized(x, edge_index, edge_weight)
        out = functional.spmm(graph, operand(x, config), reduce=reduce, config=config)
        if x_0.shape[0] > out.shape[0]:
            x_0 = float_rows(x_0)[: out.shape[0]]
        initial = float_rows(x_0).to(out.dtype)
        if self.weight2 is None:
            mixed = lerp(out, initial, self.alpha)
            return self.finish(self._mapped(mixed, mixed, self.weight1))
        mapped = self._mapped(initial, operand(x_0, config), self.weight2)
        return self.finish(lerp(self._mapped(out, out, self.weight1), mapped, self.alpha))

    def _mapped(self, x: Tensor, codes: Tensor | QTensor, weight: Tensor) -> Tensor:
        """The identity mapping :math:`(1 - β) X + β X Θ`; ``codes`` are ``x`` as the product takes it."""
        product = functional.linear(codes, weight.t(), config=self.active)
        return lerp(x, product.to(x.dtype), self.beta)
