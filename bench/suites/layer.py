"""One layer inside a network, its input needs a gradient and its output receives one: forward, backward and optimizer
step of six layers as PyG constructs them, quantization included."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv
from torch_geometric.utils import add_self_loops, degree, remove_self_loops

import qgnn
from qgnn import QConfig

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import OURS, Setting, adjacency, adjacency_int64, csr_int32, gcn_adjacency, graph, graph_name, randn, tf32
from .pieces import Given, pieces
from .step import (
    LARGE,
    TOLERANCE,
    Context,
    Network,
    PreparedGCNConv,
    PreparedGINConv,
    PreparedSAGEConv,
    autocast_bf16,
    gradients_of,
    training_step,
)

# In order of importance: under a time budget the last ones may be left out.
LAYERS: dict[str, type[torch.nn.Module]] = {
    "gcn": GCNConv,
    "gat": GATConv,
    "sage": SAGEConv,
    "gatv2": GATv2Conv,
    "transformer": TransformerConv,
    "gin": GINConv,
}
ATTENTION = {"gat": {"add_self_loops": False}, "gatv2": {"add_self_loops": False}, "transformer": {}}
PREPARED: dict[str, type[torch.nn.Module]] = {"gcn": PreparedGCNConv, "sage": PreparedSAGEConv, "gin": PreparedGINConv}
SIZES = {"arxiv": (4, 64), "pubmed": (8, 8), "cora": (8, 8)}  # heads, width of a head; others have their product

COMPILED = ("gcn", "gat")
BF16_COUNTS = 256

# Softmax does not see what is added to all keys: the gradient of this bias is zero but for rounding.
WITHOUT = ("lin_key.bias",)


# Softmax takes away what the scores of a target share, so that a target's row of GATv2 has a gradient from the slopes'
# differences alone: of 1 and 0.2 the deviation is 0.4. The sign of a value with an error of 0.0225 is wrong with
# a probability of 0.0225 / pi, which changes a slope by 0.8: 2 * sqrt(0.0225 / pi) = 0.17 of the norm, and with
# roundings 0.2.
GATV2_TOLERANCE = {**TOLERANCE, "int8": 2.5e-1}


class Problem:
    """Data and initial weights that the providers of a case share."""

    def __init__(self, kind: str, like: str, setting: Setting) -> None:
        data = graph(like, setting)
        self.kind, self.setting = kind, setting
        self.tolerance = GATV2_TOLERANCE if kind == "gatv2" else TOLERANCE
        self.heads, self.width = SIZES[like]
        self.channels = self.heads * self.width
        size = f"{self.heads}x{self.width}" if kind in ATTENTION else self.channels
        self.name = f"{graph_name(like, setting)}/{kind}-layer/{size}"
        self.edge_index, self.num_nodes = data.edge_index, int(data.num_nodes)
        self.x = randn(self.num_nodes, self.channels, setting=setting, seed=1).relu_()
        self.grad = randn(self.num_nodes, self.channels, setting=setting, seed=2)
        torch.manual_seed(0)
        self.state = self.layer(LAYERS[kind]).state_dict()

    def layer(self, cls: Callable[..., torch.nn.Module], **options: Any) -> torch.nn.Module:
        """A layer of PyG's or of ours: these take the same arguments."""
        if self.kind == "gin":
            return cls(self.perceptron("config" in options, options.get("config")), **options)
        if self.kind in ATTENTION:
            return cls(self.channels, self.width, heads=self.heads, **options)
        return cls(self.channels, self.channels, **options)

    def perceptron(self, is_ours: bool, config: QConfig | None) -> torch.nn.Module:
        """What GIN applies to its sums."""
        size = (self.channels, self.channels)
        if not is_ours:
            return torch.nn.Sequential(torch.nn.Linear(*size), torch.nn.ReLU(), torch.nn.Linear(*size))
        first = qgnn.nn.QLinear(*size, config=config, epilogue=qgnn.nn.Epilogue("relu"))
        return torch.nn.Sequential(first, torch.nn.Identity(), qgnn.nn.QLinear(*size, config=config))

    def work(
        self,
        make: Callable[[], torch.nn.Module],
        edges: Any,
        dtype: torch.dtype = torch.float32,
        autocast: Context = nullcontext,
        compiled: bool = False,
    ) -> Work:
        """The step of one provider.

        Args:
            make: Makes the layer.
            edges: What it takes as edges.
            dtype: Type that the rest of a network would hand to a layer, so that no provider pays for casts.
            autocast: Context of the forward pass.
            compiled: Whether the layer goes through torch.compile.
        """

        def forward(network: Network, x: Tensor | None) -> tuple[Tensor, Tensor]:
            with autocast():
                out = network(x, edges)
            return out, out

        x = self.x.to(dtype, copy=True).requires_grad_()
        return training_step(lambda _: self.loaded(make()), forward, x, self.grad, compiled, WITHOUT)

    def loaded(self, layer: torch.nn.Module) -> torch.nn.Module:
        """With the weights that everyone starts from."""
        layer.load_state_dict(self.state)
        return layer.to(self.setting.device)

    def ours(self, config: QConfig | None, dtype: torch.dtype = torch.float32) -> Work:
        cls = getattr(qgnn.nn, f"Q{LAYERS[self.kind].__name__}")
        return self.work(partial(self.layer, cls, config=config), self.edge_index, dtype)

    def coo(self, **how: Any) -> Work:
        """PyG's layer as it is given; what it can remember of a graph, it does."""
        options = {"cached": True} if self.kind == "gcn" else {}
        return self.work(partial(self.layer, LAYERS[self.kind], **options), self.edge_index, **how)

    def csr(self, dtype: torch.dtype = torch.float32, **how: Any) -> Work:
        """PyG's layer on a sparse matrix, with the self-loops and weights that it would have made of the edges."""
        if self.kind == "sage" and self.edge_index.unique(dim=1).shape != self.edge_index.shape:
            raise UnavailableError("PyG's mean by a sparse matrix counts parallel edges as one")
        return self.work(self.on_matrix(), self.matrix(dtype), dtype, **how)

    def on_matrix(self) -> Callable[[], torch.nn.Module]:
        options = {"normalize": False} if self.kind == "gcn" else ATTENTION.get(self.kind, {})
        return partial(self.layer, LAYERS[self.kind], **options)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Rows = targets."""
        if self.kind == "gcn":
            return gcn_adjacency(self.edge_index, self.num_nodes, dtype)
        edges = self.edges()
        make = adjacency_int64 if self.kind in (*ATTENTION, "sage") else adjacency
        return make(edges, torch.ones(edges.shape[1], dtype=dtype, device=edges.device), self.num_nodes)

    def edges(self) -> Tensor:
        """With the self-loops that the layer would have added."""
        if not ATTENTION.get(self.kind):
            return self.edge_index
        return add_self_loops(remove_self_loops(self.edge_index)[0], num_nodes=self.num_nodes)[0]

    def prepared(self, dtype: torch.dtype = torch.float32, **how: Any) -> Work:
        """The fastest that torch's own sparse product allows."""
        return self.work(self.on_both(), self.both_ways(dtype), dtype, **how)

    def on_both(self) -> Callable[[], torch.nn.Module]:
        return partial(self.layer, PREPARED[self.kind])

    def both_ways(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The matrix and its transpose; a mean is a sum of shares."""
        matrix = self.matrix(dtype)
        if self.kind == "sage":
            target = self.edge_index[1]
            share = 1 / degree(target, self.num_nodes, dtype=torch.promote_types(dtype, torch.float32))
            matrix = adjacency(self.edge_index, share[target].to(dtype), self.num_nodes)
        return matrix, csr_int32(matrix.t())

    def bf16(self, setup: Callable[..., Work]) -> Work:
        if self.kind == "sage" and setup == self.coo and int(self.edge_index[1].bincount().max()) > BF16_COUNTS:
            raise UnavailableError(f"PyG counts the rows of a mean in bf16, where adding ones ends at {BF16_COUNTS}")
        return setup(dtype=torch.bfloat16, autocast=autocast_bf16(self.setting))

    def exact(self) -> Sequence[Tensor]:
        """Output and gradients of PyG's layer in float64."""
        layer = self.loaded(self.on_matrix()() if self.kind in ATTENTION else self.on_both()()).double()
        x, grad = self.x.double().requires_grad_(), self.grad.double()
        if self.kind in ATTENTION:
            out = self.in_pieces(layer, x, grad)
        else:
            out = layer(x, self.both_ways(torch.float64))
            out.backward(grad)
        return [out.detach(), *gradients_of(layer, x, WITHOUT)]

    def in_pieces(self, layer: torch.nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        """The layer on the edges into so many targets at a time, whose rows are then complete; its products once."""
        linears = {name: child for name, child in layer.named_children() if hasattr(child, "weight")}
        rows = {name: linear(x) for name, linear in linears.items()}
        given = {name: row.detach().requires_grad_() for name, row in rows.items()}
        for name, row in given.items():
            setattr(layer, name, Given(row))
        out = torch.empty_like(grad)
        for targets, edges in pieces(self.edges(), self.num_nodes, self.channels):
            part = layer(x, edges)[targets]
            part.backward(grad[targets])
            out[targets] = part.detach()
        for name, linear in linears.items():
            setattr(layer, name, linear)
        torch.autograd.backward(list(rows.values()), [row.grad for row in given.values()])
        return out

    def providers(self) -> Iterator[Provider]:
        for precision, config in OURS.items():
            yield Provider(f"qgnn {precision}", partial(self.ours, config), self.tolerance[precision])
        if self.setting.is_cuda:
            bf16_in = partial(self.ours, OURS["int8"], torch.bfloat16)
            yield Provider("qgnn bf16-in int8", bf16_in, self.tolerance["int8"])
        yield Provider("pyg coo fp32", self.coo, self.tolerance["fp32"])
        yield Provider("pyg coo bf16", partial(self.bf16, self.coo), self.tolerance["bf16"])
        rivals = {"pyg csr": self.csr, **({"torch csr both ways": self.prepared} if self.kind in PREPARED else {})}
        for name, setup in rivals.items():
            yield Provider(f"{name} fp32", setup, self.tolerance["fp32"])
            if self.setting.is_cuda:  # torch multiplies sparse bf16 matrices there only
                yield Provider(f"{name} tf32", tf32(setup), self.tolerance["tf32"])
                yield Provider(f"{name} bf16", partial(self.bf16, setup), self.tolerance["bf16"])
        # Compilation takes minutes on a CPU, to no gain in sums over edges, and too long on a GPU to be repeated often.
        if self.setting.is_cuda and self.num_nodes > LARGE and self.kind in COMPILED:
            yield Provider("pyg coo torch.compile fp32", partial(self.coo, compiled=True), self.tolerance["fp32"])


def cases(setting: Setting) -> Iterator[Case]:
    for like in setting.shapes(*SIZES):
        for kind in LAYERS:
            problem = Problem(kind, like, setting)
            yield Case(problem.name, "step", problem.exact, list(problem.providers()))
