"""QGCN2Conv: what is GCNII's own, its initial features and the identity mapping."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN2Conv

from graphs import GRAPHS
from layer_cases import assert_same_pass, kept_bytes, passes
from qgnn import QConfig, functional, trace
from qgnn.nn import QGCN2Conv

NEAREST = QConfig(rounding="nearest")
EDGES, N = GRAPHS["random"]
C = 32
SHARED = pytest.mark.parametrize("shared", [True, False])


def pair(config: QConfig | None, **options: Any) -> tuple[GCN2Conv, QGCN2Conv]:
    theirs, ours = GCN2Conv(C, **options), QGCN2Conv(C, **options, config=config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(N, C), torch.randn(N, C, requires_grad=True)


@SHARED
def test_gcn2_conv_gives_initial_features_their_gradient(shared: bool) -> None:
    for options in ({}, {"theta": 0.5, "layer": 3}, {"normalize": False}, {"add_self_loops": False}):
        theirs, ours = pair(None, alpha=0.3, shared_weights=shared, **options)
        x, x_0 = inputs()
        expected = passes(theirs, x, x_0, EDGES, extra=(x_0,))
        assert_same_pass(passes(ours, x, x_0, EDGES, extra=(x_0,)), expected)


def test_gcn2_conv_takes_more_initial_features_than_rows() -> None:
    theirs, ours = pair(None, alpha=0.3)
    x, _ = inputs()
    x_0 = torch.randn(N + 5, C, requires_grad=True)
    expected = passes(theirs, x, x_0, EDGES, extra=(x_0,))
    assert_same_pass(passes(ours, x, x_0, EDGES, extra=(x_0,)), expected)


@SHARED
def test_gcn2_conv_takes_quantized_initial_features(shared: bool) -> None:
    _, ours = pair(NEAREST, alpha=0.3, theta=0.5, layer=1, shared_weights=shared)
    x, x_0 = inputs()
    constant = functional.quantize(x_0, NEAREST)
    with trace() as record:
        out = ours(x, constant, EDGES)
    # x, and in each product its rows and its weight: the second one takes the codes as they are
    assert record.ops["quantize.forward"]["calls"] == (3 if shared else 4)
    torch.testing.assert_close(out, ours(x, constant.dequantize(), EDGES))
    q = functional.quantize(x_0, NEAREST, straight_through=True)
    assert torch.equal(ours(x, q, EDGES), ours(x, x_0, EDGES))  # the rows themselves are still there
    assert torch.autograd.grad(ours(x, q, EDGES).sum(), x_0)[0].any()


def test_gcn2_conv_rounds_the_learned_part_only() -> None:
    """With beta = 0.005, an identity within the weight would take a step of 1/127 of 1: 1.6 times beta."""
    theirs, ours = pair(NEAREST, alpha=0.0, theta=0.5, layer=100)
    x, x_0 = inputs()
    loops = torch.arange(N).expand(2, -1)[:, :0]  # aggregation over self-loops alone: x, but for its rounding
    actual, expected = ours(x, x_0, loops), theirs(x, x_0, loops)
    rounded = functional.quantize(x, NEAREST).dequantize()
    learned = expected - (1 - ours.beta) * x
    error = actual - (1 - ours.beta) * rounded - learned
    # two operands of the product at half a step each, and x's own codes in it: 0.01 of its norm apiece
    assert error.norm() < 0.03 * learned.norm()


def test_gcn2_conv_keeps_codes_only() -> None:
    _, ours = pair(QConfig(), alpha=0.3, theta=0.5, layer=1)
    x, x_0 = inputs()
    x.requires_grad_()
    ours(x, x_0, EDGES)  # makes the graph
    indices = 3 * (EDGES.shape[1] + N) * 4 + 2 * (N + 1) * 4  # of both orders, and weights in one
    codes = N * (C + 4)
    kept = kept_bytes(lambda: ours(x, x_0, EDGES), ignore=tuple(ours.parameters()))
    assert kept <= codes + 2 * indices + 100
    with trace() as record:
        ours(x, x_0, EDGES).sum().backward()
    assert {name: op["format"] for name, op in record.ops.items() if not name.startswith("quantize")} == {
        "spmm.forward": "int8",
        "spmm.backward": "int8",
        "matmul.forward": "int8",
        "matmul.backward_dx": "int8",
        "matmul.backward_dw": "int8",
    }


def test_gcn2_conv_can_be_exported() -> None:
    ours: nn.Module = QGCN2Conv(C, 0.3, config=NEAREST).eval()
    rows, edges = torch.export.Dim("rows", min=2, max=2**30), torch.export.Dim("edges", min=2, max=2**30)
    x, x_0 = (t.detach() for t in inputs())
    program = torch.export.export(ours, (x, x_0, EDGES), dynamic_shapes=({0: rows}, {0: rows}, {1: edges})).module()
    for name in ("random", "hub"):
        edge_index, num_nodes = GRAPHS[name]
        x, x_0 = torch.randn(2, num_nodes, C)
        torch.testing.assert_close(program(x, x_0, edge_index), ours(x, x_0, edge_index), rtol=2e-2, atol=2e-2)
