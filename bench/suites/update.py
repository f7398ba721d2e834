"""Edges and nodes taken out of a graph and put in: both orders of its edges, from those before or from a changed list.

Whoever rebuilds changes the list first, as a user would: by a mask, PyG's ``subgraph``, or a concatenation.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import subgraph

from qgnn import Graph

from ..harness import Case, Provider, Work
from .inputs import Setting, graph, graph_name

SHARE = 0.01  # of the edges or nodes
KINDS = ("remove-edges", "remove-nodes", "add-edges", "add-nodes")

Arrays = tuple[Tensor, ...]  # pointers, other ends and places before the sort: by target, and by source


def _some(size: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """A share of so many items, as a mask."""
    mask = torch.zeros(size, dtype=torch.bool, device=device)
    mask[torch.randperm(size, generator=generator)[: round(SHARE * size)].to(device)] = True
    return mask


class Change:
    """A graph, what changes in it, and how that is done to a list of edges.

    New nodes come with so many edges as there are in the mean, between any nodes.
    """

    def __init__(self, like: str, kind: str, setting: Setting) -> None:
        data = graph(like, setting)
        self.name = f"{graph_name(like, setting)}/{kind}"
        self.edge_index, self.num_before = data.edge_index, int(data.num_nodes)
        num_edges, device = self.edge_index.shape[1], self.edge_index.device
        generator = torch.Generator().manual_seed(0)
        self.num_nodes, self.arguments = self.num_before, dict[str, Any]()
        self.changed: Callable[[Tensor], Tensor]
        if kind == "remove-edges":
            remove = _some(num_edges, device, generator)
            self.arguments["remove"], keep = remove, ~remove
            self.changed = lambda edge_index: edge_index[:, keep]
        elif kind == "remove-nodes":
            remove = _some(self.num_before, device, generator)
            self.arguments["remove_nodes"], alive = remove, ~remove
            self.num_nodes = int(alive.sum())
            self.changed = lambda edge_index: subgraph(
                alive, edge_index, relabel_nodes=True, num_nodes=self.num_before
            )[0]
        else:
            if kind == "add-nodes":
                self.num_nodes += round(SHARE * self.num_before)
                self.arguments["num_nodes"] = self.num_nodes
            size = (2, round(SHARE * num_edges))
            self.arguments["add"] = add = torch.randint(self.num_nodes, size, generator=generator).to(device)
            self.changed = lambda edge_index: torch.cat([edge_index, add.to(edge_index.dtype)], dim=1)

    def exact(self) -> Arrays:
        """By torch's stable sort alone."""
        source, target = self.changed(self.edge_index)
        order = torch.argsort(target, stable=True)
        source, target = source[order], target[order]
        order_t = torch.argsort(source, stable=True)
        pointers = (
            torch.cat([end.new_zeros(1), torch.bincount(end, minlength=self.num_nodes).cumsum(0)])
            for end in (target, source)
        )
        return next(pointers), source, order, next(pointers), target[order_t], order_t

    def update(self) -> Work:
        before = Graph.from_edge_index(self.edge_index, self.num_before)
        _arrays(before)  # sorted by source, too
        return Work(lambda: _arrays(before.update(**self.arguments)))

    def rebuild(self) -> Work:
        return Work(lambda: _arrays(Graph.from_edge_index(self.changed(self.edge_index), self.num_nodes)))

    def pyg(self, dtype: torch.dtype) -> Work:
        edge_index, size = self.edge_index.to(dtype), (self.num_nodes, self.num_nodes)

        def run() -> Arrays:
            by_target, order = EdgeIndex(self.changed(edge_index), sparse_size=size).sort_by("col", stable=True)
            # What is known to be sorted would be sorted anew without regard to `stable`.
            again = EdgeIndex(by_target.as_tensor(), sparse_size=size)
            by_source, order_t = again.sort_by("row", stable=True)
            csc, csr = by_target.get_csc()[0], by_source.get_csr()[0]
            return tuple(t.as_subclass(Tensor) for t in (*csc, order, *csr, order_t))

        return Work(run)

    def num_bytes(self) -> int:
        """Both orders read and written, with int32 indices."""
        num_edges = self.edge_index.shape[1] + self.changed(self.edge_index).shape[1]
        return 4 * (2 * 2 * num_edges + 2 * (self.num_before + self.num_nodes + 2))


def _arrays(edges: Graph) -> Arrays:
    return tuple(t for order in (edges.csr, edges.csc) for t in (order.indptr, order.index, order.order))


def cases(setting: Setting) -> Iterator[Case]:
    for kind in KINDS:
        change = Change("arxiv", kind, setting)
        setups: dict[str, Callable[[], Work]] = {
            "qgnn update int32": change.update,
            "qgnn rebuild int32": change.rebuild,
            "pyg EdgeIndex int32": partial(change.pyg, torch.int32),
            "pyg EdgeIndex int64": partial(change.pyg, torch.int64),
        }
        providers = [Provider(name, setup, tolerance=0.0) for name, setup in setups.items()]
        yield Case(change.name, "forward", change.exact, providers, change.num_bytes())
