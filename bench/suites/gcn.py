"""What the suites ``layer``, ``train`` and ``memory`` share: a training step of a GCN, and who can make it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from qgnn.functional import graph_linear, quantize
from qgnn.nn import QGCNConv
from qgnn.qtensor import QTensor

from ..harness import Provider, UnavailableError, Work
from .inputs import INT8, OURS, Setting, csr_int32, graph, graph_name, randn, require_bf16, sparse_sum, tf32

# Bounds on the output and on every gradient of one step. Int8 products and aggregations, forward and backward, add up
# about six roundings of 0.013 each (see TOLERANCE in inputs.py). ReLUs make more of them: a normal value with an error
# of 0.02, from its product and its aggregation, has the wrong sign with a probability of 0.02 / pi, and then a whole
# element of a gradient is wrong, of which half are zeros: sqrt(2 * 0.02 / pi) = 0.11 of its norm; with roundings 0.12
# to 0.14. In bf16 the error of a value is 0.005, which makes 0.06. Large graphs average it.
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-1, "int8": 1.5e-1}

LARGE = 100_000  # nodes


class _BothWays(torch.autograd.Function):
    """A x with the transpose for the backward pass prepared, where torch.sparse.mm would transpose in every step."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return sparse_sum(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, sparse_sum(ctx.transposed, grad)


class PreparedConv(GCNConv):
    """The fastest that torch's own sparse product allows: GCNConv on a prepared pair of CSR matrices."""

    def forward(self, x: Tensor, edges: tuple[Tensor, Tensor]) -> Tensor:
        out = _BothWays.apply(*edges, self.lin(x))
        return out + self.bias.to(out.dtype)


class FusedConv(QGCNConv):
    """Ours with the ReLU behind it in the aggregation's own pass, which keeps one bit a value."""

    def with_relu(self, x: Tensor | QTensor, edge_index: Tensor) -> Tensor:
        graph = self._prepare(x.shape[0], edge_index, None, x.dtype)
        return graph_linear(graph, x, self.lin.weight, self.bias, activation="relu", config=self.config)


