"""What a training step of a GCN takes as the graph grows, of time and of memory, by edge: ten edges a node, 10^5 to
10^8 of them.

Nodes have degrees with a power-law tail and are in no order, so that neighbors lie anywhere in memory. Each provider
has a process of its own. The gate looks at the results and gradients of a loss on a few nodes, which depend on what is
two hops away at most: that much is computed in float64 at any size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.utils import mask_to_index

from qgnn.functional import quantize
from qgnn.memory import MIB, peak_bytes
from qgnn.nn import Epilogue, QGCNConv
from qgnn.qtensor import QTensor

from ..harness import Case, Provider, UnavailableError, Work
from . import process
from .inputs import INT8, OURS, Setting, adjacency, csr_int32, gcn_adjacency
from .step import TOLERANCE, Network, PreparedGCNConv, training_step
from .train import Convolutions

SIZES = (10_000, 100_000, 316_000, 1_000_000, 3_160_000, 10_000_000)  # nodes
DEGREE, WIDTHS = 10, (64, 64, 16)
TRAINED, CHECKED = 0.1, 32  # the share of nodes with a label, and the number of those that the gate looks at
PART = 1 << 20  # rows that are drawn and rounded at once
# All providers read rows anywhere in hundreds of megabytes, which pages of 4 KiB make a search for addresses.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch asks for them; the system may have none


def draw_edges(num_nodes: int, seed: int = 0) -> Tensor:
    """int64 ``[2, DEGREE * num_nodes]``, each edge in both directions, in no order, none a loop. An end is the node of
    rank ``num_nodes * u**2`` for a uniform ``u``: expected degrees fall with the square root of the rank."""
    generator = torch.Generator().manual_seed(seed)
    num_pairs = num_nodes * DEGREE // 2
    node_of_rank = torch.randperm(num_nodes, generator=generator)
    edge_index = torch.empty(2, 2 * num_pairs, dtype=torch.int64)
    for end in edge_index[:, :num_pairs]:
        for part in end.split(PART):
            u = torch.rand(len(part), generator=generator, dtype=torch.float64)
            part.copy_(node_of_rank[u.square_().mul_(num_nodes).long().clamp_(max=num_nodes - 1)])
    first, second = edge_index[:, :num_pairs]
    second[first == second] += 1
    second[second == num_nodes] = 0
    edge_index[:, num_pairs:] = edge_index[:, :num_pairs].flip(0)
    return edge_index


class Problem:
    """A graph of so many nodes, the first weights of a GCN of two layers, and labels.

    Args:
        num_nodes: Its size.
        setting: Where it runs.
    """

    def __init__(self, num_nodes: int, setting: Setting) -> None:
        self.num_nodes = max(round(num_nodes * setting.scale), CHECKED)
        self.name = f"N{self.num_nodes}/gcn/{'-'.join(map(str, WIDTHS))}"
        self.setting = setting
        torch.manual_seed(0)
        self.state = Convolutions(GCNConv, WIDTHS).state_dict()
        self._edges: Tensor | None = None

    @property
    def edge_index(self) -> Tensor:
        """Drawn once, when it is needed: a process that only starts others has no use for it."""
        if self._edges is None:
            self._edges = draw_edges(self.num_nodes).to(self.setting.device)
        return self._edges

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """The features, by parts."""
        generator = torch.Generator().manual_seed(1)
        for start in range(0, self.num_nodes, PART):
            part = slice(start, min(start + PART, self.num_nodes))
            yield part, torch.randn(part.stop - start, WIDTHS[0], generator=generator).to(self.setting.device)

    def features(self) -> Tensor:
        x = torch.empty(self.num_nodes, WIDTHS[0], device=self.setting.device)
        for part, rows in self.rows():
            x[part] = rows
        return x

    def codes(self) -> QTensor:
        """The features as codes, as a store of them hands over; they are never in fp32 as a whole."""
        parts = [quantize(rows, INT8) for _, rows in self.rows()]
        storage, scales = (torch.cat([getattr(q, field) for q in parts]) for field in ("storage", "scales"))
        return QTensor(storage, scales)

    def loss(self, out: Tensor, share: float) -> Tensor:
        """On the first nodes, which are no others than the rest: their labels are the remainders of their numbers."""
        num_rows = max(CHECKED, round(share * self.num_nodes))
        y = torch.arange(num_rows, device=out.device) % WIDTHS[-1]
        return F.cross_entropy(out[:num_rows].to(torch.promote_types(out.dtype, torch.float32)), y)

    def work(self, make_conv: Callable[[int, int], torch.nn.Module], edges: Any, x: Tensor | QTensor) -> Work:
        def make(_: bool) -> Convolutions:
            model = Convolutions(make_conv, WIDTHS).to(self.setting.device)
            model.load_state_dict(self.state)
            return model

        def forward(share: float, network: Network, _: Tensor | None) -> tuple[Tensor, Tensor]:
            out = network(x, edges)
            return out[:CHECKED], self.loss(out, share)

        step = training_step(make, partial(forward, TRAINED))
        step.run()  # what is prepared once
        check = training_step(make, partial(forward, 0.0)).check
        return replace(step, check=check, forward=None, metrics=self.metrics)

    def metrics(self) -> Mapping[str, float]:
        """The number of edges, and the peak of the process with the graph and all libraries, if that is known."""
        found = {"edges": float(self.edge_index.shape[1])}
        peak = peak_bytes(self.setting.device)
        return found if peak is None else {**found, "process_mib": peak / MIB}

    def ours(self, precision: str) -> Work:
        make_conv = partial(QGCNConv, cached=True, config=OURS[precision], epilogue=Epilogue("relu"))
        return self.work(make_conv, self.edge_index, self.codes() if precision == "int8" else self.features())

    def coo(self) -> Work:
        # Messages of a layer, what they are weighed to, and gradients, beside the edges that they are gathered along.
        needed = self.num_nodes * (DEGREE + 1) * (3 * WIDTHS[1] * 4 + 2 * 16)
        if needed > (free := free_bytes(self.setting.device)):
            raise UnavailableError(f"messages take {needed / 2**30:.0f} GiB (free: {free / 2**30:.0f})")
        return self.work(partial(GCNConv, cached=True), self.edge_index, self.features())

    def prepared(self) -> Work:
        matrix = gcn_adjacency(self.edge_index, self.num_nodes, torch.float32)
        return self.work(PreparedGCNConv, (matrix, csr_int32(matrix.t())), self.features())

    def exact(self) -> Sequence[Tensor]:
        """In float64, from the edges into what the loss sees, and into where these come from."""
        source, target = self.edge_index
        near = torch.zeros(self.num_nodes, dtype=torch.bool, device=source.device)
        near[:CHECKED] = True
        near[source[target < CHECKED]] = True
        into = near[target]
        source, target = source[into], target[into]
        inside = near.clone()
        inside[source] = True
        nodes = mask_to_index(inside)  # the first ones keep their places
        place = torch.empty(self.num_nodes, dtype=torch.int64, device=nodes.device)
        place[nodes] = torch.arange(len(nodes), device=nodes.device)
        root = torch.bincount(self.edge_index[1], minlength=self.num_nodes).add_(1).double().rsqrt_()[nodes]
        own = torch.arange(len(nodes), device=nodes.device)
        edges = torch.cat([torch.stack([place[source], place[target]]), own.expand(2, -1)], 1)
        matrix = adjacency(edges, root[edges[0]] * root[edges[1]], len(nodes))
        x = torch.cat([rows[inside[part]] for part, rows in self.rows()]).double()
        part = copy(self)
        part.num_nodes = CHECKED
        work = part.work(lambda *widths: PreparedGCNConv(*widths).double(), (matrix, csr_int32(matrix.t())), x)
        assert work.check is not None
        return work.check()

    def providers(self) -> Iterator[Provider]:
        for precision in OURS:
            yield Provider(f"qgnn {precision}", partial(self.ours, precision), TOLERANCE[precision])
        yield Provider("pyg coo fp32", self.coo, TOLERANCE["fp32"])
        yield Provider("torch csr both ways fp32", self.prepared, TOLERANCE["fp32"])


def free_bytes(device: torch.device) -> int:
    """What may still be taken: of a GPU its free memory, else what the system calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


QUICK = ("qgnn int8", "torch csr both ways fp32")  # a process takes seconds to start
PROBLEMS: process.Problems = {str(size): partial(Problem, size) for size in SIZES}


def cases(setting: Setting) -> Iterator[Case]:
    for name in setting.shapes(*PROBLEMS):
        chosen = QUICK if setting.quick else None
        yield process.case("scale", name, PROBLEMS[name](setting), setting, chosen, variables=HUGE_PAGES)
