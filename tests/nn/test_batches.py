"""Sampled batches: each has other sizes, and none of them compiles anything anew.

The kernels' side of it, that sizes are no part of a compiled kernel, is in ``tests/kernels/test_tuning.py``.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from graphs import GRAPHS
from layers import LAYERS, K
from qgnn import QConfig

NUM_BATCHES = 12


def sampled(seed: int) -> tuple[Tensor, Tensor, int]:
    """Two hops of at most four neighbors around some nodes, numbered anew, seed nodes first: as a NeighborLoader makes
    them. Nodes, edges, and the number of seed nodes."""
    edge_index, num_nodes = GRAPHS["power_law"]
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(3, 12, (), generator=generator))
    nodes = torch.randperm(num_nodes, generator=generator)[:size]
    kept = torch.empty(2, 0, dtype=torch.long)
    frontier = nodes
    for _ in range(2):
        order = torch.randperm(edge_index.shape[1], generator=generator)
        into = edge_index[:, order][:, torch.isin(edge_index[1, order], frontier)]
        rank = (into[1, :, None] == into[1]).tril(-1).sum(1)
        into = into[:, rank < 4]
        kept = torch.cat([kept, into], dim=1)
        frontier = into[0].unique()
        nodes = torch.cat([nodes, frontier[~torch.isin(frontier, nodes)]])
    number = torch.full((num_nodes,), -1)
    number[nodes] = torch.arange(nodes.numel())
    return nodes, number[kept], size


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        layer = LAYERS[name]
        self.first, self.second = layer.ours(QConfig(), K, 16), layer.ours(QConfig(), 16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat/mean_of_heads"])
def test_sampled_batches_compile_once(name: str) -> None:
    """Within its first batch a compiler may start over, for a number that it takes for a symbol; never after it."""
    model, counter = Model(name), CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    sizes, frames = set(), []
    for seed in range(NUM_BATCHES):
        nodes, edge_index, size = sampled(seed)
        sizes.add((nodes.numel(), edge_index.shape[1]))
        out = run(torch.randn(nodes.numel(), K), edge_index)[:size]
        out.square().sum().backward()
        frames.append(counter.frame_count)
    assert len(sizes) == NUM_BATCHES
    assert frames == [frames[0]] * NUM_BATCHES
    assert frames[0] <= 2
