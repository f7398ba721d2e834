"""Graphs of any size for the suite `scale`: what is drawn, what its gate computes, what its table says; and the table
of the suite `update`."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from bench_records import rows, write
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
harness = importlib.import_module("bench.harness")
inputs = importlib.import_module("bench.suites.inputs")
pages = importlib.import_module("bench.pages")
scale = importlib.import_module("bench.suites.scale")

SETTING = inputs.Setting(torch.device("cpu"))


@pytest.fixture(scope="module")
def problem() -> object:
    return scale.Problem(400, SETTING)


def test_edges_go_both_ways_between_different_nodes_with_a_heavy_tail() -> None:
    num_nodes = 20_000
    source, target = scale.draw_edges(num_nodes)
    assert source.shape == (scale.DEGREE * num_nodes,)
    assert 0 <= int(source.min()) <= int(source.max()) < num_nodes
    assert bool((source != target).all())
    forward, backward = source * num_nodes + target, target * num_nodes + source
    assert torch.equal(forward.sort().values, backward.sort().values)
    degree = torch.bincount(target, minlength=num_nodes).sort(descending=True).values
    # Of the ranks below k, of N, sqrt(k / N) of all ends: a tenth of them for one node in a hundred.
    assert int(degree[: num_nodes // 100].sum()) / len(target) == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(scale.draw_edges(num_nodes, 1), torch.stack([source, target]))


def test_the_gate_of_few_nodes_is_that_of_the_whole_graph(problem: object) -> None:
    edges = problem.edge_index
    ones = torch.ones(edges.shape[1], dtype=torch.float64)
    matrix = inputs.adjacency(*gcn_norm(edges, ones, problem.num_nodes), problem.num_nodes)
    pair = matrix, inputs.csr_int32(matrix.t())
    whole = problem.work(lambda *widths: scale.PreparedGCNConv(*widths).double(), pair, problem.features().double())
    exact = problem.exact()
    assert [t.shape[0] for t in exact][:1] == [scale.CHECKED]
    assert harness.relative_error(whole.check(), exact) < 1e-12
    near = set(edges[0][edges[1] < scale.CHECKED].tolist())
    assert len(near) < problem.num_nodes / 2  # so that something is left out


@pytest.mark.parametrize("name", ["qgnn int8", "qgnn fp32", "pyg coo fp32", "torch csr both ways fp32"])
def test_every_provider_passes_the_gate_and_a_wrong_edge_does_not(problem: object, name: str) -> None:
    (provider,) = (p for p in problem.providers() if p.name == name)
    work = provider.setup()
    assert harness.relative_error(work.check(), problem.exact()) <= provider.tolerance
    assert work.metrics()["edges"] == scale.DEGREE * problem.num_nodes
    other = scale.Problem(400, SETTING)
    other._edges = problem.edge_index.flip(0).contiguous()
    other._edges[1] = (other._edges[1] + 1) % 400
    assert harness.relative_error(work.check(), other.exact()) > provider.tolerance


def test_messages_beyond_the_free_memory_are_not_tried(problem: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "free_bytes", lambda device: 1000)
    with pytest.raises(harness.UnavailableError, match="messages take"):
        problem.coo()


def test_the_table_divides_by_edges_and_orders_by_size(tmp_path: Path) -> None:
    assert "scale" not in dict(pages.regions(tmp_path))
    for nodes in (1000, 100):
        metrics = {"edges": 10.0 * nodes, "process_mib": 2048.0}
        case = f"N{nodes}/gcn/64-64-16"
        write(tmp_path, "scale", case, "qgnn int8", nodes / 100, peak_mib=10.0, metrics=metrics)
    found = rows(dict(pages.regions(tmp_path))["scale"], "qgnn int8")
    assert [row[0] for row in found] == ["100", "1000"]
    assert found[1][1:] == ["10000", "qgnn int8", "10", "1000.0", "10", "1049", "2.0"]


def test_updates_are_compared_with_a_rebuild_and_the_faster_of_pygs_types(tmp_path: Path) -> None:
    assert "update" not in dict(pages.regions(tmp_path))
    times = {"qgnn update int32": 2.0, "qgnn rebuild int32": 10.0, "pyg EdgeIndex int32": 9.0}
    for provider, ms in {**times, "pyg EdgeIndex int64": 5.0}.items():
        write(tmp_path, "update", "arxiv/synthetic/add-edges", provider, ms)
    assert rows(dict(pages.regions(tmp_path))["update"], "add-edges") == [
        ["arxiv/synthetic", "add-edges", "2", "10", "5", "5.00x", "2.50x"],
    ]
