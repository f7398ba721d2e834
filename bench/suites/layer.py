"""A GCN training step, forward + backward + optimizer: one layer inside a network, and a whole two-layer model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from qgnn.nn import QGCNConv

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import OURS, Setting, csr_int32, graph, graph_name, randn, with_tf32

# Bounds on the output and on every gradient of one step. Int8 products and aggregations, forward and backward, add up
# about six roundings of 0.013 each (see TOLERANCE), and some gradients are small differences of large sums.
STEP_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "int8": 1e-1}

HIDDEN = 256


class _BothWays(torch.autograd.Function):
    """A x with the transpose for the backward pass prepared, where torch.sparse.mm would transpose in every step."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, torch.sparse.mm(ctx.transposed, grad)


class PreparedConv(GCNConv):
    """The fastest that torch's own sparse product allows: GCNConv on a prepared pair of CSR matrices."""

    def forward(self, x: Tensor, edges: tuple[Tensor, Tensor]) -> Tensor:
        out = _BothWays.apply(*edges, self.lin(x))
        return out + self.bias.to(out.dtype)


class GCN(torch.nn.Module):
    """Convolutions with ReLU between them."""

    def __init__(self, make_conv: Callable[..., torch.nn.Module], widths: Sequence[int]) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(make_conv(wide, narrow) for wide, narrow in pairwise(widths))
        if len(widths) > 2 and isinstance(self.convs[-1], QGCNConv):
            self.convs[-1].config = None  # what feeds the softmax stays in full precision

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edges).relu()
        return self.convs[-1](x, edges)


class Problem:
    """Data, initial weights and loss that the providers of a case share."""

    def __init__(self, widths: Sequence[int], setting: Setting, dtype: torch.dtype = torch.float32) -> None:
        data = graph("arxiv", setting)
        self.widths, self.setting = widths, setting
        self.edge_index, self.num_nodes = data.edge_index, int(data.num_nodes)
        self.whole_model = len(widths) > 2
        if self.whole_model:
            self.x, self.y, self.mask = data.x, data.y, data.train_mask
        else:  # a layer inside a network: its input needs a gradient, and its output receives one
            # In the type that the rest of the network would hand over, so that no provider pays for casts.
            self.x = randn(self.num_nodes, widths[0], setting=setting, seed=1).relu_().to(dtype).requires_grad_()
            self.grad = randn(self.num_nodes, widths[-1], setting=setting, seed=2).to(dtype)
        torch.manual_seed(0)
        self.state = GCN(GCNConv, widths).state_dict()

    def adjacency(self, dtype: torch.dtype) -> Tensor:
        """The normalized adjacency matrix in CSR, rows = targets."""
        if not self.setting.is_cuda and dtype == torch.bfloat16:
            raise UnavailableError("torch multiplies sparse bf16 matrices on CUDA only")
        (source, target), weight = gcn_norm(self.edge_index, None, self.num_nodes)
        size = (self.num_nodes, self.num_nodes)
        return csr_int32(torch.sparse_coo_tensor(torch.stack([target, source]), weight.to(dtype), size))

    def work(
        self,
        make_conv: Callable[[int, int], torch.nn.Module],
        edges: Any,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Work:
        def fresh() -> GCN:
            model = GCN(make_conv, self.widths).to(self.setting.device)
            model.load_state_dict(self.state)
            return model

        model = fresh()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def forward(model: GCN, x: Tensor) -> tuple[Tensor, Tensor]:
            with autocast():
                out = model(x, edges)
            loss = cross_entropy(out[self.mask].float(), self.y[self.mask]) if self.whole_model else out
            return out, loss

        def backward(model: GCN) -> Tensor:
            out, loss = forward(model, self.x)
            loss.backward(None if self.whole_model else self.grad.to(loss.dtype))
            return out

        def clear() -> None:
            optimizer.zero_grad()
            self.x.grad = None

        def step() -> None:
            clear()
            backward(model)
            optimizer.step()

        def check() -> list[Tensor]:
            clear()
            other = fresh()
            out = backward(other)
            wanted = [*other.parameters(), *([self.x] if self.x.requires_grad else [])]
            return [out, *(tensor.grad.clone() for tensor in wanted if tensor.grad is not None)]

        def kept() -> object:
            """For counting: the input of a layer is another's output and counts, a data set's features do not."""
            return forward(model, self.x if self.whole_model else self.x.detach().clone().requires_grad_())

        return Work(step, check, kept)

    def coo(self, autocast: Callable[[], AbstractContextManager] = nullcontext) -> Work:
        return self.work(partial(GCNConv, cached=True), self.edge_index, autocast)

    def csr(self, dtype: torch.dtype, autocast: Callable[[], AbstractContextManager] = nullcontext) -> Work:
        return self.work(partial(GCNConv, normalize=False), self.adjacency(dtype), autocast)

    def prepared(self, dtype: torch.dtype, autocast: Callable[[], AbstractContextManager] = nullcontext) -> Work:
        matrix = self.adjacency(dtype)
        return self.work(PreparedConv, (matrix, csr_int32(matrix.t())), autocast)

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.setting.device.type, torch.bfloat16)


def _providers(problem: Problem, bf16: Problem) -> Iterator[Provider]:
    for precision, config in OURS.items():
        make_conv = partial(QGCNConv, cached=True, config=config)
        setup = partial(problem.work, make_conv, problem.edge_index)
        yield Provider(f"qgnn {precision}", setup, STEP_TOLERANCE[precision])
    yield Provider("pyg coo fp32", problem.coo, STEP_TOLERANCE["fp32"])
    yield Provider("pyg csr fp32", partial(problem.csr, torch.float32), STEP_TOLERANCE["fp32"])
    yield Provider("torch csr both ways fp32", partial(problem.prepared, torch.float32), STEP_TOLERANCE["fp32"])
    if problem.setting.is_cuda:
        yield Provider("pyg csr tf32", with_tf32(partial(problem.csr, torch.float32)), STEP_TOLERANCE["bf16"])
        prepared = partial(problem.prepared, torch.float32)
        yield Provider("torch csr both ways tf32", with_tf32(prepared), STEP_TOLERANCE["bf16"])
    yield Provider("pyg coo bf16", partial(bf16.coo, bf16.autocast), STEP_TOLERANCE["bf16"])
    yield Provider("pyg csr bf16", partial(bf16.csr, torch.bfloat16, bf16.autocast), STEP_TOLERANCE["bf16"])
    prepared = partial(bf16.prepared, torch.bfloat16, bf16.autocast)
    yield Provider("torch csr both ways bf16", prepared, STEP_TOLERANCE["bf16"])


def _exact(problem: Problem) -> Sequence[Tensor]:
    check = problem.coo().check
    assert check is not None
    return check()


def cases(setting: Setting) -> Iterator[Case]:
    features, classes = graph("arxiv", setting).num_features, 40
    for name, widths in (
        (f"gcn-layer/{HIDDEN}", (HIDDEN, HIDDEN)),
        (f"gcn-model/{features}-{HIDDEN}-{classes}", (features, HIDDEN, classes)),
    ):
        problem = Problem(widths, setting)
        yield Case(
            f"{graph_name('arxiv', setting)}/{name}",
            "step",
            partial(_exact, problem),
            list(_providers(problem, Problem(widths, setting, torch.bfloat16))),
        )
