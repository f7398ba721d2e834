"""QGINConv and QGINEConv: what is quantized and what is not, the network within, features of edges."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP, GINConv, GINEConv

from graphs import GRAPHS
from layer_cases import assert_same_pass, assert_unbiased, kept_bytes, passes
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import QGINConv, QGINEConv, QLinear

EDGES, N = GRAPHS["random"]
E = EDGES.shape[1]
NEAREST = QConfig(rounding="nearest")


def test_neighbors_are_summed_as_codes_and_the_own_row_as_it_is() -> None:
    x = torch.randn(N, 16)
    conv = QGINConv(nn.Identity(), eps=0.5, config=NEAREST)
    codes = functional.quantize(x, NEAREST).dequantize()
    expected = 1.5 * x + torch.zeros_like(x).index_add(0, EDGES[1], codes[EDGES[0]])
    torch.testing.assert_close(conv(x, EDGES), expected)
    expected = 1.5 * codes + torch.zeros_like(x).index_add(0, EDGES[1], codes[EDGES[0]])
    torch.testing.assert_close(conv(functional.quantize(x, NEAREST), EDGES), expected)


def test_gin_conv_is_unbiased_and_eps_has_its_exact_gradient() -> None:
    edge_index, num_nodes = GRAPHS["complete"]  # sums of several draws each
    conv, theirs = QGINConv(nn.Identity(), train_eps=True, config=QConfig(bits=4)), GINConv(nn.Identity(), 0.0, True)
    x = torch.randn(num_nodes, 6)
    exact = passes(theirs.double(), x.double(), edge_index)
    torch.testing.assert_close(passes(conv, x, edge_index)["deps"], exact.pop("deps").float())
    assert_unbiased(lambda: passes(conv, x, edge_index), exact, draws=150)


@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
def test_gin_conv_runs_an_mlp_of_pyg_with_its_state(config: QConfig | None) -> None:
    theirs = GINConv(MLP([16, 32, 8]), train_eps=True)
    conv = QGINConv(MLP([16, 32, 8]), train_eps=True, config=config)
    conv.load_state_dict(theirs.state_dict())
    x = torch.randn(N, 16)
    expected, actual = passes(theirs, x, EDGES), passes(conv, x, EDGES)
    assert conv.nn.norms[0].module.running_mean.abs().sum() > 0  # it is called once, in training mode
    if config is None:
        assert_same_pass(actual, expected)
    # the sum has codes within 1 % of its norm; behind BatchNorm, ReLU and a product that stays 1 % and a little
    assert (actual["out"] - expected["out"]).norm() < 0.03 * expected["out"].norm()


def test_gin_conv_of_quantized_layers_runs_in_int8() -> None:
    conv = QGINConv(nn.Sequential(QLinear(16, 32), nn.ReLU(), QLinear(32, 8)))
    with trace() as record:
        conv(torch.randn(N, 16, requires_grad=True), EDGES).sum().backward()
    assert {row["format"] for row in record.ops.values()} == {"int8"}
    assert record.ops["spmm.backward"]["calls"] == 1


def test_gin_conv_keeps_no_rows() -> None:
    x, graph = torch.randn(N, 64, requires_grad=True), Graph.from_edge_index(EDGES, N)
    graph_bytes = 4 * (2 * (N + 1) + 3 * E)
    for layer in (QGINConv(nn.Identity()), QGINConv(nn.Identity(), config=None)):
        kept = kept_bytes(lambda layer=layer: layer(x, graph), ignore=(x,))
        assert kept <= graph_bytes + 8 + 4  # a seed, and 1 + eps


def gine_pair(config: QConfig | None, **options: Any) -> tuple[nn.Module, nn.Module]:
    theirs, conv = GINEConv(nn.Linear(16, 8), **options), QGINEConv(nn.Linear(16, 8), **options, config=config)
    conv.load_state_dict(theirs.state_dict())
    return theirs, conv


def test_gine_conv_without_edge_dim_takes_rows_of_one_size() -> None:
    theirs, conv = gine_pair(None, eps=0.3)
    x, edge_attr = torch.randn(N, 16), torch.randn(E, 16, requires_grad=True)
    expected = passes(theirs, x, EDGES, edge_attr, extra=(edge_attr,))
    assert_same_pass(passes(conv, x, EDGES, edge_attr, extra=(edge_attr,)), expected)
    static = torch.randn(3, N, 16)
    assert_same_pass(passes(conv, static, EDGES, edge_attr), passes(theirs, static, EDGES, edge_attr))
    assert conv.half()(x.half(), EDGES, edge_attr).dtype == torch.float16


def test_gine_conv_takes_the_size_of_edge_features_from_the_first_input() -> None:
    theirs, conv = GINEConv(nn.Linear(16, 8), edge_dim=-1), QGINEConv(nn.Linear(16, 8), edge_dim=-1, config=None)
    x, edge_attr = torch.randn(N, 16), torch.randn(E, 3)
    theirs(x, EDGES, edge_attr), conv(x, EDGES, edge_attr)
    conv.load_state_dict(theirs.state_dict())
    assert_same_pass(passes(conv, x, EDGES, edge_attr), passes(theirs, x, EDGES, edge_attr))


def test_gine_conv_rounds_the_messages_and_the_products_of_edge_features() -> None:
    _, conv = gine_pair(QConfig(), edge_dim=3)
    edge_attr = torch.randn(E, 3, requires_grad=True)
    with trace() as record:
        conv(torch.randn(N, 16, requires_grad=True), EDGES, edge_attr).sum().backward()
    formats = {name: row["format"] for name, row in record.ops.items()}
    assert formats["incidence_sum.forward"] == formats["matmul.forward"] == formats["matmul.backward_dw"] == "int8"
    assert formats["sddmm.forward"] == "float32"


def test_gine_conv_is_unbiased_where_no_relu_switches() -> None:
    edge_index, num_nodes = GRAPHS["complete"]  # sums of several draws each
    theirs, conv = gine_pair(QConfig(bits=4), edge_dim=3)
    with torch.no_grad():
        theirs.lin.bias.fill_(8.0)  # half of the messages far above 0, half far below
        theirs.lin.bias[:8] = -8.0
    conv.load_state_dict(theirs.state_dict())
    conv.nn, theirs.nn = nn.Identity(), nn.Identity()
    x, edge_attr = torch.randn(num_nodes, 16), torch.randn(edge_index.shape[1], 3, requires_grad=True)
    exact = passes(theirs.double(), x.double(), edge_index, edge_attr.double(), extra=(edge_attr,))
    del exact["dx"], exact["dlin.bias"]  # exact
    assert_unbiased(lambda: passes(conv, x, edge_index, edge_attr, extra=(edge_attr,)), exact, draws=150)


def test_gine_conv_keeps_one_bit_of_a_message() -> None:
    theirs, conv = gine_pair(QConfig(), edge_dim=3)
    x, edge_attr, graph = torch.randn(N, 16, requires_grad=True), torch.randn(E, 3), Graph.from_edge_index(EDGES, N)
    kept = kept_bytes(lambda: conv(x, graph, edge_attr), ignore=(x, edge_attr, *conv.parameters()))
    index = 4 * (2 * (N + 1) + 6 * E)  # both orders of the edges, and how to go between them and the given one
    codes_of_edge_attr, rows_for_nn, seeds = E * (3 + 4), 4 * N * 16, 4 * 8
    assert kept <= E * 16 // 8 + index + codes_of_edge_attr + rows_for_nn + seeds
    assert kept_bytes(lambda: theirs(x, EDGES, edge_attr), ignore=(x, edge_attr, *theirs.parameters())) > 4 * E * 16


BAD_EDGE_ATTR: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none": (None, {}, r"expects 'edge_attr' of shape \[200, D\], a row an edge \(got None\)"),
    "vector": (torch.rand(E), {}, r"expects 'edge_attr' of shape \[200, D\], a row an edge \(got \[200\]\)"),
    "few": (torch.rand(7, 16), {}, r"expects 'edge_attr' of shape \[200, D\], a row an edge \(got \[7, 16\]\)"),
    "size": (torch.rand(E, 3), {}, r"expects node and edge features of one size \(got 16 and 3\); .* 'edge_dim'"),
}


@pytest.mark.parametrize("case", BAD_EDGE_ATTR)
def test_gine_conv_says_what_is_wrong_with_edge_features(case: str) -> None:
    edge_attr, options, message = BAD_EDGE_ATTR[case]
    with pytest.raises(ValueError, match=f"'QGINEConv' {message}"):
        QGINEConv(nn.Linear(16, 8), **options)(torch.randn(N, 16), EDGES, edge_attr)


def test_other_aggregations_run_on_the_path_of_pyg_and_say_so() -> None:
    x, edge_attr = torch.randn(N, 16), torch.randn(E, 16)
    theirs, conv = gine_pair(QConfig(), aggr="max")
    assert_same_pass(passes(conv, x, EDGES, edge_attr), passes(theirs, x, EDGES, edge_attr))
    assert conv.note == "aggregation 'max' runs on PyG's path in full precision"
    assert QGINConv(nn.Identity(), aggr="max").note is None
    median = QGINConv(nn.Identity(), aggr="median")
    assert median.note == "aggregation 'median' runs on PyG's path in full precision"
    out: Tensor = median(x, EDGES)
    torch.testing.assert_close(out, GINConv(nn.Identity(), aggr="median")(x, EDGES))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_gine_conv_takes_the_rows_of_a_matrix_as_features(layout: str) -> None:
    edge_index = torch.unique(EDGES.flip(0), dim=1)  # sorted, a row for each target
    edge_attr = torch.randn(edge_index.shape[1], 3, requires_grad=True)

    def matrix() -> Tensor:
        if layout == "coo":
            return torch.sparse_coo_tensor(edge_index, edge_attr, (N, N, 3), is_coalesced=True)
        pointers = torch.searchsorted(edge_index[0].contiguous(), torch.arange(N + 1))
        return torch.sparse_csr_tensor(pointers, edge_index[1], edge_attr.detach(), (N, N, 3))

    extra = (edge_attr,) if layout == "coo" else ()  # one in CSR hands no gradient on
    theirs, conv = gine_pair(None, edge_dim=3)
    x = torch.randn(N, 16)
    expected = passes(theirs, x, matrix(), extra=extra)
    assert_same_pass(passes(conv, x, matrix(), extra=extra), expected)
    assert_same_pass(passes(conv, x, edge_index.flip(0), edge_attr, extra=extra), expected)


@pytest.mark.parametrize("learned", [False, True])
def test_features_of_edges_have_one_format_in_training_and_in_evaluation(learned: bool) -> None:
    """Embeddings of bonds are activations, whatever the features of nodes are."""
    config = QConfig(rounding="nearest", components={"features": "int2"})
    conv, x = QGINEConv(MLP([16, 8]), edge_dim=6, config=config), torch.randn(N, 16)
    edge_attr = torch.randn(E, 6, requires_grad=learned)
    trained = conv(x, EDGES, edge_attr).detach()
    conv.eval()
    with torch.no_grad():
        evaluated = conv(x, EDGES, edge_attr.detach())
    torch.testing.assert_close(evaluated, trained)
    assert conv.takes_activations == learned
