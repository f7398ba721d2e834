"""What the attention layers take besides plain graphs, and return besides rows: PyG's results."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg

from graphs import GRAPHS, RECTANGULAR
from layer_cases import assert_same_pass, kept_bytes, passes
from layers import EDGE_DIM, attention
from qgnn import Graph, QConfig, functional, trace
from qgnn import nn as qnn
from qgnn.nn._edges import LoopedEdges

K, M, H = 7, 12, 2
NEAREST = QConfig(rounding="nearest")
NAMES = ("GATConv", "GATv2Conv", "TransformerConv")
ALL = pytest.mark.parametrize("name", NAMES)
LOOPED = pytest.mark.parametrize("name", NAMES[:2])
CONFIGS = pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
FILLS = ("mean", "add", "min", "max", "mul", 0.5, torch.linspace(-1, 1, EDGE_DIM))


@cache  # PyG renders and compiles a template for each new layer
def _pair(name: str, sizes: Any, options: tuple[tuple[str, Any], ...], config: QConfig | None) -> Any:
    torch.manual_seed(1)
    layer = attention(name, {"heads": H, **dict(options)})
    theirs = getattr(pyg, name)(sizes, M, **layer.options)
    for key, parameter in theirs.named_parameters():
        if "bias" in key:
            nn.init.normal_(parameter)
    ours = getattr(qnn, f"Q{name}")(sizes, M, **layer.options, config=config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def pair(name: str, sizes: Any = K, config: QConfig | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """PyG's layer and ours with equal parameters. Shared: tests leave the parameters alone."""
    return _pair(name, sizes, tuple(options.items()), config)


def assert_same(name: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_same_pass(actual, expected, differences=attention(name, {}).cancelling)


def both(name: str, layers: tuple[nn.Module, nn.Module], x: Tensor, *args: Any, extra: tuple[Tensor, ...] = ()) -> None:
    theirs, ours = layers
    assert_same(name, passes(ours, x, *args, extra=extra), passes(theirs, x, *args, extra=extra))


def edge_features(edge_index: Tensor) -> Tensor:
    return torch.randn(edge_index.shape[1], EDGE_DIM).requires_grad_()


class Bipartite(nn.Module):
    """A layer of the rows of sources, its parameters under their own names; the rows of targets are given to it."""

    def __init__(self, layer: nn.Module, target: Tensor | None) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "target", target)

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return self.layer.named_parameters()

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.layer((x, self.target), *args)


@ALL
@pytest.mark.parametrize("sizes", [K, (K, 5)], ids=["shared", "two_sizes"])
def test_layers_between_two_sets_of_nodes_equal_pyg(name: str, sizes: Any) -> None:
    for edge_index, num_sources, num_targets in RECTANGULAR.values():
        # PyG fills in features of self-loops for all targets or none.
        featured = name == "TransformerConv" or num_targets <= num_sources
        edges = edge_features(edge_index) if featured else None
        theirs, ours = pair(name, sizes, edge_dim=EDGE_DIM if featured else None)
        x = torch.randn(num_sources, K)
        target = torch.randn(num_targets, sizes if isinstance(sizes, int) else sizes[1]).requires_grad_()
        extra = (target,) if edges is None else (target, edges)
        args = (edge_index,) if edges is None else (edge_index, edges)
        expected = passes(Bipartite(theirs, target), x, *args, extra=extra)
        assert_same(name, passes(Bipartite(ours, target), x, *args, extra=extra), expected)


def test_gat_conv_takes_sources_alone() -> None:
    edge_index, num_sources, _ = RECTANGULAR["wide"]
    x = torch.randn(num_sources, K)
    for size in (None, (num_sources, 7)):
        theirs, ours = (Bipartite(layer, None) for layer in pair("GATConv", (K, 5), residual=True))
        both("GATConv", (theirs, ours), x, edge_index, None, size)
    with pytest.raises(ValueError, match=r"'QGATConv' expects 'size' to be the numbers of rows of 'x'"):
        pair("GATConv", (K, 5))[1]((x, None), edge_index, size=(num_sources + 1, 7))


@LOOPED
def test_layers_take_fewer_sources_than_targets(name: str) -> None:
    edge_index = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3]])
    target = torch.randn(4, K)
    both(name, tuple(Bipartite(layer, target) for layer in pair(name)), torch.randn(2, K), edge_index)


