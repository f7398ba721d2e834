"""QAPPNP: personalized propagation of predictions with int8 aggregations."""

from __future__ import annotations

from typing import Any

from torch import Tensor, lerp, nn
from torch_geometric.nn.conv import APPNP

from qgnn.config import QConfig
from qgnn.graph import Graph
from qgnn.nn._common import aggregate, float_rows, operand
from qgnn.nn._propagation import PropagationConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class QAPPNP(PropagationConv, APPNP):
    r"""The approximate personalized propagation of `"Predict then Propagate: Graph Neural Networks meet Personalized
    PageRank" <https://arxiv.org/abs/1810.05997>`_ on integer operands:

    .. math::
        \mathbf{X}^{(k)} = (1 - \alpha) \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}
        \mathbf{X}^{(k-1)} + \alpha \mathbf{X}^{(0)}, \quad \mathbf{X}^{\prime} = \mathbf{X}^{(K)}.

    Each aggregation rounds its rows to int8, and so the rows of its gradient; the mix with :math:`\mathbf{X}^{(0)}` is
    full precision. A :class:`torch_geometric.nn.APPNP`: dropout of edges in training draws from torch's generator as
    there, and what one step drops stays away in the next.

    The normalized, sorted graph is remembered as in :class:`QGCNConv`.

    Args:
        K: Number of steps.
        alpha: Teleport probability.
        dropout: Probability that a step drops an edge in training.
        cached: Accepted as in PyG; another graph is always noticed.
        add_self_loops: Whether to add self-loops where edges are normalized.
        normalize: Whether to normalize edge weights.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`; ``aggr`` may be ``"add"`` or
            ``"mean"``.

    Shapes:
        - **input:** node features ``[N, F]`` or ``[B, N, F]`` (a tensor or a :class:`qgnn.QTensor`), edges ``[2, E]``,
          a sparse matrix or a :class:`qgnn.Graph`, edge weights ``[E]`` *(optional)*
        - **output:** node features ``[N, F]`` or ``[B, N, F]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together.

    Example:
        >>> propagate = QAPPNP(K=10, alpha=0.1)
        >>> out = propagate(mlp(x), edge_index)
    """

    def __init__(
        self,
        K: int,
        alpha: float,
        dropout: float = 0.0,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(K, alpha, dropout, cached, add_self_loops, normalize, **kwargs)
        self.configure(config, epilogue)

    def forward(self, x: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Propagate ``x`` over ``K`` steps.

        Args:
            x: Node features, as above.
            edge_index: Edges, as above.
            edge_weight: One weight an edge; ``None`` for ones.
        """
        reduce, config = self.reduce, self.active
        if reduce is None or self.needs_messages():
            return self.messages(x, edge_index, edge_weight)
        self.check_rows(x)
        graph, weight = self.normalized(x, edge_index, edge_weight), None
        drop = self.dropout if self.training else 0
        if drop > 0:
            graph, weight = _split(graph, x)
        initial = float_rows(x)
        out, rows = initial, operand(x, config)
        for _ in range(self.K):
            if weight is not None:
                weight = nn.functional.dropout(weight, drop)
            rows = out = lerp(aggregate(graph, rows, weight, reduce, config=config), initial, self.alpha)
        return self.finish(out)


def _split(graph: Graph, x: Tensor | QTensor) -> tuple[Graph, Tensor]:
    """The edges, and their weights in the order in which PyG draws for them."""
    weight = float_rows(x).new_ones(graph.num_edges) if graph.weight is None else graph.weight
    return graph.with_weight(None), graph.to_given_order(weight)
