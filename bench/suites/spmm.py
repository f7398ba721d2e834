"""Sparse aggregation from fp32 to fp32, forward and transposed backward, quantization included.

The pass ``warm`` aggregates rows that are codes already, as in the middle of a layer.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter

import qgnn
from qgnn import functional
from qgnn.qtensor import QTensor

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import INT8, OURS, TOLERANCE, Setting, adjacency, gradients, graph, graph_name, package, randn


class Operands:
    """A graph with self-loops and, if ``weighted``, GCN's edge weights; x [N, F] and the gradient of the output."""

    def __init__(self, like: str, F: int, weighted: bool, setting: Setting) -> None:
        data = graph(like, setting)
        self.name = f"{graph_name(like, setting)}/F{F}"
        self.num_nodes = int(data.num_nodes)
        self.edge_index, weight = gcn_norm(data.edge_index, None, self.num_nodes)
        self.weight = weight if weighted else None
        self.x = randn(self.num_nodes, F, setting=setting, seed=1).requires_grad_()
        self.grad = randn(self.num_nodes, F, setting=setting, seed=2)

    def csr(self, pass_: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The adjacency matrix, rows = targets; transposed for the backward pass. Prepared once, outside the timing."""
        ends = self.ends(pass_)
        weight = self.weight if self.weight is not None else torch.ones_like(ends[0])
        return adjacency(ends, weight.to(dtype), self.num_nodes)

    def ends(self, pass_: str) -> Tensor:
        """Where each edge takes a row from, and where to."""
        return self.edge_index.flip(0) if pass_ == "backward" else self.edge_index

    def operand(self, pass_: str) -> Tensor:
        return self.grad if pass_ == "backward" else self.x.detach()

    def num_bytes(self, pass_: str) -> int:
        num_edges = self.edge_index.shape[1]
        structure = 4 * (self.num_nodes + 1) + 4 * num_edges + (4 * num_edges if self.weight is not None else 0)
        rows = self.x.numel() + 4 * self.num_nodes if pass_ == "warm" else self.x.nbytes
        return structure + rows + self.grad.nbytes

    def exact(self, pass_: str, reduce: str) -> list[Tensor]:
        x = self.operand(pass_).double()
        if reduce == "max":
            source, target = self.edge_index
            return [scatter(x[source], target, dim=0, dim_size=self.num_nodes, reduce="max")]
        return [torch.sparse.mm(self.csr(pass_, torch.float64), x)]

    def ours(self, pass_: str, reduce: str, config: qgnn.QConfig | None, dtype: torch.dtype = torch.float32) -> Work:
        prepared = qgnn.Graph.from_edge_index(self.edge_index, self.num_nodes)

        def forward(x: Tensor | QTensor) -> Tensor:
            return functional.spmm(prepared, x, self.weight, reduce, config=config)

        if pass_ == "backward":
            return Work(gradients(lambda: forward(self.x), [self.x], self.grad))
        operand = self.operand(pass_).to(dtype)
        x = functional.quantize(operand, config) if pass_ == "warm" and config is not None else operand
        return Work(lambda: forward(x))

    def torch_reduce(self, pass_: str, reduce: str) -> Work:
        if self.x.is_cuda:
            raise UnavailableError("torch.sparse.mm takes a reduction on the CPU only")
        matrix, x = self.csr(pass_), self.operand(pass_)
        return Work(lambda: torch.sparse.mm(matrix, x, reduce))

    def torch_mm(self, pass_: str, dtype: torch.dtype) -> Work:
        """MKL or cuSPARSE; what PyG calls for a sparse adjacency matrix."""
        matrix, x = self.csr(pass_, dtype), self.operand(pass_)
        return Work(lambda: torch.sparse.mm(matrix, x.to(dtype)))

    def coo(self, pass_: str, reduce: str) -> Work:
        """PyG's path for an edge_index: a message an edge, scattered to the targets."""
        x, (source, target), weight = self.operand(pass_), self.ends(pass_), self.weight
        messages = partial(_messages, x, source, weight)
        return Work(lambda: scatter(messages(), target, dim=0, dim_size=self.num_nodes, reduce=reduce))

    def torch_scatter(self, pass_: str, reduce: str) -> Work:
        """A message an edge, those of a target side by side."""
        segment_csr = package("torch_scatter").segment_csr
        matrix, x = self.csr(pass_), self.operand(pass_)
        weight = None if self.weight is None else matrix.values()
        messages = partial(_messages, x, matrix.col_indices().long(), weight)
        indptr = matrix.crow_indices().long()
        return Work(lambda: segment_csr(messages(), indptr, reduce=reduce))

    def edge_index_matmul(self, pass_: str) -> Work:
        """PyG's EdgeIndex, sorted by targets and with its caches filled."""
        size = (self.num_nodes, self.num_nodes)
        edges, order = EdgeIndex(self.ends(pass_), sparse_size=size).sort_by("col")
        edges.fill_cache_()
        weight = None if self.weight is None else self.weight[order]
        x = self.operand(pass_)
        return Work(lambda: edges.matmul(x, input_value=weight, transpose=True))

    def dgl(self, pass_: str) -> Work:
        dgl = package("dgl")
        graph = dgl.graph(tuple(self.ends(pass_)), num_nodes=self.num_nodes)
        x, weight = self.operand(pass_), self.weight
        if weight is None:
            return Work(lambda: dgl.ops.copy_u_sum(graph, x))
        return Work(lambda: dgl.ops.u_mul_e_sum(graph, x, weight[:, None]))


def _messages(x: Tensor, source: Tensor, weight: Tensor | None) -> Tensor:
    rows = x.index_select(0, source)
    return rows if weight is None else rows * weight[:, None]


def _providers(operands: Operands, pass_: str, reduce: str) -> Iterator[Provider]:
    for precision, config in OURS.items():
        setup = partial(operands.ours, pass_, reduce, config)
        yield Provider(f"qgnn {precision}", setup, TOLERANCE[precision])
    if operands.x.is_cuda and pass_ == "forward":
        setup = partial(operands.ours, pass_, reduce, INT8, torch.bfloat16)
        yield Provider("qgnn bf16-in int8", setup, TOLERANCE["int8"])
    if reduce == "sum":
        yield Provider("torch.sparse sum fp32", partial(operands.torch_reduce, pass_, "sum"), TOLERANCE["fp32"])
        yield Provider("torch.sparse csr fp32", partial(operands.torch_mm, pass_, torch.float32), TOLERANCE["fp32"])
        if pass_ != "warm":
            yield Provider("pyg EdgeIndex fp32", partial(operands.edge_index_matmul, pass_), TOLERANCE["fp32"])
            yield Provider("dgl fp32", partial(operands.dgl, pass_), TOLERANCE["fp32"])
        if operands.x.is_cuda:  # torch multiplies sparse bf16 matrices there only
            yield Provider(
                "torch.sparse csr bf16", partial(operands.torch_mm, pass_, torch.bfloat16), TOLERANCE["bf16"]
            )
    else:
        yield Provider("torch.sparse amax fp32", partial(operands.torch_reduce, pass_, "amax"), TOLERANCE["fp32"])
    # A message an edge takes seconds on a CPU, so there it is measured in the cases that stand for the others.
    if pass_ != "warm" and (operands.weight is not None or reduce == "max" or operands.x.is_cuda):
        yield Provider("pyg coo fp32", partial(operands.coo, pass_, reduce), TOLERANCE["fp32"])
        if pass_ == "forward":
            scatter_setup = partial(operands.torch_scatter, pass_, reduce)
            yield Provider("torch_scatter csr fp32", scatter_setup, TOLERANCE["fp32"])


def _case(operands: Operands, pass_: str, kind: str) -> Case:
    reduce = "max" if kind == "max" else "sum"
    providers = list(_providers(operands, pass_, reduce))
    exact = partial(operands.exact, pass_, reduce)
    return Case(f"{operands.name}/{kind}", pass_, exact, providers, operands.num_bytes(pass_))


def cases(setting: Setting) -> Iterator[Case]:
    for F in (256, 128):
        for weighted in (True, False):
            operands = Operands("arxiv", F, weighted, setting)
            for pass_ in ("forward", "backward", "warm"):
                yield _case(operands, pass_, "weighted" if weighted else "sum")
    yield _case(operands, "forward", "max")
