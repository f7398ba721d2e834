"""Graph attention as plain functions: PyG's layers give the same, and what they refuse."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from dense import graph_of
from dense_attention import KINDS, operands_of, ours
from graphs import GRAPHS
from op_checks import gradients
from qgnn import Graph, QConfig, functional

H, D, F, K = 3, 5, 6, 2
EDGES, N = GRAPHS["power_law"]


def as_columns(weight: Tensor, x: Tensor) -> Tensor:
    return (x @ weight.t()).view(-1, H, D)


def gat(conv: GATConv, x: Tensor, edge_attr: Tensor) -> Tensor:
    hidden = as_columns(conv.lin.weight, x)
    scores = ((hidden * att).sum(2) for att in (conv.att_src, conv.att_dst))
    edge_weight = (conv.att_edge.view(H, D, 1) * conv.lin_edge.weight.view(H, D, K)).sum(1)
    return functional.attention(EDGES, hidden, *scores, edge_attr=edge_attr, edge_weight=edge_weight)


def gatv2(conv: GATv2Conv, x: Tensor, edge_attr: Tensor) -> Tensor:
    rows = (as_columns(lin.weight, x) for lin in (conv.lin_l, conv.lin_r))
    edges = {"edge_attr": edge_attr, "edge_weight": conv.lin_edge.weight}
    return functional.attention_gatv2(EDGES, *rows, conv.att.view(H, D), **edges)


def transformer(conv: TransformerConv, x: Tensor, edge_attr: Tensor) -> Tensor:
    rows = (as_columns(lin.weight, x) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    return functional.attention_dot(EDGES, *rows, edge_attr=edge_attr, edge_weight=conv.lin_edge.weight)


LAYERS = {
    "gat": (GATConv, {"add_self_loops": False}, gat),
    "gatv2": (GATv2Conv, {"add_self_loops": False}, gatv2),
    "transformer": (TransformerConv, {"root_weight": False}, transformer),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_of_pyg_give_the_same(name: str) -> None:
    """Within what single precision leaves of sums over 100 edges: PyG computes in fp32 as well."""
    layer, options, function = LAYERS[name]
    conv = (
        layer(F, D, heads=H, edge_dim=K, bias=False, share_weights=False, **options)
        if name == "gatv2"
        else layer(F, D, heads=H, edge_dim=K, bias=False, **options)
    )
    inputs, upstream = {"x": torch.randn(N, F), "edge_attr": torch.randn(EDGES.shape[1], K)}, torch.randn(N, H * D)
    results = []
    for run in (lambda x, edge_attr: conv(x, EDGES, edge_attr), lambda **t: function(conv, **t).flatten(1)):
        conv.zero_grad()
        out, grads = gradients(run, inputs, upstream)
        run(**inputs).backward(upstream)
        results.append([out, *grads.values(), *(p.grad for p in conv.parameters() if p.grad is not None)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=float(1e-5 * theirs.abs().max()))


def test_targets_and_sources_may_differ() -> None:
    """As PyG's layer takes them: two sources, four targets."""
    edge_index = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3]])
    conv = GATConv((F, F), D, heads=H, add_self_loops=False, bias=False)
    x = torch.randn(2, F), torch.randn(4, F)
    hidden = as_columns(conv.lin_src.weight, x[0]), as_columns(conv.lin_dst.weight, x[1])
    scores = (hidden[0] * conv.att_src).sum(2), (hidden[1] * conv.att_dst).sum(2)
    expected = conv(x, edge_index, size=(2, 4))
    torch.testing.assert_close(functional.attention(edge_index, hidden[0], *scores).flatten(1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_types_alone(kind: str) -> None:
    graph = graph_of("random")
    operands = operands_of(kind, graph, edges=True)
    expected, expected_grads = gradients(ours(kind, graph), operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads = gradients(ours(kind, graph), operands)
    assert torch.equal(out, expected)
    assert all(torch.equal(grads[name], value) for name, value in expected_grads.items())


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole(kind: str) -> None:
    """... with dropout and rounding, and without compiling anew for another size of graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"dropout": 0.5, "config": QConfig(), "seed": torch.tensor([3])}
    compiled = torch.compile(
        lambda graph, operands: getattr(functional, kind)(graph, **operands, **options),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for name in ("random", "power_law", "hub"):
        graph = graph_of(name)
        operands = {n: t.requires_grad_() for n, t in operands_of(kind, graph, edges=True).items()}
        out, expected = compiled(graph, operands), ours(kind, graph, **options)(**operands)
        assert torch.equal(out, expected)
        grads = (torch.autograd.grad(y.square().sum(), list(operands.values())) for y in (out, expected))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Attends(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, edge_index: Tensor, operands: dict[str, Tensor]) -> Tensor:
        return getattr(functional, self.kind)(edge_index, **operands)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_exports_for_any_number_of_nodes_and_edges(kind: str, strict: bool) -> None:
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)

    def arguments(name: str) -> tuple[Tensor, dict[str, Tensor]]:
        edge_index, num_nodes = GRAPHS[name]
        operands = operands_of(kind, Graph.from_edge_index(edge_index, num_nodes))
        return edge_index, operands

    first = arguments("random")
    shapes = ({1: edges}, {name: {0: nodes} if t.shape[0] == 50 else {} for name, t in first[1].items()})
    exported = torch.export.export(Attends(kind), first, dynamic_shapes=shapes, strict=strict)
    other = arguments("power_law")
    assert torch.equal(exported.module()(*other), Attends(kind)(*other))


GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2], [0, 1, 1, 3]]), (3, 4))
BAD: list[tuple[str, type[Exception], dict[str, Any], str]] = [
    (
        "attention",
        ValueError,
        {"x": torch.randn(3, H * D)},
        "'x' of shape [N, H, D], H and D > 0 (got [3, 15]); one he",
    ),
    ("attention", ValueError, {"x": torch.randn(2, H, D)}, "'score_source' of shape [2, 3] (got [3, 3])"),
    ("attention", ValueError, {"score_target": torch.randn(4, 1)}, "'score_target' of shape [T, 3] (got [4, 1])"),
    ("attention", TypeError, {"x": torch.ones(3, H, D).int()}, "'x' in a floating-point type (got torch.int32)"),
    ("attention", TypeError, {"score_source": None}, "'score_source' to be a tensor (got NoneType)"),
    ("attention", ValueError, {"dropout": 1.5}, "'dropout' to be a probability from 0 to 1 (got 1.5)"),
    ("attention", ValueError, {"edge_attr": None}, "'edge_attr' and 'edge_weight' together (got no 'edge_attr')"),
    (
        "attention",
        ValueError,
        {"edge_attr": torch.randn(3, K)},
        "'edge_attr' of shape [4, K], a row an edge (got [3, 2]",
    ),
    ("attention", ValueError, {"edge_weight": torch.randn(H, 1)}, "'edge_weight' of shape [3, 2] (got [3, 1])"),
    ("attention", TypeError, {"config": 8}, "QConfig"),
    (
        "attention_gatv2",
        ValueError,
        {"x_target": torch.randn(4, H, 1)},
        "'x_target' of shape [N, 3, 5] (got [4, 3, 1])",
    ),
    (
        "attention_gatv2",
        TypeError,
        {"x_target": torch.randn(4, H, D).half()},
        "rows of one type (got torch.float16 for",
    ),
    ("attention_gatv2", ValueError, {"att": torch.randn(D)}, "'att' of shape [3, 5] (got [5])"),
    ("attention_gatv2", ValueError, {"edge_weight": torch.randn(H, K)}, "'edge_weight' of shape [15, 2] (got [3, 2])"),
    ("attention_dot", ValueError, {"key": torch.randn(2, H, D)}, "'key' with 3 rows, as 'value' has (got 2)"),
    ("attention_dot", ValueError, {"query": torch.randn(5, H, D)}, "(expected 3 and 5"),
    ("attention_dot", ValueError, {"query": torch.randn(4, 0, D)}, "'query' of shape [N, H, D], H and D > 0"),
]


@pytest.mark.parametrize(("kind", "error", "change", "message"), BAD)
def test_bad_input_is_refused(kind: str, error: type[Exception], change: dict[str, Any], message: str) -> None:
    operands = operands_of(kind, GRAPH, edges=True, heads=H, width=D)
    with pytest.raises(error, match=re.escape(message)):
        getattr(functional, kind)(GRAPH, **operands | change)


@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_by_row(kind: str, granularity: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{kind}' .*\(got granularity='{granularity}'\); use 'qgnn.QConfig"):
        ours(kind, GRAPH, config=QConfig(granularity=granularity))(**operands_of(kind, GRAPH))


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused(kind: str) -> None:
    operands = {name: t.requires_grad_() for name, t in operands_of(kind, GRAPH).items()}
    out = ours(kind, GRAPH)(**operands)
    (grad,) = torch.autograd.grad(out.square().sum(), next(iter(operands.values())), create_graph=True)
    with pytest.raises(NotImplementedError, match=rf"'qgnn::{kind}' has no second derivatives"):
        grad.sum().backward()
