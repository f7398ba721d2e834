"""Inputs that broke other libraries' layers, and what ours make of them; ``test_cases.py`` has those of graphs, of
weights and of quantizers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import to_hetero

import qgnn
from graphs import GRAPHS
from layer_cases import kept_bytes, passes
from layers import LAYERS, K, M, learned
from qgnn import QConfig
from qgnn.nn import QGATConv, QGATv2Conv, QGCNConv, QSAGEConv, QTransformerConv

NEAREST = QConfig(rounding="nearest")
BOTH = pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
ALL = pytest.mark.parametrize("name", LAYERS)
ATTENTION = pytest.mark.parametrize("cls", [QGATConv, QGATv2Conv, QTransformerConv])
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
SIZED = ("gcn", "sage", "graph", "sg", "cheb", "gat", "gatv2", "transformer")
# PyG refuses a projection of unknown size, and never makes the skip of a TransformerConv that has no root.
NOT_LAZY = ("sage/project", "sage/wide", "graph/wide", "transformer/no_root")
LAZY = [name for name in LAYERS if name.split("/")[0] in SIZED and name not in NOT_LAZY]


@BOTH
@ATTENTION
def test_large_logits_stay_finite(cls: type[nn.Module], config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/53"""
    conv = cls(K, M, config=config)
    edge_index, num_nodes = GRAPHS["power_law"]
    results = passes(conv, 1e4 * torch.randn(num_nodes, K), edge_index)
    assert all(value.isfinite().all() for value in results.values())


@BOTH
@pytest.mark.parametrize("aggr", ["max", "mean", "sum"])
def test_aggregation_in_half_stays_finite(aggr: str, config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/646, also where nodes have no neighbors"""
    conv = QSAGEConv(K, M, aggr=aggr, root_weight=False, bias=False, config=config).half()
    edge_index, num_nodes = GRAPHS["isolated"]
    out = conv(torch.randn(num_nodes, K).half(), edge_index)
    assert out.dtype == torch.half
    assert out.isfinite().all()
    isolated = torch.ones(num_nodes, dtype=torch.bool).index_fill(0, edge_index[1], False)
    assert (out[isolated] == 0).all()


@BOTH
def test_a_mean_of_many_half_rows_is_summed_in_fp32(config: QConfig | None) -> None:
    """5,000 times 30 is more than a half holds; their mean is not."""
    edge_index = torch.stack([torch.arange(1, 5001), torch.zeros(5000, dtype=torch.long)])
    conv = QSAGEConv(8, 8, root_weight=False, bias=False, config=config).half()
    with torch.no_grad():
        conv.lin_l.weight.copy_(torch.eye(8))
    out = conv(torch.full((5001, 8), 30.0).half(), edge_index)
    assert torch.allclose(out[0], torch.tensor(30.0).half(), rtol=2**-7)  # a weight and a row are rounded to int8


@BOTH
def test_a_half_model_takes_fp32_edge_weights(config: QConfig | None) -> None:
    model = nn.ModuleList([QGCNConv(K, 16, config=config), QGCNConv(16, M, config=config)]).half()
    x, weight = torch.randn(4, K).half(), torch.rand(4)
    for conv in model:
        x = conv(x, EDGES, weight)
        assert x.dtype == torch.half


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@ALL
def test_layer_takes_an_edge_index_object_in_any_type(name: str, dtype: torch.dtype, config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    if "RGCN" in LAYERS[name].name:
        pytest.skip("types of edges belong to a plain edge_index")
    layer, x = LAYERS[name].ours(config).to(dtype).eval(), torch.randn(num_nodes, K, dtype=dtype)
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in LAYERS[name].args(edge_index, num_nodes))
    order = torch.argsort(edge_index[1], stable=True)
    sorted_index = edge_index[:, order]
    args = tuple(a[order] if isinstance(a, Tensor) and a.shape[0] == order.numel() else a for a in args)
    given = EdgeIndex(sorted_index, sparse_size=(num_nodes, num_nodes), sort_order="col")
    assert torch.equal(layer(x, given, *args), layer(x, sorted_index, *args))


@BOTH
@ALL
def test_layer_without_edges_gives_what_is_left_of_it(name: str, config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/1129: one node, no edges, columns enough to hold garbage."""
    layer = LAYERS[name].ours(config, 64, 64)
    theirs = LAYERS[name].theirs(64, 64)
    layer.load_state_dict(theirs.state_dict())
    edge_index = torch.empty(2, 0, dtype=torch.long)
    x, args = torch.randn(1, 64), LAYERS[name].args(edge_index, 1)
    torch.testing.assert_close(
        layer(x, edge_index, *args), theirs(x, edge_index, *args), rtol=0, atol=1e-5 if config is None else 5e-2
    )


@ALL
def test_an_empty_float_edge_index_is_named(name: str) -> None:
    edge_index = torch.tensor([[], []])
    layer = LAYERS[name].ours(NEAREST)
    with pytest.raises(ValueError, match=r"'edge_index' expects torch.int64 node indices \(got torch.float32\)"):
        layer(torch.randn(3, K), edge_index, *LAYERS[name].args(edge_index.long(), 3))


@BOTH
@ALL
def test_trailing_nodes_are_kept(name: str, config: QConfig | None) -> None:
    layer = LAYERS[name].ours(config)
    assert layer(torch.randn(9, K), EDGES, *LAYERS[name].args(EDGES, 9)).shape[0] == 9


@BOTH
@ALL
def test_multi_edges_count_as_often_as_they_come(name: str, config: QConfig | None) -> None:
    """Three copies of each edge against PyG's layer, which keeps them all."""
    edge_index, num_nodes = GRAPHS["duplicates"]
    theirs, ours = LAYERS[name].pair(config)
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    error = ours(x, edge_index, *args) - theirs(x, edge_index, *args)
    assert error.norm() <= (1e-5 if config is None else 5e-2) * theirs(x, edge_index, *args).norm()


@BOTH
@ATTENTION
def test_edge_features_without_a_place_for_them_raise(cls: type[nn.Module], config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/9940"""
    conv = cls(K, M, config=config)
    with pytest.raises(ValueError, match=rf"'{cls.__name__}' .*'edge_attr'.*edge_dim"):
        conv(torch.randn(4, K), EDGES, torch.randn(4, 3))


@BOTH
@ATTENTION
def test_attention_between_two_kinds_of_nodes(cls: type[nn.Module], config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/1631"""
    options = {} if cls is QTransformerConv else {"add_self_loops": False}
    conv = cls((K, 5), M, heads=2, config=config, **options)
    edge_index = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3]])
    out = conv((torch.randn(2, K), torch.randn(4, 5)), edge_index)
    assert out.shape == (4, 2 * M)
    assert out.isfinite().all()


