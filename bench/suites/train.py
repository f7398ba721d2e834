"""A whole training step of a GCN: forward, loss, backward, Adam; constant features are quantized once, before."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from qgnn.functional import quantize
from qgnn.nn import Epilogue, QGCNConv, QSAGEConv
from qgnn.qtensor import QTensor

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import INT8, OURS, Setting, csr_int32, gcn_adjacency, graph, graph_name, tf32
from .step import LARGE, TOLERANCE, Context, Network, PreparedGCNConv, autocast_bf16, training_step

# The usual model of each data set's size: widths of the hidden layers, dropout.
MODELS = {"arxiv": ((256, 256), 0.0), "pubmed": ((64,), 0.5), "cora": ((64,), 0.5)}


class Convolutions(torch.nn.Module):
    """Convolutions with ReLU, unless they have it in their epilogue, and dropout between them.

    With a ``mask_seed`` the masks depend on nothing else, so that the results of two providers can be compared.
    """

    def __init__(
        self,
        make_conv: Callable[[int, int], torch.nn.Module],
        widths: Sequence[int],
        dropout: float = 0.0,
        mask_seed: int | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.mask_seed = dropout, mask_seed
        self.convs = torch.nn.ModuleList(make_conv(wide, narrow) for wide, narrow in pairwise(widths))
        if isinstance(self.convs[-1], (QGCNConv, QSAGEConv)):
            self.convs[-1].configure(None)  # what feeds the softmax stays in full precision

    def forward(self, x: Tensor | QTensor, edges: Any) -> Tensor:
        for layer, conv in enumerate(self.convs[:-1]):
            out = conv(x, edges)
            x = self._drop(out.relu() if getattr(conv, "epilogue", None) is None else out, layer)
        return self.convs[-1](x, edges)

    def _drop(self, x: Tensor, layer: int) -> Tensor:
        if self.dropout == 0.0:
            return x
        if self.mask_seed is not None:
            torch.manual_seed(self.mask_seed + layer)
        if x.dtype == torch.float64:  # the reference takes everyone's masks, which are drawn for fp32
            return x * F.dropout(torch.ones_like(x, dtype=torch.float32), self.dropout)
        return F.dropout(x, self.dropout)


class Problem:
    """Data, initial weights and loss that the providers of a case share.

    Args:
        like: The graph's shape.
        setting: Where it runs.
    """

    def __init__(self, like: str, setting: Setting) -> None:
        data = graph(like, setting)
        hidden, self.dropout = MODELS[like]
        self.widths = (data.num_features, *hidden, int(data.y.max()) + 1)
        self.name = f"{graph_name(like, setting)}/gcn/{'-'.join(map(str, self.widths))}"
        self.setting, self.edge_index, self.num_nodes = setting, data.edge_index, int(data.num_nodes)
        self.x, self.y, self.mask = data.x, data.y, data.train_mask
        torch.manual_seed(0)
        self.state = Convolutions(GCNConv, self.widths).state_dict()

    def work(
        self,
        make_conv: Callable[[int, int], torch.nn.Module],
        edges: Any,
        autocast: Context = nullcontext,
        features: QTensor | None = None,
        compiled: bool = False,
    ) -> Work:
        """The step of one provider; ``features`` are what its model takes in place of the data set's."""

        def make(checked: bool) -> Convolutions:
            model = Convolutions(make_conv, self.widths, self.dropout, 0 if checked else None).to(self.setting.device)
            model.load_state_dict(self.state)
            return model

        def forward(network: Network, _: Tensor | None) -> tuple[Tensor, Tensor]:
            with autocast():
                out = network(self.x if features is None else features, edges)
            return out, self.loss(out)

        return training_step(make, forward, compiled=compiled)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out[self.mask].to(torch.promote_types(out.dtype, torch.float32)), self.y[self.mask])

    def ours(self, precision: str, epilogue: Epilogue | None = None) -> Work:
        """Constant features are quantized once, as a data set's are."""
        make_conv = partial(QGCNConv, cached=True, config=OURS[precision], epilogue=epilogue)
        features = quantize(self.x, INT8) if precision == "int8" else None
        return self.work(make_conv, self.edge_index, features=features)

    def coo(self, **how: Any) -> Work:
        return self.work(partial(GCNConv, cached=True), self.edge_index, **how)

    def adjacency(self, dtype: torch.dtype) -> Tensor:
        return gcn_adjacency(self.edge_index, self.num_nodes, dtype)

    def csr(self, dtype: torch.dtype = torch.float32, **how: Any) -> Work:
        return self.work(partial(GCNConv, normalize=False), self.adjacency(dtype), **how)

    def prepared(self, dtype: torch.dtype = torch.float32, **how: Any) -> Work:
        matrix = self.adjacency(dtype)
        return self.work(PreparedGCNConv, (matrix, csr_int32(matrix.t())), **how)

    def bf16(self, setup: Callable[..., Work], **how: Any) -> Work:
        if self.dropout:
            raise UnavailableError("dropout draws other masks in bf16, so there is nothing to compare with")
        return setup(autocast=autocast_bf16(self.setting), **how)

    def exact(self) -> Sequence[Tensor]:
        """Output and gradients of the first step in float64."""
        double = copy(self)
        double.x = self.x.double()
        matrix = self.adjacency(torch.float64)
        edges = (matrix, csr_int32(matrix.t()))
        check = double.work(lambda *widths: PreparedGCNConv(*widths).double(), edges).check
        assert check is not None
        return check()

    def providers(self) -> Iterator[Provider]:
        for precision in OURS:
            yield Provider(f"qgnn {precision}", partial(self.ours, precision), TOLERANCE[precision])
            fused = partial(self.ours, precision, Epilogue("relu"))
            yield Provider(f"qgnn relu-fused {precision}", fused, TOLERANCE[precision])
        yield Provider("pyg coo fp32", self.coo, TOLERANCE["fp32"])
        yield Provider("pyg coo bf16", partial(self.bf16, self.coo), TOLERANCE["bf16"])
        for name, setup in (("pyg csr", self.csr), ("torch csr both ways", self.prepared)):
            yield Provider(f"{name} fp32", setup, TOLERANCE["fp32"])
            if self.setting.is_cuda:  # torch multiplies sparse bf16 matrices there only
                yield Provider(f"{name} tf32", tf32(setup), TOLERANCE["tf32"])
                yield Provider(f"{name} bf16", partial(self.bf16, setup, dtype=torch.bfloat16), TOLERANCE["bf16"])
        # Compilation takes minutes on a CPU, to no gain in sparse sums, and too long to be repeated for each graph.
        if self.setting.is_cuda and self.num_nodes > LARGE:
            compiled = partial(self.coo, compiled=True)
            yield Provider("pyg coo torch.compile fp32", compiled, TOLERANCE["fp32"])


def cases(setting: Setting) -> Iterator[Case]:
    for like in setting.shapes(*MODELS):
        gcn = Problem(like, setting)
        yield Case(gcn.name, "step", gcn.exact, list(gcn.providers()))
