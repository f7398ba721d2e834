"""QRGCNConv: PyG's relational convolution, with one aggregation and one product for all relations."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import RGCNConv

from graphs import GRAPHS, RECTANGULAR
from layer_cases import assert_same_pass, kept_bytes, passes, relative_error
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import Epilogue, QRGCNConv

NEAREST = QConfig(rounding="nearest")
EDGES, N = GRAPHS["power_law"]
K, M, R = 8, 12, 5
REGULARIZERS: tuple[dict[str, Any], ...] = ({}, {"num_bases": 2}, {"num_blocks": 4})


def pair(
    config: QConfig | None = None, sizes: int | tuple[int, int] = K, out: int = M, **options: Any
) -> tuple[RGCNConv, QRGCNConv]:
    theirs, ours = RGCNConv(sizes, out, R, **options), QRGCNConv(sizes, out, R, **options, config=config)
    if theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def types(edges: Tensor) -> Tensor:
    """Relations, the third without any edges."""
    drawn = torch.randint(R, edges.shape[1:])
    return torch.where(drawn == 2, 0, drawn)


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=str)
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_rgcn_conv_equals_pyg(aggr: str, regularizer: dict[str, Any]) -> None:
    theirs, ours = pair(aggr=aggr, **regularizer)
    for name in ("power_law", "duplicates", "empty", "no_nodes", "hub"):
        edges, num_nodes = GRAPHS[name]
        x, edge_type = torch.randn(num_nodes, K), types(edges)
        assert_same_pass(passes(ours, x, edges, edge_type), passes(theirs, x, edges, edge_type))


def test_rgcn_conv_equals_pyg_with_every_option() -> None:
    x, edge_type = torch.randn(N, K), types(EDGES)
    for root, bias, flow in itertools.product((True, False), (True, False), ("source_to_target", "target_to_source")):
        theirs, ours = pair(root_weight=root, bias=bias, flow=flow, is_sorted=True)
        order = edge_type.argsort(stable=True)
        edges, sorted_type = EDGES[:, order], edge_type[order]
        assert_same_pass(passes(ours, x, edges, sorted_type), passes(theirs, x, edges, sorted_type))


@pytest.mark.parametrize("name", RECTANGULAR)
def test_rgcn_conv_equals_pyg_between_two_sets_of_nodes(name: str) -> None:
    edges, num_sources, num_targets = RECTANGULAR[name]
    edge_type = types(edges)
    for options in REGULARIZERS:
        theirs, ours = pair(sizes=(K, 6), **options)
        x, target = torch.randn(num_sources, K), torch.randn(num_targets, 6, requires_grad=True)
        results = [passes(WithTargets(layer, target), x, edges, edge_type, extra=(target,)) for layer in (ours, theirs)]
        assert_same_pass(*results)


class WithTargets(torch.nn.Module):
    """A layer between the rows of a pass and those of the targets."""

    def __init__(self, layer: torch.nn.Module, target: Tensor) -> None:
        super().__init__()
        self.layer, self.target = layer, [target]

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        out = self.layer((x, self.target[0]), *args)
        assert isinstance(out, Tensor)
        return out


def test_rgcn_conv_takes_every_form_of_edges() -> None:
    edges = torch.unique(EDGES.flip(0), dim=1).flip(0)
    edges = edges[:, torch.randperm(edges.shape[1])]
    edge_type, x = types(edges), torch.randn(N, K)
    _, ours = pair()
    expected = passes(ours, x, edges, edge_type)
    for form in (EdgeIndex(edges, sparse_size=(N, N)), Graph.from_edge_index(edges, N), edges.int()):
        assert_same_pass(passes(ours, x, form, edge_type), expected)


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_rgcn_conv_looks_node_numbers_up_as_pyg_does(config: QConfig | None) -> None:
    theirs, ours = pair(config, sizes=N)
    edge_type = types(EDGES)
    expected = theirs(None, EDGES, edge_type)
    for x in (None, torch.arange(N), (torch.arange(N), torch.arange(N))):
        torch.testing.assert_close(ours(x, EDGES, edge_type), expected)
    ours.epilogue = Epilogue("relu")
    with trace() as record:
        torch.testing.assert_close(ours(None, EDGES, edge_type), expected.relu())
    assert "messages.forward" in record.ops
    assert "spmm.forward" not in record.ops


def test_rgcn_conv_notes_what_runs_in_full_precision() -> None:
    assert QRGCNConv(K, M, R).note is None
    assert QRGCNConv(K, M, R, aggr="max", num_blocks=4, config=None).note is None
    assert QRGCNConv(K, M, R, aggr="min").note == "minima run in full precision"
    both = QRGCNConv(K, M, R, aggr="max", num_blocks=4)
    assert both.note == "maxima and products with blocks run in full precision"


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_blocks_of_rgcn_conv_take_the_type_of_rows(config: QConfig | None) -> None:
    _, ours = pair(config, num_blocks=4)
    x, edge_type = torch.randn(N, K), types(EDGES)
    expected = ours(x, EDGES, edge_type)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        out = ours(x.to(dtype), EDGES, edge_type)
        assert out.dtype == dtype
        # x, sums, weight, products, root and result are rounded; and both sides to int8, each within 34 dB
        allowed = 6 * torch.finfo(dtype).eps + 1e-5 + (0 if config is None else 2 * 10 ** (-34 / 20))
        assert relative_error(out, expected) < allowed


@pytest.mark.parametrize(
    "options", [{}, {"aggr": "add"}, {"aggr": "max"}, {"num_blocks": 4}, {"num_bases": 3}], ids=str
)
def test_quantized_rgcn_conv_has_the_error_of_int8(options: dict[str, Any]) -> None:
    """The bounds of the registry's layers, for both sets of nodes."""
    theirs, ours = pair(QConfig(), sizes=(64, 48), out=32, **options)
    edges, num_sources, num_targets = RECTANGULAR["wide"]
    x, target, edge_type = torch.randn(num_sources, 64), torch.randn(num_targets, 48), types(edges)
    target.requires_grad_()
    expected = passes(WithTargets(theirs, target), x, edges, edge_type, extra=(target,))
    actual = passes(WithTargets(ours, target), x, edges, edge_type, extra=(target,))
    for key, value in expected.items():
        if not key.endswith("comp"):  # 15 numbers, each an inner product that may cancel
            assert (actual[key] - value).norm() < 10 ** (-(34 if key == "out" else 30) / 20) * value.norm(), key