class GCN(torch.nn.Module):
    """Convolutions with ReLU and dropout between them.

    With a ``mask_seed`` the masks depend on nothing else, so that the results of two providers can be compared.
    """

    def __init__(
        self,
        make_conv: Callable[..., torch.nn.Module],
        widths: Sequence[int],
        dropout: float = 0.0,
        mask_seed: int | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.mask_seed = dropout, mask_seed
        self.convs = torch.nn.ModuleList(make_conv(wide, narrow) for wide, narrow in pairwise(widths))
        if len(widths) > 2 and isinstance(self.convs[-1], QGCNConv):
            self.convs[-1].config = None  # what feeds the softmax stays in full precision

    def forward(self, x: Tensor | QTensor, edges: Any) -> Tensor:
        for layer, conv in enumerate(self.convs[:-1]):
            x = conv.with_relu(x, edges) if isinstance(conv, FusedConv) else conv(x, edges).relu()
            x = self._drop(x, layer)
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
    """Data, initial weights and loss that the providers of a case share: a whole model, or a layer inside a network.

    Args:
        name: The case's name after that of the graph.
        like: The graph's shape.
        widths: Sizes of the rows from the input to the output; two of them make a layer inside a network, whose input
            needs a gradient and whose output receives one.
        setting: Where it runs.
        dropout: Dropout between layers.
    """

    def __init__(self, name: str, like: str, widths: Sequence[int], setting: Setting, dropout: float = 0.0) -> None:
        data = graph(like, setting)
        self.name = f"{graph_name(like, setting)}/{name}"
        self.widths, self.dropout, self.setting = widths, dropout, setting
        self.edge_index, self.num_nodes = data.edge_index, int(data.num_nodes)
        self.is_model = len(widths) > 2
        if self.is_model:
            self.x, self.y, self.mask = data.x, data.y, data.train_mask
        else:
            self.x = randn(self.num_nodes, widths[0], setting=setting, seed=1).relu_()
            self.grad = randn(self.num_nodes, widths[-1], setting=setting, seed=2)
        torch.manual_seed(0)
        self.state = GCN(GCNConv, widths).state_dict()

    def adjacency(self, dtype: torch.dtype) -> Tensor:
        """The normalized adjacency matrix in CSR, rows = targets."""
        (source, target), weight = gcn_norm(self.edge_index, None, self.num_nodes)
        size = (self.num_nodes, self.num_nodes)
        return csr_int32(torch.sparse_coo_tensor(torch.stack([target, source]), weight.to(dtype), size))

    def work(
        self,
        make_conv: Callable[[int, int], torch.nn.Module],
        edges: Any,
        dtype: torch.dtype = torch.float32,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        features: QTensor | None = None,
        compiled: bool = False,
    ) -> Work:
        """The step of one provider.

        Args:
            make_conv: Makes a layer from its widths.
            edges: What its layers take as edges.
            dtype: Type that the rest of a network would hand to a layer, so that no provider pays for casts.
            autocast: Context of the forward pass.
            features: What a model takes in place of the data set's features.
            compiled: Whether the model goes through torch.compile.
        """
        # A layer's input is another's output: it needs a gradient. A data set's features are constants.
        x = self.x if self.is_model else self.x.to(dtype, copy=True).requires_grad_()
        features = x if features is None else features

        def fresh(mask_seed: int | None = None) -> GCN:
            model = GCN(make_conv, self.widths, self.dropout, mask_seed).to(self.setting.device)
            model.load_state_dict(self.state)
            return model

        def compile_(model: GCN) -> Callable[..., Tensor]:
            return torch.compile(model) if compiled else model

        model = fresh()
        network = compile_(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def forward(network: Callable[..., Tensor], features: Tensor | QTensor) -> tuple[Tensor, Tensor]:
            with autocast():
                out = network(features, edges)
            return out, self.loss(out) if self.is_model else out

        def backward(network: Callable[..., Tensor]) -> Tensor:
            out, loss = forward(network, features)
            loss.backward(None if self.is_model else self.grad.to(loss.dtype))
            return out

        def step() -> None:
            optimizer.zero_grad()
            x.grad = None
            backward(network)
            optimizer.step()

        checked: list[tuple[GCN, Callable[..., Tensor]]] = []  # one, made late: compiling takes a while

        def check() -> list[Tensor]:
            x.grad = None
            if not checked:
                other = fresh(mask_seed=0)
                checked.append((other, compile_(other)))
            other, run = checked[0]
            other.load_state_dict(self.state)
            other.zero_grad()
            out = backward(run)
            grads = [t.grad for t in (*other.parameters(), x) if t.requires_grad]
            return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]

        def kept() -> object:
            """For counting: the input of a layer is another's output and counts, a data set's features do not."""
            return forward(network, features if self.is_model else x.detach().clone().requires_grad_())

        return Work(step, check, kept)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out[self.mask].to(torch.promote_types(out.dtype, torch.float32)), self.y[self.mask])

    def ours(self, precision: str, conv: type[QGCNConv] = QGCNConv) -> Work:
        """Constant features are quantized once, as a data set's are."""
        make_conv = partial(conv, cached=True, config=OURS[precision])
        features = quantize(self.x, INT8) if self.is_model and precision == "int8" else None
        return self.work(make_conv, self.edge_index, features=features)

    def coo(self, **how: Any) -> Work:
        return self.work(partial(GCNConv, cached=True), self.edge_index, **how)

    def csr(self, dtype: torch.dtype = torch.float32, **how: Any) -> Work:
        return self.work(partial(GCNConv, normalize=False), self.adjacency(dtype), dtype=dtype, **how)

    def prepared(self, dtype: torch.dtype = torch.float32, **how: Any) -> Work:
        matrix = self.adjacency(dtype)
        return self.work(PreparedConv, (matrix, csr_int32(matrix.t())), dtype=dtype, **how)

    def bf16_in(self) -> Work:
        """Ours between layers that hand each other bf16 rows."""
        return self.work(partial(QGCNConv, cached=True, config=INT8), self.edge_index, dtype=torch.bfloat16)

    def bf16(self, setup: Callable[..., Work]) -> Work:
        require_bf16(self.setting)
        if self.dropout:
            raise UnavailableError("dropout draws other masks in bf16, so there is nothing to compare with")
        autocast = partial(torch.autocast, self.setting.device.type, torch.bfloat16)
        return setup(dtype=torch.bfloat16, autocast=autocast)

    def exact(self) -> Sequence[Tensor]:
        """Output and gradients of the first step in float64."""
        double = copy(self)
        double.x = self.x.double()
        if not self.is_model:
            double.grad = self.grad.double()
        matrix = self.adjacency(torch.float64)
        edges = (matrix, csr_int32(matrix.t()))
        check = double.work(lambda *widths: PreparedConv(*widths).double(), edges, dtype=torch.float64).check
        assert check is not None
        return check()

    def providers(self) -> Iterator[Provider]:
        for precision in OURS:
            yield Provider(f"qgnn {precision}", partial(self.ours, precision), TOLERANCE[precision])
            if self.is_model:
                fused = partial(self.ours, precision, FusedConv)
                yield Provider(f"qgnn relu-fused {precision}", fused, TOLERANCE[precision])
        if self.setting.is_cuda and not self.is_model:
            yield Provider("qgnn bf16-in int8", self.bf16_in, TOLERANCE["int8"])
        for name, setup in (("pyg coo", self.coo), ("pyg csr", self.csr), ("torch csr both ways", self.prepared)):
            yield Provider(f"{name} fp32", setup, TOLERANCE["fp32"])
            if self.setting.is_cuda and setup != self.coo:
                yield Provider(f"{name} tf32", tf32(setup), TOLERANCE["bf16"])
            if self.setting.is_cuda or setup == self.coo:  # torch multiplies sparse bf16 matrices on CUDA only
                yield Provider(f"{name} bf16", partial(self.bf16, setup), TOLERANCE["bf16"])
        # Compilation takes minutes on a CPU, to no gain in sparse sums, and too long to be repeated for each graph.
        if self.setting.is_cuda and self.num_nodes > LARGE:
            compiled = partial(self.coo, compiled=True)
            yield Provider("pyg coo torch.compile fp32", compiled, TOLERANCE["fp32"])
