"""What layers share that aggregate in one way, many of them over a normalized graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from qgnn.config import QConfig
from qgnn.graph import Graph
from qgnn.nn._layer import QuantizedConv
from qgnn.nn.epilogue import Epilogue
from qgnn.nn.gcn_norm import normalized_graph
from qgnn.qtensor import QTensor

SUM = {"add": "sum", "sum": "sum"}
SUM_OR_MEAN = {**SUM, "mean": "mean"}
_PYG_CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x")


class PropagationConv(QuantizedConv):
    """A convolution whose aggregation is one of :attr:`reduces`; another one takes PyG's own path."""

    reduces: ClassVar[Mapping[str, str]] = SUM_OR_MEAN  # values of ``aggr``, and what functional.spmm calls them

    def configure(self, config: QConfig | None, epilogue: Epilogue | None = None) -> None:
        """Set what is quantized, and what is applied to the result."""
        super().configure(config, epilogue)
        self._forget()
        if config is not None and self.reduce is None:
            raise ValueError(
                f"'{type(self).__name__}' expects 'aggr' to be one of {tuple(self.reduces)} (got {self.aggr!r}); other "
                f"aggregations run in full precision with config=None"
            )

    @property
    def reduce(self) -> str | None:
        """The aggregation as :func:`functional.spmm` calls it; ``None`` for one that takes PyG's own path."""
        return self.reduces.get(self.aggr) if isinstance(self.aggr, str) else None

    def check_rows(self, x: Tensor | QTensor, batched: bool = True) -> None:
        """Raise unless ``x`` is one tensor of node features, with nodes where they are expected."""
        name = type(self).__name__
        if isinstance(x, (tuple, list)):
            raise ValueError(f"'{name}' expects one tensor of node features (got {len(x)}); it is no bipartite layer")
        if len(x.shape) != 2 and not (batched and len(x.shape) == 3):
            shapes = "[N, F] or [B, N, F]" if batched else "[N, F]"
            raise ValueError(f"'{name}' expects 'x' of shape {shapes} (got {list(x.shape)})")
        if self.nodes_elsewhere(x):
            raise ValueError(
                f"'{name}' expects nodes along the last but one dimension of 'x' (got node_dim={self.node_dim} for "
                f"{list(x.shape)}); transpose 'x', as PyG's layer multiplies its weights along that dimension too"
            )

    def normalized(self: Any, x: Tensor | QTensor, edge_index: Any, edge_weight: Tensor | None) -> Graph:
        """The graph to aggregate over, with the weights that PyG's ``gcn_norm`` gives it."""
        normalize = getattr(self, "normalize", True)  # a layer without this option always does
        return normalized_graph(
            edge_index,
            x.shape[-2],
            edge_weight,
            x.dtype,
            improved=getattr(self, "improved", False),
            add_self_loops=self.add_self_loops and normalize,
            normalize=normalize,
            flow=self.flow,
            mean=self.reduce == "mean",
        )

    def messages(self, *args: Any) -> Any:
        """PyG's own path, in full precision."""
        try:
            return super().messages(*args)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Drop what PyG remembers of a graph, and would serve for any other one."""
        for name in _PYG_CACHES:
            if getattr(self, name, None) is not None:
                setattr(self, name, None)