@LOOPED
@pytest.mark.parametrize("fill", FILLS, ids=str)
def test_features_of_self_loops_equal_pyg(name: str, fill: Any) -> None:
    torch.manual_seed(1)
    for graph in ("self_loops", "duplicates", "isolated", "only_loops", "empty"):
        edge_index, num_nodes = GRAPHS[graph]
        edges = edge_features(edge_index)
        layers = pair(name, edge_dim=EDGE_DIM, fill_value=fill)
        both(name, layers, torch.randn(num_nodes, K), edge_index, edges, extra=(edges,))
        both(name, layers, torch.randn(num_nodes, K), edge_index, edges.detach())  # remembered


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_edges_of_fixed_shape_count_as_those_without_loops(fill: Any, reverse: bool) -> None:
    edge_index, num_nodes = GRAPHS["self_loops"]
    attr = torch.randn(edge_index.shape[1], EDGE_DIM)
    looped, fixed = (LoopedEdges(edge_index, (num_nodes, num_nodes), num_nodes, reverse, f) for f in (False, True))
    scores, expected = (functional.incidence_sum(e.graph, e.features(attr, fill)) for e in (fixed, looped))
    torch.testing.assert_close(scores[:-1], expected)
    assert fixed.graph.num_edges == edge_index.shape[1] + num_nodes
    assert torch.equal(fixed.graph.in_degree[:-1], looped.graph.in_degree)


def without_duplicates(name: str) -> tuple[Tensor, int]:
    edge_index, num_nodes = GRAPHS[name]
    return torch.unique(edge_index.flip(0), dim=1).flip(0), num_nodes


def as_matrix(form: str, edge_index: Tensor, num_nodes: int, value: Tensor) -> Tensor:
    size = (num_nodes, num_nodes, *value.shape[1:])
    coo = torch.sparse_coo_tensor(edge_index.flip(0), value, size).coalesce()
    return coo if form == "coo" else coo.to_sparse_csr() if value.dim() == 1 else as_csr(coo)


def as_csr(coo: Tensor) -> Tensor:
    row, col = coo.indices()
    pointers = torch.searchsorted(row.contiguous(), torch.arange(coo.shape[0] + 1))
    return torch.sparse_csr_tensor(pointers, col, coo.values(), coo.shape)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Converting sparse tensor to CSR")
@pytest.mark.parametrize("form", ["coo", "csr"])
@ALL
def test_layers_equal_pyg_on_sparse_matrices(name: str, form: str) -> None:
    for graph in ("random", "self_loops"):
        edge_index, num_nodes = without_duplicates(graph)
        x = torch.randn(num_nodes, K)
        matrix = as_matrix(form, edge_index, num_nodes, torch.rand(edge_index.shape[1]))
        both(name, pair(name), x, matrix)
        if name != "TransformerConv":  # whose message in PyG takes no features of a matrix
            featured = as_matrix(form, edge_index, num_nodes, torch.randn(edge_index.shape[1], EDGE_DIM))
            both(name, pair(name, edge_dim=EDGE_DIM, add_self_loops=False), x, featured)


@ALL
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_layers_take_edges_in_every_form(name: str, flow: str) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    edges, x = edge_features(edge_index), torch.randn(num_nodes, K)
    theirs, ours = pair(name, edge_dim=EDGE_DIM, flow=flow)
    expected = passes(theirs, x, edge_index, edges, extra=(edges,))
    typed = EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes))
    for form in (typed, Graph.from_edge_index(edge_index, num_nodes, torch.rand(edge_index.shape[1]))):
        assert_same(name, passes(ours, x, form, edges, extra=(edges,)), expected)


@ALL
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_layers_return_attention_weights_as_pyg_does(name: str, edge_dim: int | None) -> None:
    for flow in ("source_to_target", "target_to_source"):
        theirs, ours = pair(name, edge_dim=edge_dim, flow=flow)
        edge_index, num_nodes = GRAPHS["self_loops"]
        x, args = torch.randn(num_nodes, K), () if edge_dim is None else (edge_features(edge_index).detach(),)
        for form in (edge_index, Graph.from_edge_index(edge_index, num_nodes)):
            out, (edges, weights) = ours(x, form, *args, return_attention_weights=True)
            expected, (their_edges, their_weights) = theirs(x, edge_index, *args, return_attention_weights=True)
            assert torch.equal(edges, their_edges)
            torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out, ours(x, form, *args), rtol=1e-5, atol=1e-5)
        learned = [t for t in ours.parameters() if t.requires_grad]
        grads = torch.autograd.grad(weights.square().sum(), learned, materialize_grads=True)
        expected_grads = torch.autograd.grad(
            their_weights.square().sum(), list(theirs.parameters()), materialize_grads=True
        )
        for actual, expected in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Converting sparse tensor to CSR")
