"""QSAGEConv, QGraphConv, QGINConv and QGINEConv take what PyG's take: pairs, all forms of edges, sets of rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.nn import Linear

from graphs import GRAPHS, RECTANGULAR
from layer_cases import assert_same_pass, passes
from layers import LAYERS, K, exact_pair
from qgnn import Graph, QConfig, functional, trace
from qgnn import nn as qnn
from qgnn.nn import Epilogue

NAMES = ("sage", "sage/narrow", "sage/max", "sage/project", "graph/weighted", "graph/max", "gin", "gine")
EACH = pytest.mark.parametrize("name", NAMES)
NEAREST = QConfig(rounding="nearest")


class OfPair(nn.Module):
    """A layer of one tensor of source rows."""

    def __init__(self, conv: nn.Module, target: Tensor | None) -> None:
        super().__init__()
        self.conv, self.target = conv, target

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.conv((x, self.target), *args, **kwargs)


def without_duplicates(name: str) -> Tensor:
    """Edges in the order of a matrix with a row for each target, which holds one value a pair of nodes."""
    return torch.unique(GRAPHS[name][0].flip(0), dim=1).flip(0).contiguous()


def learned(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(t for t in args if isinstance(t, Tensor) and t.requires_grad)


@EACH
def test_layer_equals_pyg_between_two_kinds_of_nodes(name: str) -> None:
    theirs, ours = exact_pair(name)
    for edge_index, num_sources, num_targets in RECTANGULAR.values():
        x, target = torch.randn(num_sources, K), torch.randn(num_targets, K, requires_grad=True)
        args = LAYERS[name].args(edge_index, num_sources)
        extra = (target, *learned(args))
        expected = passes(OfPair(theirs, target), x, edge_index, *args, extra=extra)
        assert_same_pass(passes(OfPair(ours, target), x, edge_index, *args, extra=extra), expected)


@EACH
def test_layer_equals_pyg_where_targets_have_no_rows(name: str) -> None:
    theirs, ours = exact_pair(name)
    edge_index, num_sources, num_targets = RECTANGULAR["wide"]
    args = LAYERS[name].args(edge_index, num_sources)
    square, num_nodes = GRAPHS["random"]
    square_args = LAYERS[name].args(square, num_nodes)
    with torch.no_grad():
        for x, edges, behind, size in (
            (torch.randn(num_sources, K), edge_index, args, (num_sources, num_targets)),
            (torch.randn(num_sources, K), edge_index, args, (None, num_targets)),
            (torch.randn(num_nodes, K), square, square_args, None),
        ):
            expected = theirs((x, None), edges, *behind, size=size)
            torch.testing.assert_close(ours((x, None), edges, *behind, size=size), expected, rtol=1e-5, atol=1e-5)
        x = torch.randn(num_sources, K)
        try:  # against the direction of the edges, PyG's result has a row for each of size[0] nodes
            theirs.flow = ours.flow = "target_to_source"
            expected = theirs((x, None), edge_index, *args, size=(num_sources, num_targets))
            actual = ours((x, None), edge_index, *args, size=(num_sources, num_targets))
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        finally:
            theirs.flow = ours.flow = "source_to_target"
        graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
        expected = ours((x, None), edge_index, *args, size=(num_sources, num_targets))
        assert torch.equal(ours((x, None), graph, *args), expected)


@EACH
def test_two_tensors_of_the_same_nodes_are_not_taken_for_one(name: str) -> None:
    theirs, ours = exact_pair(name)
    edge_index, num_nodes = GRAPHS["random"]
    args, target = LAYERS[name].args(edge_index, num_nodes), torch.randn(num_nodes, K)
    x = torch.randn(num_nodes, K)
    expected = passes(OfPair(theirs, target), x, edge_index, *args)
    assert_same_pass(passes(OfPair(ours, target), x, edge_index, *args), expected)


@EACH
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_layer_takes_every_form_of_edges(name: str) -> None:
    _, ours = exact_pair(name)
    edge_index = (
        torch.unique(GRAPHS["power_law"][0].flip(0), dim=1).flip(0).contiguous()
    )  # a matrix holds one value a pair
    num_nodes = GRAPHS["power_law"][1]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    expected = passes(ours, x, edge_index, *args, extra=learned(args))
    ones = torch.ones(edge_index.shape[1])
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), ones, (num_nodes, num_nodes)).coalesce()
    forms: list[Any] = [
        EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes)),
        EdgeIndex(edge_index),
        Graph.from_edge_index(edge_index, num_nodes),
    ]
    if not name.startswith("graph"):  # which takes weights beside the edges or within, not both
        forms += [matrix, matrix.to_sparse_csr()]
    for edges in forms:
        assert_same_pass(passes(ours, x, edges, *args, extra=learned(args)), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", ["sage", "sage/narrow", "graph", "gin"])
def test_values_of_a_sparse_matrix_are_weights_as_in_pyg(name: str) -> None:
    theirs, ours = exact_pair(name)
    edge_index = without_duplicates("random")
    value = torch.rand(edge_index.shape[1]) + 0.1
    csr = torch.sparse_coo_tensor(edge_index.flip(0), value, (50, 50)).coalesce().to_sparse_csr()
    x = torch.randn(50, K)
    assert_same_pass(passes(ours, x, csr), passes(theirs, x, csr))
    assert_same_pass(passes(ours, x, Graph.from_edge_index(edge_index, 50, value)), passes(theirs, x, csr))


@pytest.mark.parametrize("name", [*NAMES, "sage/normalize"])
def test_layer_equals_pyg_on_several_sets_of_rows(name: str) -> None:
    theirs, ours = exact_pair(name)
    for graph in ("random", "isolated", "empty"):
        edge_index, num_nodes = GRAPHS[graph]
        x, args = torch.randn(3, num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
        expected = passes(theirs, x, edge_index, *args, extra=learned(args))
        assert_same_pass(passes(ours, x, edge_index, *args, extra=learned(args)), expected)


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_nodes_may_lie_along_another_dimension(name: str) -> None:
    theirs, ours = getattr(pyg, name)(K, 4, node_dim=0), getattr(qnn, f"Q{name}")(K, 4, node_dim=0)
    ours.load_state_dict(theirs.state_dict())
    edge_index, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, 3, K)
    assert_same_pass(passes(ours, x, edge_index), passes(theirs, x, edge_index))
    with trace() as record:
        ours(x[:, 0], edge_index)
    assert record.ops["spmm.forward"]["format"] == "int8"


@EACH
def test_several_sets_of_rows_have_the_error_of_int8(name: str) -> None:
    """Every operand's codes are off by 1 % at most of its norm (36 dB and more for widths up to 64), in three products
    behind each other; a ReLU or maximum of codes adds the gradients that it moves, a tenth of their norm."""
    theirs, _ = exact_pair(name)
    ours = LAYERS[name].ours(QConfig())
    ours.load_state_dict(theirs.state_dict())
    edge_index, num_nodes = GRAPHS["random"]
    x, args = torch.randn(3, num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    expected = passes(theirs, x, edge_index, *args, extra=learned(args))
    actual = passes(ours, x, edge_index, *args, extra=learned(args))
    for key, value in expected.items():
        error = ((actual[key] - value).norm() / value.norm()).item()
        assert error < (0.15 if key in LAYERS[name].switched else 0.04), (key, error)
    assert ((actual["out"] - expected["out"]).norm() / expected["out"].norm()).item() > 1e-4


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
@pytest.mark.parametrize(("name", "sizes"), [("SAGEConv", -1), ("SAGEConv", (-1, -1)), ("GraphConv", -1)])
def test_layer_takes_its_sizes_from_the_first_input(name: str, sizes: Any, config: QConfig | None) -> None:
    theirs, ours = getattr(pyg, name)(sizes, 4), getattr(qnn, f"Q{name}")(sizes, 4, config=config)
    edge_index, num_sources, num_targets = RECTANGULAR["tall"]
    pair = (torch.randn(num_sources, 5), torch.randn(num_targets, 6))
    torch.manual_seed(5)
    expected = theirs(pair, edge_index)
    torch.manual_seed(5)
    actual = ours(pair, edge_index)
    if config is None:
        torch.testing.assert_close(actual, expected)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    with trace() as record:  # PyG's hook for the first call is gone, so the layer's own path runs
        ours(pair, edge_index)
    assert record.ops["spmm.forward"]["format"] == ("float32" if config is None else "int8")


@EACH
def test_layer_takes_codes(name: str) -> None:
    theirs, exact = exact_pair(name)
    ours = LAYERS[name].ours(NEAREST)
    ours.load_state_dict(theirs.state_dict())
    edge_index, num_nodes = GRAPHS["random"]
    args = LAYERS[name].args(edge_index, num_nodes)
    x = functional.quantize(torch.randn(num_nodes, K), NEAREST)
    for conv in (exact, ours):
        out, expected = conv(x, edge_index, *args), conv(x.dequantize(), edge_index, *args)
        assert out.dtype == torch.float32
        # codes of decoded codes are the same codes, but for scales that round once more
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=0.02 if conv is ours else 1e-5)
        out.sum().backward()
    origin = torch.randn(num_nodes, K, requires_grad=True)
    for conv in (exact, ours):
        codes = functional.quantize(origin, NEAREST, straight_through=True)
        rows = origin.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(conv(codes, edge_index, *args).sum(), origin)
        (expected,) = torch.autograd.grad(conv(rows, edge_index, *args).sum(), rows)
        assert (grad - expected).norm() < (0.15 if LAYERS[name].switched else 0.04) * expected.norm()


@EACH
def test_layer_runs_code_attached_to_its_messages(name: str) -> None:
    theirs, _ = exact_pair(name)
    ours = LAYERS[name].ours(QConfig())
    ours.load_state_dict(theirs.state_dict())
    edge_index, num_nodes = GRAPHS["random"]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    seen: list[int] = []
    handle = ours.register_message_forward_hook(lambda *_: seen.append(1))
    expected = passes(theirs, x, edge_index, *args, extra=learned(args))
    assert_same_pass(passes(ours, x, edge_index, *args, extra=learned(args)), expected)
    assert seen == [1]
    with pytest.raises(ValueError, match=r"expects 'edge_index' as a tensor .* \(got a Graph\)"):
        ours(x, Graph.from_edge_index(edge_index, num_nodes), *args)
    handle.remove()
    with trace() as record:
        ours(x, edge_index, *args)
    assert "messages.forward" not in record.ops
    for linear in (module for module in ours.children() if type(module) is Linear):
        handle = linear.register_forward_hook(lambda *_: seen.append(2))
        ours(x, edge_index, *args)
        assert seen.pop() == 2
        handle.remove()


@EACH
def test_layer_applies_its_epilogue_to_the_result(name: str) -> None:
    theirs, ours = exact_pair(name)
    edge_index, num_nodes = GRAPHS["random"]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    try:
        for activation, function in (("relu", torch.relu), ("elu", nn.functional.elu)):
            ours.epilogue = Epilogue(activation)
            expected = function(theirs(x, edge_index, *args))
            torch.testing.assert_close(ours(x, edge_index, *args), expected, rtol=1e-5, atol=1e-5)
    finally:
        ours.epilogue = None


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_layer_keeps_a_half_type(name: str, dtype: torch.dtype, config: QConfig | None) -> None:
    theirs, _ = exact_pair(name)
    ours = LAYERS[name].ours(config)
    ours.load_state_dict(theirs.state_dict())
    ours.to(dtype)
    edge_index, num_nodes = GRAPHS["power_law"]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    expected = theirs(x, edge_index, *args)
    out = ours(x.to(dtype), edge_index, *args)  # weights and features of edges stay fp32 on purpose
    assert out.dtype == dtype
    # six roundings to the type, each eps / 2 of a term, and codes as above
    bound = 8 * torch.finfo(dtype).eps + (0.0 if config is None else 0.04)
    assert (out.float() - expected).norm() < bound * expected.norm()
    out.sum().backward()


def test_an_isolated_node_gets_its_own_row_alone() -> None:
    """dgl#2711: no bias and no value of a maximum's start leaks into what was summed."""
    edge_index, num_nodes = GRAPHS["isolated"]
    alone = sorted(set(range(num_nodes)) - set(edge_index[1].tolist()))
    x = torch.randn(num_nodes, K)
    for dtype in (torch.float32, torch.float16):  # pyg#646: a maximum's start that half cannot hold
        for aggr in ("mean", "sum", "max", "min"):
            conv = qnn.QSAGEConv(K, 4, aggr, root_weight=False).to(dtype)
            nn.init.normal_(conv.lin_l.bias)
            out = conv(x.to(dtype), edge_index)
            assert out.isfinite().all()
            assert torch.equal(out[alone], conv.lin_l.bias.expand(len(alone), -1))
            gin = qnn.QGINConv(nn.Identity(), eps=0.5, aggr=aggr).to(dtype)
            assert torch.equal(gin(x.to(dtype), edge_index)[alone], 1.5 * x.to(dtype)[alone])


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_a_mean_of_many_messages_in_half_is_finite(config: QConfig | None) -> None:
    edge_index = torch.stack([torch.arange(5000), torch.zeros(5000, dtype=torch.int64)])
    x = torch.full((5000, 1), 30.0, dtype=torch.float16)
    for out_channels in (1, 2):  # both orders of product and mean
        conv = qnn.QSAGEConv(1, out_channels, root_weight=False, bias=False, config=config).half()
        nn.init.ones_(conv.lin_l.weight)
        assert torch.equal(conv(x, edge_index)[0], torch.full((out_channels,), 30.0, dtype=torch.float16))


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "RGCNConv"])
def test_a_reversed_flow_needs_as_many_sources_as_targets(name: str) -> None:
    """PyG's layers fail there, or give a result of another size than the targets; QTransformerConv is as PyG's."""
    edge_index, num_sources, num_targets = RECTANGULAR["wide"]
    relations = (2,) if name == "RGCNConv" else ()
    conv = getattr(qnn, f"Q{name}")((K, K), 4, *relations, flow="target_to_source")
    types = (torch.zeros(edge_index.shape[1], dtype=torch.int64),) if relations else ()
    message = rf"'Q{name}' expects as many source as target nodes .* \(got {num_sources} and {num_targets}\)"
    with pytest.raises(ValueError, match=message):
        conv((torch.randn(num_sources, K), torch.randn(num_targets, K)), edge_index, *types)


BAD_X = {
    "sizes": ((torch.ones(40, K), torch.ones(7, K)), (60, 7), r"expects a row for each of 60 source nodes \(got 40\)"),
    "targets": ((torch.ones(60, K), torch.ones(8, K)), (60, 7), r"expects a row for each of 7 target nodes \(got 8\)"),
    "vector": (torch.ones(60), None, r"expects 'x' of shape \[N, F\] or \[B, N, F\] \(got \[60\]\)"),
    "number": ((torch.ones(60, K), 3), None, r"expects the rows of target nodes as a tensor \(got int\)"),
    "few": (torch.ones(20, K), None, r"'edge_index' expects source indices from 0 to 19"),
}


@pytest.mark.parametrize("case", BAD_X)
def test_layer_says_what_does_not_fit(case: str) -> None:
    x, size, message = BAD_X[case]
    edge_index = RECTANGULAR["wide"][0]
    for conv in (qnn.QSAGEConv(K, 4), qnn.QGraphConv(K, 4), qnn.QGINConv(nn.Identity())):
        named = message if case == "few" else f"'{type(conv).__name__}' {message}"
        with pytest.raises(TypeError if case == "number" else ValueError, match=named):
            conv(x, edge_index, size=size)
