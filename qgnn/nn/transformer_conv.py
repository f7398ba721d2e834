"""QTransformerConv: dot-product attention over neighbors in one pass over int8 rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import TransformerConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._attention import AttentionConv
from qgnn.nn._common import initialize_lazy
from qgnn.nn._edges import Edges
from qgnn.nn.epilogue import Epilogue


class QTransformerConv(AttentionConv, TransformerConv):
    r"""The graph transformer of `"Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
    Classification" <https://arxiv.org/abs/2009.03509>`_ on integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \alpha_{ji}
        (\mathbf{W}_2 \mathbf{x}_j + \mathbf{W}_6 \mathbf{e}_{ji})
        \quad \text{with} \quad
        \alpha_{ji} = \mathrm{softmax}_{j}\left(\frac{(\mathbf{W}_3 \mathbf{x}_i)^{\top} (\mathbf{W}_4 \mathbf{x}_j +
        \mathbf{W}_6 \mathbf{e}_{ji})}{\sqrt{D}}\right).

    All four products take the same codes of ``x``; dot products, softmax, dropout and weighted sum are one pass over
    the edges that gathers int8 rows, forward and backward. The gate of ``beta`` is full precision. A
    :class:`torch_geometric.nn.TransformerConv` with the same parameters and state dict. The sorted graph is remembered
    while ``edge_index`` lives unchanged. With an explainer or hooks attached, the layer takes PyG's own full-precision
    path. With ``return_attention_weights`` the weights are made edge by edge, of rows that are not rounded: as PyG
    returns them, those before dropout.

    Args:
        in_channels: Size of each input row, or ``-1`` to take it from the first input; a pair for bipartite graphs.
        out_channels: Size of each output row and head.
        heads: Number of heads.
        concat: Whether heads stand side by side; otherwise their mean is the result.
        beta: Whether a gate :math:`\beta_i` mixes :math:`\mathbf{W}_1 \mathbf{x}_i` and the sum, in place of adding
            them.
        dropout: Probability that an edge's weight is dropped in training.
        edge_dim: Size of the features of edges; ``None`` takes none.
        bias: Whether to learn additive biases.
        root_weight: Whether to use :math:`\mathbf{W}_1` and ``beta``.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** node features ``[N, F_in]`` or a pair ``([S, F_s], [T, F_t])`` (tensors or :class:`qgnn.QTensor`),
          edges ``[2, E]``, a sparse matrix (rows that it has for values are edge features) or a :class:`qgnn.Graph`,
          edge features ``[E, edge_dim]``, required where ``edge_dim`` is set
        - **output:** node features ``[T, H * F_out]``, or ``[T, F_out]`` without ``concat``, of ``x``'s type; with
          ``return_attention_weights`` also the edges and their weights ``[E, H]``

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together, one of ``edge_attr`` and ``edge_dim`` comes without
            the other, or ``config`` is of another granularity than ``"row"``.

    Example:
        >>> conv = QTransformerConv(512, 64, heads=4, config=qgnn.QConfig(bits=8))
        >>> out = conv(x, edge_index)
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, concat, beta, dropout, edge_dim, bias, root_weight, **kwargs)
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
            return_attention_weights: Whether to return ``(out, (edge_index, alpha))``, with ``alpha [E, H]``.
        """
        edge_attr = self.checked_attr(edge_attr)
        if self.takes_messages:
            return self.messages(x, edge_index, edge_attr, return_attention_weights)
        x = self.pair_of(x, both=True)
        codes, num_nodes = self.codes_of(x), (x[0].shape[0], x[1].shape[0])
        edges = self.edges_of(edge_index, edge_attr, num_nodes, None)
        if edges.attr is None and self.edge_dim is not None:
            raise ValueError(
                f"'{type(self).__name__}' expects 'edge_attr', as 'edge_dim' is {self.edge_dim} (got None)"
            )
        query = self.heads_of(self.lin_query, codes[1])
        key, value = (self.heads_of(lin, codes[0]) for lin in (self.lin_key, self.lin_value))
        weights = None
        wants_weights = isinstance(return_attention_weights, bool)
        if wants_weights or self.rounds_weights:
            out, weights = self._with_weights(edges, query, key, value)
        else:
            out = functional.attention_dot(
                edges.graph,
                query,
                key,
                value,
                self.weight_dropout,
                edge_attr=edges.attr,
                edge_weight=None if edges.attr is None else self.lin_edge.weight,
                config=self.active,
            )
        out = self._with_root(self.by_node(out), codes[1])
        return out if weights is None or not wants_weights else (out, edges.with_weights(weights, matrix=False))

    def _with_weights(self, edges: Edges, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = functional.sddmm(edges.graph, key, query)
        if edges.attr is not None:  # <q, W e> of [E, K] by [T, H, K]: no row of [H, D] an edge
            by_head = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
            of_query = torch.einsum("thd,hdk->thk", query, by_head)
            target = edges.graph.incidence("target")[2]
            scores = scores + (of_query.index_select(0, target) * edges.attr.unsqueeze(1)).sum(2)
        out, dropped, weights = self.weighted_sum(edges, value, scores / math.sqrt(self.out_channels))
        if edges.attr is not None:
            sums = functional.incidence_sum(edges.graph, dropped.unsqueeze(2) * edges.attr.unsqueeze(1))
            out = out + torch.einsum("thk,hdk->thd", sums.to(by_head.dtype), by_head)
        return out, weights

    def _with_root(self, out: Tensor, codes: Any) -> Tensor:
        """The sum and the targets' own rows together, behind the epilogue."""
        if not self.root_weight:
            return self.finish(out)
        initialize_lazy(self.lin_skip, codes)
        root = functional.linear(codes, self.lin_skip.weight, self.lin_skip.bias, config=self.active)
        if self.lin_beta is None:
            return self.finish(out, residual=root)
        # of [out, root, out - root]: the third part's weight goes to the others
        of_out, of_root, of_both = self.lin_beta.weight.chunk(3, dim=1)
        beta = (functional.linear(out, of_out + of_both) + functional.linear(root, of_root - of_both)).sigmoid()
        return self.finish(beta * root + (1 - beta) * out)