@ALL
def test_layers_return_attention_weights_of_a_matrix(name: str) -> None:
    edge_index, num_nodes = without_duplicates("self_loops")
    matrix = as_matrix("csr", edge_index, num_nodes, torch.ones(edge_index.shape[1]))
    theirs, ours = pair(name)
    x = torch.randn(num_nodes, K)
    _, (actual, weights) = ours(x, matrix, return_attention_weights=True)
    _, (expected, their_weights) = theirs(x, matrix, return_attention_weights=True)
    assert actual.layout == expected.layout
    torch.testing.assert_close(actual.values(), expected.values())
    torch.testing.assert_close(weights, their_weights)


@LOOPED
def test_returned_weights_are_those_that_dropout_left(name: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    _, ours = pair(name, dropout=0.5, bias=False)
    x = torch.randn(num_nodes, K)
    out, (edges, weights) = ours(x, edge_index, return_attention_weights=True)
    dropped = (weights == 0).float().mean()
    assert 0.3 < dropped < 0.7  # 5 deviations of some 500 draws
    lin = ours.lin if name == "GATConv" else ours.lin_l
    rows = lin(x).view(num_nodes, H, M)[edges[0]] * weights[:, :, None]
    torch.testing.assert_close(out, torch.zeros(num_nodes, H, M).index_add(0, edges[1], rows).flatten(1))


@ALL
@CONFIGS
def test_dropout_is_for_training_alone(name: str, config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, K)
    _, always = pair(name, config=config, dropout=1.0)
    _, never = pair(name, config=config)
    bare = always.bias if name != "TransformerConv" else None
    if bare is not None:
        assert torch.equal(always(x, edge_index), bare.expand(num_nodes, -1))
    always, never = copy.deepcopy(always).eval(), copy.deepcopy(never).eval()
    assert torch.equal(always(x, edge_index), never(x, edge_index))


@ALL
@CONFIGS
def test_features_of_edges_need_an_edge_dim(name: str, config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x, edges = torch.randn(num_nodes, K), edge_features(edge_index)
    _, ours = pair(name, config=config)
    with pytest.raises(ValueError, match=rf"'Q{name}' expects no 'edge_attr' where 'edge_dim' is None"):
        ours(x, edge_index, edges)
    _, ours = pair(name, config=config, edge_dim=EDGE_DIM)
    with pytest.raises(ValueError, match=rf"'Q{name}' expects 'edge_attr' of shape \[E, 3\]"):
        ours(x, edge_index, edges[:, :2])
    with pytest.raises(ValueError, match=r"'edge_attr'"):
        ours(x, edge_index, edges[1:])
    if name == "TransformerConv":
        with pytest.raises(ValueError, match=r"expects 'edge_attr', as 'edge_dim' is 3"):
            ours(x, edge_index)


@ALL
def test_layers_say_what_they_do_not_take(name: str) -> None:
    cls = getattr(qnn, f"Q{name}")
    with pytest.raises(ValueError, match=rf"'Q{name}' rounds each head of a row"):
        cls(K, M, config=QConfig(granularity="tensor"))
    with pytest.raises(ValueError, match=rf"'Q{name}' expects 'aggr' to be one of"):
        cls(K, M, aggr="max")
    _, ours = pair(name)
    edge_index, num_nodes = GRAPHS["random"]
    with pytest.raises(ValueError, match=r"expects node features of shape \[N, F\]"):
        ours(torch.randn(2, num_nodes, K), edge_index)
    pairs = [torch.randn(num_nodes, K)] * 3 if name == "GATConv" else (torch.randn(num_nodes, K), None)
    with pytest.raises(ValueError, match=r"expects node features as a tensor or a pair"):
        ours(pairs, edge_index)


@ALL
def test_another_aggregation_takes_the_path_of_pyg(name: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    with trace() as ran:
        both(name, pair(name, aggr="max"), torch.randn(num_nodes, K), edge_index)
    assert list(ran.ops) == ["messages.forward"]


@ALL
def test_hooks_see_every_message(name: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    ours = copy.deepcopy(pair(name)[1])
    x, seen = torch.randn(num_nodes, K), []
    expected = ours(x, edge_index)
    ours.register_message_forward_hook(lambda module, inputs, out: seen.append(out.shape[0]))
    torch.testing.assert_close(ours(x, edge_index), expected)
    assert seen


@LOOPED
@CONFIGS
def test_large_scores_give_weights_of_sum_one(name: str, config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    ours = copy.deepcopy(pair(name, config=config, bias=False)[1])
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.mul_(1e4 if "att" in key else 1)
    x = torch.randn(num_nodes, K).requires_grad_()
    out, (edges, weights) = ours(x, edge_index, return_attention_weights=True)
    sums = torch.zeros(num_nodes, H).index_add(0, edges[1], weights)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    for result in (out, ours(x, edge_index)):
        (grad,) = torch.autograd.grad(result.sum(), x)
        assert result.isfinite().all()
        assert grad.isfinite().all()


def test_gat_conv_loads_old_checkpoints() -> None:
    theirs, _ = pair("GATConv")
    old = {key.replace("lin.", "lin_src."): value for key, value in theirs.state_dict().items()}
    for state in (old, old | {"lin_dst.weight": old["lin_src.weight"].clone()}):
        before, ours = dict(state), qnn.QGATConv(K, M, heads=H)
        nn.Sequential(ours).load_state_dict({f"0.{key}": value for key, value in state.items()})
        assert torch.equal(ours.lin.weight, theirs.lin.weight)
        assert state.keys() == before.keys()
    with pytest.raises(RuntimeError, match="lin_dst"):
        qnn.QGATConv(K, M, heads=H).load_state_dict(old | {"lin_dst.weight": old["lin_src.weight"] + 1})


@ALL
def test_lazy_sizes_come_from_the_first_input(name: str) -> None:
    edge_index, num_sources, num_targets = RECTANGULAR["wide"]
    conv = getattr(qnn, f"Q{name}")((-1, -1), M, heads=H)
    assert conv((torch.randn(num_sources, K), torch.randn(num_targets, 5)), edge_index).shape == (num_targets, H * M)
    conv = getattr(qnn, f"Q{name}")(-1, M, heads=H, edge_dim=-1)
    edge_index, num_nodes = GRAPHS["random"]
    assert conv(torch.randn(num_nodes, K), edge_index, edge_features(edge_index)).shape == (num_nodes, H * M)


@ALL
def test_layers_take_codes(name: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, K)
    codes = functional.quantize(x, NEAREST)
    _, ours = pair(name, config=NEAREST)
    torch.testing.assert_close(ours(codes, edge_index), ours(codes.dequantize(), edge_index), rtol=0.05, atol=0.05)
    _, exact = pair(name)
    torch.testing.assert_close(exact(codes, edge_index), exact(codes.dequantize(), edge_index))


@ALL
def test_nothing_of_a_size_of_edges_times_features_is_kept(name: str) -> None:
    num_nodes, num_edges, wide = 40, 4000, 256
    edge_index = torch.randint(num_nodes, (2, num_edges))
    conv = getattr(qnn, f"Q{name}")(wide, M, heads=H)
    x = torch.randn(num_nodes, wide, requires_grad=True)
    conv(x, edge_index)
    kept = kept_bytes(lambda: conv(x, edge_index), (*conv.parameters(),))
    graph = 4 * 3 * (num_edges + num_nodes) + 8 * (num_nodes + 1)  # index, index and order of the transposed graph
    # codes of x and of three rows a head; scales, scores and logarithms of each head; what makes the scores of x
    rows = num_nodes * (wide + 3 * H * M + 4 * 8 * H) + 4 * 2 * H * wide
    assert kept <= graph + rows
    assert rows < 4 * num_edges * H  # no number an edge and head
    assert rows < x.nbytes


@ALL
def test_a_graph_is_prepared_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original: Callable[..., Graph] = Graph.from_edge_index
    monkeypatch.setattr(Graph, "from_edge_index", staticmethod(lambda *a: built.append(1) or original(*a)))
    edge_index, num_nodes = GRAPHS["random"]
    edge_index, edges = edge_index.clone(), edge_features(edge_index)
    _, ours = pair(name, edge_dim=EDGE_DIM)
    for _ in range(3):
        passes(ours, torch.randn(num_nodes, K), edge_index, edges, extra=(edges,))
    assert len(built) == (1 if name == "TransformerConv" else 2)  # the second one says what fills in self-loops
    edge_index[0, 0] = 1  # noticed
    both(name, pair(name, edge_dim=EDGE_DIM), torch.randn(num_nodes, K), edge_index, edges)


@ALL
def test_int8_layers_run_in_int8(name: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    _, ours = pair(name, config=QConfig())
    with trace() as ran:
        ours(torch.randn(num_nodes, K).requires_grad_(), edge_index).sum().backward()
    formats = {op: entry["format"] for op, entry in ran.ops.items()}
    assert all("int8" in fmt for op, fmt in formats.items() if op.startswith(("matmul", "attention"))), formats
    assert any(op.startswith("attention") for op in formats)


@ALL
def test_an_epilogue_stands_behind_bias_and_residual(name: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    theirs, ours = pair(name, **({} if name == "TransformerConv" else {"residual": True}))
    ours = copy.deepcopy(ours)
    ours.configure(None, qnn.Epilogue("elu"))
    x = torch.randn(num_nodes, K)
    torch.testing.assert_close(ours(x, edge_index), nn.functional.elu(theirs(x, edge_index)), rtol=1e-5, atol=1e-5)
