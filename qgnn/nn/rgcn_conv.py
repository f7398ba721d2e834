"""QRGCNConv: relational graph convolution with an int8 product and int8 aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.nn.conv import RGCNConv

from qgnn import functional
from qgnn.config import QConfig
from qgnn.edge_checks import check_edge_index
from qgnn.graph import Graph, check_num_nodes, identity, kind_of, to_edges
from qgnn.nn._common import check_flow, float_rows, operand
from qgnn.nn._propagation import SUM_OR_MEAN, PropagationConv
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor
from qgnn.weak_cache import cached


class QRGCNConv(PropagationConv, RGCNConv):
    r"""The relational convolution of `"Modeling Relational Data with Graph Convolutional Networks"
    <https://arxiv.org/abs/1703.06103>`_ on integer operands:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{x}_i \mathbf{\Theta}_{\textrm{root}} + \sum_{r \in \mathcal{R}}
        \mathrm{aggr}_{j \in \mathcal{N}_r(i)} (\mathbf{x}_j) \, \mathbf{\Theta}_r + \mathbf{b}.

    One aggregation serves all relations: it sums into a row for each target and relation, ``[T * R, F]``. One product
    with all weights follows, whose rows are ``R * F`` wide, up to 131,071 with a ``config``; what is kept of them for
    the backward pass is int8, where PyG keeps fp32. With ``num_blocks`` the products with the small blocks are full
    precision, and so are maxima and minima: rounding would change which row is the largest. The gradient of equal terms
    goes to the first of them, where PyG's layer splits it evenly. A :class:`torch_geometric.nn.RGCNConv` with the same
    parameters and state dict.

    The graph is sorted once for edges and their types, and remembered while both live unchanged. Without features, or
    with node numbers in their place, the layer looks weights up on PyG's own path, in full precision.

    Args:
        in_channels: Size of each input row, or of source and target rows; the number of nodes without features.
        out_channels: Size of each output row.
        num_relations: Number of relations ``R``.
        num_bases: Number of matrices that the weights of all relations are combined from.
        num_blocks: Number of blocks on the diagonal of each weight.
        aggr: ``"mean"``, ``"add"``, ``"max"`` or ``"min"``.
        root_weight: Whether to add the transformed rows of the targets themselves.
        is_sorted: Accepted as in PyG.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision through the same kernels.
        epilogue: What to apply to the result.
        **kwargs: Further arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** node features ``[N, F_in]`` (a tensor or a :class:`qgnn.QTensor`), a pair of those of sources and
          targets, node numbers ``[N]`` or ``None``; edges ``[2, E]``, a sparse matrix or a :class:`qgnn.Graph`; edge
          types ``[E]``, or the values of a ``torch_sparse.SparseTensor``
        - **output:** node features ``[T, F_out]``, of ``x``'s type

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`.
        ValueError: If edges, their types and node features do not fit together.

    Example:
        >>> conv = QRGCNConv(64, 32, num_relations=4, num_bases=2)
        >>> out = conv(x, edge_index, edge_type)
    """

    reduces: ClassVar[Mapping[str, str]] = {**SUM_OR_MEAN, "max": "max", "min": "min"}

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            num_relations,
            num_bases,
            num_blocks,
            aggr,
            root_weight,
            is_sorted,
            bias,
            **kwargs,
        )
        self.configure(config, epilogue)

    @property
    def note(self) -> str | None:
        """What a summary says about this layer beyond its config, or None."""
        pyg = super().note
        if self.config is None or pyg is not None:
            return pyg
        exact = [
            *(["maxima" if self.reduce == "max" else "minima"] if self.reduce in ("max", "min") else []),
            *([] if self.num_blocks is None else ["products with blocks"]),
        ]
        return f"{' and '.join(exact)} run in full precision" if exact else None

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        """Convolve ``x`` over the edges of each relation.

        Args:
            x: Node features, a pair of those of sources and targets, node numbers or ``None``, as above.
            edge_index: Edges, as above.
            edge_type: Relation of each edge, ``[E]``; ``None`` where a sparse matrix holds it.
        """
        x_l, x_r = x if isinstance(x, (tuple, list)) else (x, x)
        reduce, config = self.reduce, self.active
        if reduce is None or self.needs_messages() or not (_is_features(x_l) and _is_features(x_r)):
            return self.messages(x, edge_index, edge_type)
        for name, rows, width in (("x", x_l, self.in_channels_l), ("x_r", x_r, self._width_r)):
            if len(rows.shape) != 2 or rows.shape[1] != width:
                raise ValueError(
                    f"'{type(self).__name__}' expects '{name}' with {width} columns (got {list(rows.shape)})"
                )
        num_targets = x_r.shape[0]
        check_flow(self, x_l.shape[0], num_targets)
        graph = self._relations(edge_index, edge_type, x_l.shape[0], num_targets)
        if reduce in ("max", "min"):
            rows = functional.spmm(graph, float_rows(x_l), reduce=reduce)  # [T * R, F]
        else:
            shared = x_r is x_l and self.root is not None
            codes = operand(x_l, config, shared=shared)
            x_r = codes if shared else x_r
            rows = functional.spmm(graph, codes, reduce=reduce, config=config)
        out, root = self._transformed(rows, num_targets), None
        if self.root is not None:
            root = functional.linear(operand(x_r, config), self.root.t(), config=config)
        return self.finish(out, self.bias, residual=root)

    def _transformed(self, rows: Tensor, num_targets: int) -> Tensor:
        """The sum over relations of rows times their weight."""
        R, F = self.num_relations, self.in_channels_l
        weight: Tensor = self.weight
        if self.num_blocks is not None:
            blocks = rows.view(num_targets, R, *weight.shape[1:3])
            return torch.einsum("trbf,rbfm->tbm", blocks, weight.to(rows.dtype)).reshape(num_targets, self.out_channels)
        if self.num_bases is not None:
            weight = self.comp @ weight.view(self.num_bases, -1)
        weight = weight.reshape(R * F, self.out_channels)
        return functional.linear(rows.view(num_targets, R * F), weight.t(), config=self.active)

    def _relations(self, adjacency: Any, edge_type: Tensor | None, num_sources: int, num_targets: int) -> Graph:
        """The edges, with a target for each node and relation: one graph, of a shape that no type changes."""
        name, R = type(self).__name__, self.num_relations

        def build() -> Graph:
            edge_index, value = to_edges(adjacency)
            kind = kind_of(adjacency)
            types = value if kind == "torch_sparse" else edge_type
            if types is None:
                raise ValueError(f"'{name}' expects 'edge_type', a relation for each edge (got None)")
            if types.is_floating_point() or types.shape != edge_index.shape[1:]:
                raise ValueError(
                    f"'{name}' expects 'edge_type' with an integer for each of {edge_index.shape[1]} edges (got "
                    f"{types.dtype} {list(types.shape)})"
                )
            if kind == "graph":
                if value is not None:
                    raise ValueError(f"'{name}' takes no edge weights (got a Graph that has some)")
                types = types.index_select(0, adjacency.csr.order)
            if self.flow == "target_to_source":
                edge_index = edge_index.flip(0)
            check_edge_index(edge_index, num_sources, num_targets)
            self._check_types(types)
            target = edge_index[1].long() * R + types.long()
            return Graph.from_edge_index(torch.stack([edge_index[0].long(), target]), (num_sources, num_targets * R))

        if isinstance(adjacency, Graph):
            check_num_nodes(adjacency, num_sources, num_targets)
        tensors = (*identity(adjacency, weights=True), *(() if edge_type is None else (edge_type,)))
        return cached(tensors, ("relations", R, num_sources, num_targets, self.flow), build)

    def _check_types(self, types: Tensor) -> None:
        inside = ((types >= 0) & (types < self.num_relations)).all()
        if torch.compiler.is_compiling():
            torch._assert_async(inside, "'edge_type' is no relation")
        elif not inside:
            raise ValueError(
                f"'{type(self).__name__}' expects 'edge_type' from 0 to {self.num_relations - 1} (got "
                f"{int(types.min())} to {int(types.max())})"
            )

    @property
    def _width_r(self) -> int:
        return self.in_channels if isinstance(self.in_channels, int) else self.in_channels[1]


def _is_features(x: Any) -> bool:
    return isinstance(x, QTensor) or (isinstance(x, Tensor) and x.is_floating_point())
