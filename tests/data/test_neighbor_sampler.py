"""Sampled neighborhoods: edges that there are, as many as asked for, uniform, and what PyG's loaders make of them."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NeighborLoader, NodeLoader
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import k_hop_subgraph

from graphs import GRAPHS
from qgnn import Graph
from qgnn.data import NeighborSampler


def graph(num_nodes: int = 30, num_edges: int = 200, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Data(edge_index=edge_index, num_nodes=num_nodes, y=torch.arange(num_nodes))


def sample(data: Any, num_neighbors: list[int], seeds: Tensor, **options: Any) -> SamplerOutput:
    return NeighborSampler(data, num_neighbors, **options).sample_from_nodes(NodeSamplerInput(None, seeds))


def assert_sample(
    out: SamplerOutput, edge_index: Tensor, num_nodes: int, num_neighbors: list[int], seeds: Tensor
) -> None:
    """Each node of a hop has as many of its own edges as it may have, all different, and those behind it none."""
    assert torch.equal(out.node[: len(seeds)], seeds)
    assert len(out.node.unique()) == len(out.node)
    assert torch.equal(torch.stack([out.node[out.row], out.node[out.col]]), edge_index[:, out.edge])
    assert len(out.edge.unique()) == len(out.edge)
    degree, found = edge_index[1].bincount(minlength=num_nodes), out.col.bincount(minlength=len(out.node))
    start = 0
    for size, most in zip(out.num_sampled_nodes, [*num_neighbors, 0], strict=True):
        of_hop = degree[out.node[start : start + size]]
        assert torch.equal(found[start : start + size], of_hop if most < 0 else of_hop.clamp_max(most))
        start += size
    assert start == len(out.node)
    assert sum(out.num_sampled_edges) == len(out.edge)


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 300),
    st.lists(st.integers(-1, 9), min_size=1, max_size=3),
    st.integers(0, 2**31),
    st.data(),
)
def test_samples_of_any_graph(num_nodes: int, num_edges: int, num_neighbors: list[int], seed: int, data: Any) -> None:
    torch.manual_seed(seed)
    of_graph = graph(num_nodes, num_edges, seed)
    seeds = torch.randperm(num_nodes)[: data.draw(st.integers(0, num_nodes))]
    out = sample(of_graph, num_neighbors, seeds)
    assert_sample(out, of_graph.edge_index, num_nodes, num_neighbors, seeds)


@pytest.mark.parametrize("name", GRAPHS)
def test_samples_of_graphs_that_break_kernels(name: str) -> None:
    edge_index, num_nodes = GRAPHS[name]
    seeds = torch.arange(0, num_nodes, 3)
    out = sample(edge_index, [4, 2], seeds, num_nodes=num_nodes)
    assert_sample(out, edge_index, num_nodes, [4, 2], seeds)


def test_all_neighbors_are_the_hops_of_pyg() -> None:
    data, seeds = graph(60, 120), torch.tensor([3, 40])
    out = sample(data, [-1, -1], seeds)
    nodes, _, _, _ = k_hop_subgraph(seeds, 2, data.edge_index, num_nodes=60)
    assert torch.equal(out.node.sort().values, nodes)


def test_each_edge_is_as_likely() -> None:
    """Of 12 edges into a node 5 are drawn: each in 5 of 12 draws, each two of them in 5 * 4 of 12 * 11."""
    star = torch.stack([torch.arange(1, 13), torch.zeros(12, dtype=torch.int64)])
    sampler, seeds, draws = NeighborSampler(star, [5], num_nodes=13), torch.tensor([0]), 4000
    torch.manual_seed(0)
    drawn = torch.zeros(draws, 12)
    for row in drawn:
        row[sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).edge] = 1
    together = drawn.t() @ drawn / draws
    expected = torch.full((12, 12), 5 * 4 / (12 * 11)).fill_diagonal_(5 / 12)
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((together - expected).abs() < 4.5 * deviation).all()  # of 78 different ones, 5e-4 to fail by chance


def test_nodes_of_one_batch_draw_for_themselves() -> None:
    star = torch.stack([torch.arange(2, 22).repeat(2), torch.tensor([0, 1]).repeat_interleave(20)])
    torch.manual_seed(0)
    out = sample(star, [10], torch.tensor([0, 1]), num_nodes=22)
    first, second = (set(out.node[out.row[out.col == node]].tolist()) for node in (0, 1))
    assert first != second


def test_torchs_seed_rules() -> None:
    sampler, seeds = NeighborSampler(graph(), [2, 2]), torch.arange(10)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append([sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).edge for _ in range(2)])
    assert all(map(torch.equal, draws[0], draws[1]))
    assert not torch.equal(draws[0][0], draws[2][0])
    assert not torch.equal(*draws[0])


def test_whatever_has_edges() -> None:
    data = graph()
    sparse = ToSparseTensor(layout=torch.sparse_csr)(graph())
    forms = [data, Graph.from_edge_index(data.edge_index, 30), sparse]
    counts = [len(sample(form, [-1], torch.arange(30)).edge) for form in forms]
    assert counts[:2] == [200, 200]
    assert counts[2] == sparse.adj_t.values().numel()
    assert sample(data.edge_index, [3], torch.arange(4), num_nodes=30).num_sampled_nodes[0] == 4


# ---- loaders ----


@pytest.mark.parametrize("num_workers", [0, 2])
def test_node_loaders(num_workers: int) -> None:
    data = graph()
    data.x = torch.randn(30, 4)
    options = {"input_nodes": torch.arange(20), "batch_size": 6, "num_workers": num_workers}
    loaders = [
        NodeLoader(data, NeighborSampler(data, [3, 2]), **options),
        NeighborLoader(data, [3, 2], neighbor_sampler=NeighborSampler(data, [3, 2]), **options),
    ]
    for loader in loaders:
        batches = list(loader)
        assert [batch.batch_size for batch in batches] == [6, 6, 6, 2]
        for number, batch in enumerate(batches):
            assert torch.equal(batch.n_id[: batch.batch_size], torch.arange(20)[6 * number : 6 * number + 6])
            assert torch.equal(batch.x, data.x[batch.n_id])
            assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])


@pytest.mark.parametrize("negative", [None, "binary", "triplet"])
def test_link_loaders(negative: str | None) -> None:
    data = graph()
    loader = LinkLoader(
        data, NeighborSampler(data, [3]), edge_label_index=data.edge_index[:, :12], batch_size=5, neg_sampling=negative
    )
    for number, batch in enumerate(loader):
        expected = data.edge_index[:, :12][:, 5 * number : 5 * number + 5]
        if negative == "triplet":
            ends = torch.stack([batch.n_id[batch.src_index], batch.n_id[batch.dst_pos_index]])
        else:
            ends = batch.n_id[batch.edge_label_index][:, : expected.shape[1]]
        assert torch.equal(ends, expected)


def test_pickles_leave_out_what_a_process_works_in() -> None:
    sampler = NeighborSampler(graph(3000, 10), [2])
    sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(5)))
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy._place is None
    assert copy.sample_from_nodes(NodeSamplerInput(None, torch.arange(5))).node[:5].tolist() == [0, 1, 2, 3, 4]
    assert repr(copy) == "NeighborSampler([2], 3000 nodes, 10 edges)"


@pytest.mark.parametrize(
    ("data", "num_neighbors", "error", "message"),
    [
        (graph(), [], ValueError, r"a number for each hop, or -1 for all neighbors \(got \[\]\)"),
        (graph(), [3, -2], ValueError, r"\(got \[3, -2\]\)"),
        (graph(), [2.5], TypeError, r"a list of integers as 'num_neighbors' \(got \[2.5\]\)"),
        (graph(), [True], TypeError, r"\(got \[True\]\)"),
        (graph(), 5, TypeError, r"\(got 5\)"),
        (HeteroData(), [1], TypeError, r"\(got HeteroData\)"),
        (Data(x=torch.ones(3, 1)), [1], ValueError, "with neither 'edge_index' nor 'adj_t'"),
        (graph().edge_index, [1], ValueError, "expects 'num_nodes' with edges alone"),
        (Graph.from_edge_index(graph().edge_index, (30, 40)), [1], ValueError, r"\(got 30 sources, 40 targets\)"),
    ],
)
def test_what_cannot_be_sampled(data: Any, num_neighbors: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        NeighborSampler(data, num_neighbors)


@pytest.mark.parametrize("seeds", [[40, 30], [-1, 3]])
def test_an_error_leaves_nothing_behind(seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    data = graph()
    sampler = NeighborSampler(data, [3, 2])
    good = torch.arange(10)
    sampler.sample_from_nodes(NodeSamplerInput(None, good))
    with pytest.raises(IndexError, match=r"has nodes 0 to 29 \(got"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor(seeds)))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sampler.sample_from_nodes(NodeSamplerInput(None, good + 10))
    out = sampler.sample_from_nodes(NodeSamplerInput(None, good))
    assert_sample(out, data.edge_index, 30, [3, 2], good)


def test_times_need_pygs_sampler() -> None:
    with pytest.raises(NotImplementedError, match="knows no times of edges; use PyG's"):
        NeighborSampler(graph(), [1]).sample_from_nodes(NodeSamplerInput(None, torch.arange(3), torch.arange(3)))