@BOTH
def test_a_hetero_model_of_one_node_type(config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/4271"""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = QSAGEConv(K, 8, config=config), QSAGEConv(8, M, config=config)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    model = to_hetero(Model(), (["paper"], [("paper", "cites", "paper")]))
    out = model({"paper": torch.randn(4, K)}, {("paper", "cites", "paper"): EDGES})
    assert out["paper"].shape == (4, M)


@BOTH
@pytest.mark.parametrize("name", LAZY)
def test_lazy_sizes_come_from_the_first_input(name: str, config: QConfig | None) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/6827"""
    layer = LAYERS[name].ours(config, -1, M)
    x, args = torch.randn(4, K), LAYERS[name].args(EDGES, 4)
    results = passes(layer, x, EDGES, *args, extra=learned(args))
    assert results["out"].shape[0] == 4


@ATTENTION
def test_attention_keeps_no_tensor_of_the_size_of_edges(cls: type[nn.Module]) -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/527: what is kept does not grow with the edges."""
    options = {} if cls is QTransformerConv else {"add_self_loops": False}  # so that the graph is the given one
    conv, num_nodes = cls(K, 16, heads=2, **options), 50
    x = torch.randn(num_nodes, K, requires_grad=True)
    bytes_kept = []
    for num_edges in (200, 6400):
        edge_index = torch.randint(num_nodes, (2, num_edges))
        graph = qgnn.Graph.from_edge_index(edge_index, num_nodes)
        conv(x, graph)  # prepares what belongs to the graph
        shared = [t for value in graph._shared.values() for t in tensors_of(value)]
        ignore = (*conv.parameters(), *tensors_of(graph.csr), *shared)
        bytes_kept.append(kept_bytes(lambda graph=graph: conv(x, graph), ignore))
    assert bytes_kept[1] - bytes_kept[0] <= 64  # scalars


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for t in vars(value).values() if isinstance(t, Tensor)]


def test_two_runs_from_one_seed_are_equal() -> None:
    """https://github.com/pyg-team/pytorch_geometric/issues/2801"""
    edge_index, num_nodes = GRAPHS["power_law"]
    histories = []
    for _ in range(2):
        torch.manual_seed(12)
        model = nn.ModuleList([QSAGEConv(K, 16), QGATConv(16, 4, heads=2, dropout=0.3, concat=False)])
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(num_nodes, K), torch.arange(num_nodes) % 4
        history = []
        for _ in range(5):
            optimizer.zero_grad()
            out = model[1](nn.functional.dropout(model[0](x, edge_index).relu(), 0.5), edge_index)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        histories.append(history)
    assert histories[0] == histories[1]
