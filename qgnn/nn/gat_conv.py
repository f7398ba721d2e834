"""QGATConv: graph attention in one pass over int8 rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.nn.conv import GATConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._attention import AttentionConv, score_product, score_weight
from qgnn.nn._common import initialize_lazy
from qgnn.nn._edges import num_loops_of
from qgnn.nn.epilogue import Epilogue


class QGATConv(AttentionConv, GATConv):
    r"""The graph attention of `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_ on integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{ji} \mathbf{\Theta} \mathbf{x}_j
        \quad \text{with} \quad
        \alpha_{ji} = \mathrm{softmax}_{j}(\mathrm{LeakyReLU}(\mathbf{a}_s^{\top} \mathbf{\Theta} \mathbf{x}_j +
        \mathbf{a}_t^{\top} \mathbf{\Theta} \mathbf{x}_i + \mathbf{a}_e^{\top} \mathbf{\Theta}_e \mathbf{e}_{ji})).

    The product :math:`\mathbf{\Theta} \mathbf{x}` and the weighted sum run on int8 codes, forward and backward. Gather,
    scores, softmax, dropout and sum are one pass over the edges, with nothing of a size of edges kept; the scores are
    made in full precision, of :math:`\mathbf{\Theta}^{\top} \mathbf{a}` and ``x`` itself. A
    :class:`torch_geometric.nn.GATConv` with the same parameters and state dict; it also loads old checkpoints, with
    ``lin_src`` for ``lin``. After `"Tango: Rethinking Quantization for Graph Neural Network Training on GPUs"
    <https://arxiv.org/abs/2308.00890>`_.

    The graph with its self-loops is sorted once per ``edge_index`` and remembered while that tensor lives unchanged.
    With an explainer or hooks attached, the layer takes PyG's own full-precision path. With
    ``return_attention_weights`` the weights are made edge by edge, as PyG returns them: in training with dropout.

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
        bias: Whether to learn an additive bias.
        residual: Whether to add a linear function of the targets' rows.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** node features ``[N, F_in]`` or a pair ``([S, F_s], [T, F_t])``, whose second entry may be ``None``
          (tensors or :class:`qgnn.QTensor`), edges ``[2, E]``, a sparse matrix (rows that it
          has for values are edge features) or a :class:`qgnn.Graph`, edge features ``[E, edge_dim]`` *(optional)*
        - **output:** node features ``[T, H * F_out]``, or ``[T, F_out]`` without ``concat``, of ``x``'s type; with
          ``return_attention_weights`` also the edges and their weights ``[E, H]``, self-loops last

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`, or ``x`` is not a dense floating-point tensor.
        ValueError: If edges and node features do not fit together, ``edge_attr`` comes without ``edge_dim``, or
            ``config`` is of another granularity than ``"row"``.

    Example:
        >>> conv = QGATConv(512, 64, heads=4, config=qgnn.QConfig(bits=8))
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
            residual,
            **kwargs,
        )
        self.configure(config, epilogue)

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Attend from each target of ``edge_index`` to its sources.

        Args:
            x: Node features, or a pair of those of sources and targets, as above.
            edge_index: Edges, as above.
            edge_attr: Features of edges, ``[E, edge_dim]``.
            size: Numbers of sources and targets, ``(S, T)``; ``None`` takes them from ``x``.
            return_attention_weights: Whether to return ``(out, (edge_index, alpha))``, with ``alpha [E, H]`` of all
                edges that attention runs over, added self-loops included.
        """
        edge_attr = self.checked_attr(edge_attr)
        if self.takes_messages:
            return self.messages(x, edge_index, edge_attr, size, return_attention_weights)
        x, config = self.pair_of(x), self.active
        lins = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        # The residual takes the codes of targets, and a backward pass, for which they are kept in place of the rows.
        codes = self.codes_of(x, target=self.res is not None or torch.is_grad_enabled())
        num_nodes = self.sizes_of(x, size)
        rows = self.heads_of(lins[0], codes[0])
        score_source, score_target = self._scores(x, codes, lins, num_nodes[1])
        edges = self.edges_of(
            edge_index,
            edge_attr,
            num_nodes,
            num_loops_of(num_nodes, x) if self.add_self_loops else None,
            self.fill_value,
            bool(return_attention_weights) or self.rounds_weights,
        )
        edge_weight = None if edges.attr is None else score_weight(self.att_edge, self.lin_edge.weight)
        weights = None
        if return_attention_weights or self.rounds_weights:
            scores = functional.sddmm(edges.graph, score_source, score_target, "add")
            if edges.attr is not None and edge_weight is not None:
                scores = scores + edges.attr.to(scores.dtype) @ edge_weight.t()
            out, weights, _ = self.weighted_sum(edges, rows, leaky_relu(scores, self.negative_slope))
        else:
            out = functional.attention(
                edges.graph,
                rows,
                score_source,
                edges.of_targets(score_target),
                self.negative_slope,
                self.weight_dropout,
                edge_attr=edges.attr,
                edge_weight=edge_weight,
                config=config,
            )
        out = self.finish(self.by_node(edges.results(out)), self.bias, self.residual_of(x[1], codes[1]))
        return out if weights is None or not return_attention_weights else (out, edges.with_weights(weights))

    def _scores(self, x: Any, codes: Any, lins: Any, num_targets: int) -> tuple[Tensor, Tensor]:
        """Scores of sources and of targets."""
        of_source = score_weight(self.att_src, lins[0].weight)
        if x[1] is None:
            score_source = score_product(x[0], codes[0], of_source)
            return score_source, score_source.new_zeros((num_targets, self.heads))
        initialize_lazy(lins[1], x[1])
        of_target = score_weight(self.att_dst, lins[1].weight)
        if x[1] is x[0]:
            both = score_product(x[0], codes[0], torch.cat([of_source, of_target]))
            return both[:, : self.heads], both[:, self.heads :]
        return score_product(x[0], codes[0], of_source), score_product(x[1], codes[1], of_target)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Up to PyG 2.5 the weight that both sides share had two names.
        names = [f"{prefix}{name}.weight" for name in ("lin", "lin_src", "lin_dst")]
        if self.lin is not None and names[0] not in state_dict and names[1] in state_dict:
            state_dict[names[0]] = state_dict.pop(names[1])
            if names[2] in state_dict and torch.equal(state_dict[names[0]], state_dict[names[2]]):
                state_dict.pop(names[2])
        super()._load_from_state_dict(state_dict, prefix, *args)
