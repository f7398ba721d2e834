"""QGATv2Conv: dynamic graph attention in one pass over int8 rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.nn.conv import GATv2Conv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._attention import AttentionConv
from qgnn.nn._edges import num_loops_of
from qgnn.nn.epilogue import Epilogue


class QGATv2Conv(AttentionConv, GATv2Conv):
    r"""The graph attention of `"How Attentive are Graph Attention Networks?" <https://arxiv.org/abs/2105.14491>`_ on
    integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{ji} \mathbf{\Theta}_l \mathbf{x}_j
        \quad \text{with} \quad
        \alpha_{ji} = \mathrm{softmax}_{j}(\mathbf{a}^{\top} \mathrm{LeakyReLU}(\mathbf{\Theta}_l \mathbf{x}_j +
        \mathbf{\Theta}_r \mathbf{x}_i + \mathbf{\Theta}_e \mathbf{e}_{ji})).

    Both products take the same codes of ``x``; scores and weighted sum are one pass over the edges that gathers int8
    rows, forward and backward. A :class:`torch_geometric.nn.GATv2Conv` with the same parameters and state dict. What
    :class:`QGATConv` says of graphs, of PyG's own path and of ``return_attention_weights`` holds here too, but that the
    scores are made of rounded rows, and those that ``return_attention_weights`` asks for of rows that are not. Where
    rounding moves an element to the other side of the LeakyReLU's kink, its gradient is that of the other side.

    Args:
        in_channels: Size of each input row, or ``-1`` to take it from the first input; a pair for bipartite graphs.
        out_channels: Size of each output row and head.
        heads: Number of heads.
        concat: Whether heads stand side by side; otherwise their mean is the result.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout: Probability that an edge's weight is dropped in training.
        add_self_loops: Whether each node has one self-loop, in place of those that the edges have.
        edge_dim: Size of the features of edges; ``None`` takes none.
        fill_value: Features of self-loops: a number or tensor, or how those of the edges into a node are reduced.
        bias: Whether to learn additive biases.
        share_weights: Whether sources and targets share a weight.
        residual: Whether to add a linear function of the targets' rows.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** node features ``[N, F_in]`` or a pair ``([S, F_s], [T, F_t])`` (tensors or :class:`qgnn.QTensor`),
          edges ``[2, E]``, a sparse matrix (rows that it has for values are edge features) or a :class:`qgnn.Graph`,
          edge features ``[E, edge_dim]`` *(optional)*
        - **output:** node features ``[T, H * F_out]``, or ``[T, F_out]`` without ``concat``, of ``x``'s type; with
          ``return_attention_weights`` also the edges and their weights ``[E, H]``, self-loops last

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together, ``edge_attr`` comes without ``edge_dim``, or
            ``config`` is of another granularity than ``"row"``.

    Example:
        >>> conv = QGATv2Conv(512, 64, heads=4, config=qgnn.QConfig(bits=8))
        >>> out = conv(x, edge_index)
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            bias,
            share_weights,
            residual,
            **kwargs,
        )
        self.configure(config, epilogue)

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Attend from each target of ``edge_index`` to its sources.

        Args:
            x: Node features, or a pair of those of sources and targets, as above.
            edge_index: Edges, as above.
            edge_attr: Features of edges, ``[E, edge_dim]``.
            return_attention_weights: Whether to return ``(out, (edge_index, alpha))``, with ``alpha [E, H]`` of all
                edges that attention runs over, added self-loops included.
        """
        edge_attr = self.checked_attr(edge_attr)
        if self.takes_messages:
            return self.messages(x, edge_index, edge_attr, return_attention_weights)
        x = self.pair_of(x, both=True)
        codes, num_nodes = self.codes_of(x), self.sizes_of(x)
        source = self.heads_of(self.lin_l, codes[0])
        one = self.share_weights and x[1] is x[0]
        target = source if one else self.heads_of(self.lin_r, codes[1])
        edges = self.edges_of(
            edge_index,
            edge_attr,
            num_nodes,
            num_loops_of(num_nodes, x) if self.add_self_loops else None,
            self.fill_value,
            bool(return_attention_weights) or self.rounds_weights,
        )
        weights = None
        if return_attention_weights or self.rounds_weights:
            sums = functional.sddmm(edges.graph, source, target, "add")
            if edges.attr is not None:
                sums = sums + functional.linear(edges.attr, self.lin_edge.weight).view(sums.shape)
            scores = (leaky_relu(sums, self.negative_slope) * self.att).sum(2)
            out, weights, _ = self.weighted_sum(edges, source, scores)
        else:
            out = functional.attention_gatv2(
                edges.graph,
                source,
                edges.of_targets(target),
                self.att[0],
                self.negative_slope,
                self.weight_dropout,
                edge_attr=edges.attr,
                edge_weight=None if edges.attr is None else self.lin_edge.weight,
                config=self.active,
            )
        out = self.finish(self.by_node(edges.results(out)), self.bias, self.residual_of(x[1], codes[1]))
        return out if weights is None or not return_attention_weights else (out, edges.with_weights(weights))
