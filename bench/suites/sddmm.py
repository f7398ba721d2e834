"""One value an edge from the rows of its two ends: their dot product, or the sum of two scores.

The pass ``warm`` takes rows that are codes already, as an attention layer has them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import qgnn
from qgnn import functional

from ..harness import Case, Provider, Work
from .inputs import OURS, TOLERANCE, Setting, csr_int32, graph, graph_name, randn


class Operands:
    """A graph's edges in the data set's order; a row of F values for each node as a source, and one as a target."""

    def __init__(self, like: str, F: int, op: str, setting: Setting) -> None:
        data = graph(like, setting)
        self.name = f"{graph_name(like, setting)}/{op}/F{F}"
        self.op, self.num_nodes, self.edge_index = op, int(data.num_nodes), data.edge_index
        self.x_source = randn(self.num_nodes, F, setting=setting, seed=1)
        self.x_target = randn(self.num_nodes, F, setting=setting, seed=2)

    def exact(self) -> list[Tensor]:
        return [_gather(self.op, self.edge_index, self.x_source.double(), self.x_target.double())]

    def num_bytes(self, pass_: str) -> int:
        N, F = self.x_source.shape
        E = self.edge_index.shape[1]
        row = F + 4 if pass_ == "warm" else 4 * F
        return 4 * (N + 1) + 4 * E + 2 * N * row + 4 * E * (1 if self.op == "dot" else F)

    def ours(self, pass_: str, config: qgnn.QConfig | None) -> Work:
        prepared = qgnn.Graph.from_edge_index(self.edge_index, self.num_nodes)
        are_codes = pass_ == "warm" and config is not None
        source, target = (functional.quantize(x, config) if are_codes else x for x in (self.x_source, self.x_target))
        return Work(lambda: functional.sddmm(prepared, source, target, self.op, config=config))

    def gather(self) -> Work:
        return Work(lambda: _gather(self.op, self.edge_index, self.x_source, self.x_target))

    def sampled_addmm(self) -> Work:
        """Its results stay in the order of the matrix: it is spared the way back to that of the edges."""
        source, target = self.edge_index
        E, N = len(source), self.num_nodes
        ones = torch.sparse_coo_tensor(torch.stack([target, source]), torch.ones(E, device=source.device), (N, N))
        matrix, x_source_t = csr_int32(ones), self.x_source.t()

        def run() -> Tensor:
            return torch.sparse.sampled_addmm(matrix, self.x_target, x_source_t, beta=0.0)

        def check() -> list[Tensor]:
            order = torch.argsort(target * N + source)
            return [torch.empty_like(ones._values()).index_copy_(0, order, run().values())]

        return Work(run, check)


def _gather(op: str, edge_index: Tensor, x_source: Tensor, x_target: Tensor) -> Tensor:
    """As in a layer's message(): both rows of an edge, side by side."""
    source, target = x_source.index_select(0, edge_index[0]), x_target.index_select(0, edge_index[1])
    return (source * target).sum(dim=-1) if op == "dot" else source + target


def _providers(operands: Operands, pass_: str) -> Iterator[Provider]:
    for precision, config in OURS.items():
        if operands.op == "dot" or config is None:  # a sum of two values is not worth rounding them
            yield Provider(f"qgnn {precision}", partial(operands.ours, pass_, config), TOLERANCE[precision])
    rivals: dict[str, Callable[[], Work]] = {}
    if operands.op == "dot":
        rivals["torch.sparse sampled_addmm fp32"] = operands.sampled_addmm
    if pass_ == "forward":
        rivals["pyg coo fp32"] = operands.gather
    for name, setup in rivals.items():
        yield Provider(name, setup, TOLERANCE["fp32"])


def cases(setting: Setting) -> Iterator[Case]:
    for op, F in (("dot", 128), ("dot", 256), ("add", 4)):
        operands = Operands("arxiv", F, op, setting)
        for pass_ in ("forward", "warm") if op == "dot" else ("forward",):
            providers = list(_providers(operands, pass_))
            yield Case(operands.name, pass_, operands.exact, providers, operands.num_bytes(pass_))
