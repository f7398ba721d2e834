"""What sums take of a HaloGraph, with no process but this one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import GRAPHS
from qgnn import Graph, QConfig, QTensor, functional, ops
from qgnn.halo_graph import HaloGraph


def test_a_product_and_its_sum_round_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one seed, which both get."""

    class Part(HaloGraph):
        def exchange(self, x: Tensor | QTensor, *, exact: bool = False) -> Any:
            return lambda: torch.zeros(0, x.shape[1])

    edge_index, num_nodes = GRAPHS["random"]
    inner = Graph.from_edge_index(edge_index, num_nodes)
    halo = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), (0, num_nodes))
    seeds = []

    def recorded(name: str) -> Any:
        real = getattr(ops, name)

        def run(*args: Any) -> Any:
            seeds.extend(t.item() for t in args if isinstance(t, Tensor) and t.dtype == torch.int64 and t.shape == (1,))
            return real(*args)

        return run

    for name in ("matmul", "spmm"):
        monkeypatch.setattr(ops, name, recorded(name))
    x, weight = torch.randn(num_nodes, 8), torch.randn(8, 8)
    once, again = (functional.graph_linear(Part(inner, halo), x, weight, config=QConfig(), seed=7) for _ in range(2))
    assert torch.equal(once, again)
    assert len(set(seeds)) == 2
    assert seeds[:2] == seeds[2:]