def test_rgcn_conv_takes_rows_that_are_quantized_already() -> None:
    _, ours = pair(NEAREST)
    x, edge_type = torch.randn(N, K), types(EDGES)
    assert torch.equal(ours(functional.quantize(x, NEAREST), EDGES, edge_type), ours(x, EDGES, edge_type))


def test_rgcn_conv_sorts_a_graph_once_for_its_edges_and_types(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair()
    built: list[int] = []
    original = Graph.from_edge_index
    monkeypatch.setattr(Graph, "from_edge_index", staticmethod(lambda *args: built.append(1) or original(*args)))
    x, edges, edge_type = torch.randn(N, K), EDGES.clone(), types(EDGES)
    other = types(EDGES)
    for given, count in ((edge_type, 1), (edge_type, 1), (other, 2), (edge_type, 2)):
        torch.testing.assert_close(ours(x, edges, given), theirs(x, edges, given), atol=1e-5, rtol=1e-5)
        assert len(built) == count
    edge_type.fill_(1)
    torch.testing.assert_close(ours(x, edges, edge_type), theirs(x, edges, edge_type), atol=1e-5, rtol=1e-5)


def test_rgcn_conv_keeps_codes_of_the_rows_of_all_relations() -> None:
    theirs, ours = pair(QConfig(), sizes=64, out=64)
    x, edge_type = torch.randn(N, 64, requires_grad=True), types(EDGES)
    ours(x, EDGES, edge_type)
    parameters = (*ours.parameters(), *theirs.parameters(), x, EDGES)
    structure = 3 * EDGES.shape[1] * 4 + (N * R + 1) * 8 + (N + 1) * 4  # both orders, and the factors of a mean
    kept = kept_bytes(lambda: ours(x, EDGES, edge_type), ignore=parameters)
    assert kept <= N * (64 * R + 4) + N * (64 + 4) + structure + 100
    assert kept_bytes(lambda: theirs(x, EDGES, edge_type), ignore=parameters) > R * N * 64 * 4


def test_rgcn_conv_names_what_it_cannot_take() -> None:
    _, ours = pair(NEAREST)
    x, edge_type = torch.randn(N, K), types(EDGES)
    with pytest.raises(ValueError, match=r"'QRGCNConv' expects 'edge_type', a relation for each edge \(got None\)"):
        ours(x, EDGES)
    with pytest.raises(ValueError, match=r"expects 'edge_type' from 0 to 4 \(got 0 to 5\)"):
        ours(x, EDGES, edge_type.clone().index_fill(0, torch.tensor([7]), 5))
    for wrong in (edge_type[1:], edge_type.float()):
        with pytest.raises(ValueError, match=r"'edge_type' with an integer for each of 700 edges \(got torch\."):
            ours(x, EDGES, wrong)
    with pytest.raises(ValueError, match=r"'QRGCNConv' expects 'x' with 8 columns \(got \[160, 7\]\)"):
        ours(x[:, 1:], EDGES, edge_type)
    with pytest.raises(ValueError, match=r"takes no edge weights \(got a Graph that has some\)"):
        ours(x, Graph.from_edge_index(EDGES, N, torch.rand(EDGES.shape[1])), edge_type)
    with pytest.raises(ValueError, match=r"'QRGCNConv' expects 'aggr' to be one of \('add', .* \(got 'std'\)"):
        QRGCNConv(K, M, R, aggr="std")
