"""Sparse aggregation from fp32 to fp32, forward and transposed backward, quantization included."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter

import qgnn
from qgnn import functional

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import OURS, TOLERANCE, Setting, csr_int32, gradients, graph, graph_name, randn


class Operands:
    """A graph with self-loops and, if ``weighted``, GCN's edge weights; x [N, F] and the gradient of the output."""

    def __init__(self, like: str, F: int, weighted: bool, setting: Setting) -> None:
        data = graph(like, setting)
        self.num_nodes = int(data.num_nodes)
        self.edge_index, weight = gcn_norm(data.edge_index, None, self.num_nodes)
        self.weight = weight if weighted else None
        self.x = randn(self.num_nodes, F, setting=setting, seed=1).requires_grad_()
        self.grad = randn(self.num_nodes, F, setting=setting, seed=2)

    def csr(self, pass_: str, dtype: torch.dtype) -> Tensor:
        """The adjacency matrix, rows = targets; transposed for the backward pass. Prepared once, outside the timing."""
        source, target = self.edge_index
        rows, columns = (target, source) if pass_ == "forward" else (source, target)
        weight = self.weight if self.weight is not None else torch.ones_like(source, dtype=torch.float32)
        size = (self.num_nodes, self.num_nodes)
        return csr_int32(torch.sparse_coo_tensor(torch.stack([rows, columns]), weight.to(dtype), size))

    def operand(self, pass_: str) -> Tensor:
        return self.x.detach() if pass_ == "forward" else self.grad

    def num_bytes(self) -> int:
        num_edges = self.edge_index.shape[1]
        structure = 4 * (self.num_nodes + 1) + 4 * num_edges + (4 * num_edges if self.weight is not None else 0)
        return structure + self.x.nbytes + self.grad.nbytes


def _sparse_work(operands: Operands, pass_: str, dtype: torch.dtype) -> Work:
    matrix, x = operands.csr(pass_, dtype), operands.operand(pass_)
    if not x.is_cuda and dtype == torch.bfloat16:
        raise UnavailableError("torch multiplies sparse bf16 matrices on CUDA only")
    return Work(lambda: torch.sparse.mm(matrix, x.to(dtype)))


def _scatter_work(operands: Operands, pass_: str) -> Work:
    """PyG's path for an edge_index: gather a message an edge, scatter-add them."""
    source, target = operands.edge_index if pass_ == "forward" else operands.edge_index.flip(0)
    x, weight, N = operands.operand(pass_), operands.weight, operands.num_nodes

    def run() -> Tensor:
        messages = x.index_select(0, source)
        if weight is not None:
            messages = messages * weight[:, None]
        return scatter(messages, target, dim=0, dim_size=N, reduce="sum")

    return Work(run)


def _our_work(operands: Operands, pass_: str, config: qgnn.QConfig | None) -> Work:
    prepared = qgnn.Graph.from_edge_index(operands.edge_index, operands.num_nodes)

    def forward(x: Tensor) -> Tensor:
        return functional.spmm(prepared, x, operands.weight, config=config)

    if pass_ == "forward":
        return Work(lambda: forward(operands.operand(pass_)))
    return Work(gradients(lambda: forward(operands.x), [operands.x], operands.grad))


def _providers(operands: Operands, pass_: str) -> Iterator[Provider]:
    for precision, config in OURS.items():
        name = f"qgnn {precision}"
        yield Provider(name, partial(_our_work, operands, pass_, config), TOLERANCE[precision])
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        name = f"torch.sparse csr {precision}"
        yield Provider(name, partial(_sparse_work, operands, pass_, dtype), TOLERANCE[precision])
    yield Provider("pyg coo fp32", partial(_scatter_work, operands, pass_), TOLERANCE["fp32"])


def _exact(operands: Operands, pass_: str) -> list[Tensor]:
    return [torch.sparse.mm(operands.csr(pass_, torch.float64), operands.operand(pass_).double())]


def cases(setting: Setting) -> Iterator[Case]:
    for F in setting.shapes(256, 128):
        for weighted in setting.shapes(True, False):
            operands = Operands("arxiv", F, weighted, setting)
            for pass_ in ("forward", "backward"):
                yield Case(
                    f"{graph_name('arxiv', setting)}/F{F}/{'weighted' if weighted else 'sum'}",
                    pass_,
                    partial(_exact, operands, pass_),
                    list(_providers(operands, pass_)),
                    operands.num_bytes(),
                )
