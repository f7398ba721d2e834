"""Layers under torch.compile and torch.export: whole graphs, sizes that change, the results of eager code."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, passes
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import QGCNConv, QLinear, QSAGEConv

K, M = 20, 8
CONFIGS = {"fp32": None, "int8": QConfig()}
SIZES = ("random", "power_law", "self_loops")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(module: nn.Module) -> tuple[nn.Module, CompileCounterWithBackend]:
    """``module`` in one graph through the whole of autograd's tracing, and the count of its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(module, fullgraph=True, dynamic=True, backend=counter), counter


class Named(nn.Module):
    """Parameters under their plain names, whatever a compiled module calls them."""

    def __init__(self, run: Callable[..., Tensor], module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "run", run)
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        return self.run(*args)


def both(module: nn.Module, run: nn.Module, x: Tensor, *args: Any, extra: tuple[Tensor, ...] = ()) -> None:
    """Compiled and eager agree bit for bit when they start from one seed."""
    torch.manual_seed(9)
    actual = passes(Named(run, module), x, *args, extra=extra)
    torch.manual_seed(9)
    assert_equal_pass(actual, passes(Named(module, module), x, *args, extra=extra))


@pytest.mark.parametrize("config", CONFIGS)
def test_linear_compiles_once_for_all_sizes(config: str) -> None:
    layer = QLinear(K, M, config=CONFIGS[config])
    run, counter = compiled(layer)
    for num_rows in (30, 7, 111):
        both(layer, run, torch.randn(num_rows, K))
    assert counter.frame_count == 1


def test_linear_compiles_with_leading_dimensions() -> None:
    layer = QLinear(K, M)
    run, _ = compiled(layer)
    for shape in ((3, 5, K), (2, 7, K)):
        both(layer, run, torch.randn(shape))


@pytest.mark.parametrize("config", CONFIGS)
def test_gcn_conv_compiles_once_for_all_graphs(config: str) -> None:
    conv = QGCNConv(K, M, config=CONFIGS[config])
    run, counter = compiled(conv)
    for name in SIZES:
        edge_index, num_nodes = GRAPHS[name]
        x = torch.randn(num_nodes, K)
        torch.manual_seed(9)
        actual = passes(Named(run, conv), x, edge_index)
        torch.manual_seed(9)
        expected = passes(Named(conv, conv), x, edge_index)
        # Self-loops that moved stay in a compiled graph with weight 0, so degrees are summed in another order.
        assert_same_pass(actual, expected, rel=1e-5 if config == "fp32" else 2e-2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("config", CONFIGS)
def test_gcn_conv_compiles_with_learnable_edge_weights(config: str) -> None:
    conv = QGCNConv(K, M, config=CONFIGS[config])
    run, counter = compiled(conv)
    for name in ("random", "power_law"):
        edge_index, num_nodes = GRAPHS[name]
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        weight = (torch.rand(edge_index.shape[1]) + 0.1).requires_grad_()
        both(conv, run, torch.randn(num_nodes, K), edge_index, weight, extra=(weight,))
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [{"normalize": False}, {"aggr": "mean"}], ids=str)
def test_gcn_conv_compiles_with_its_options(options: dict[str, Any]) -> None:
    conv = QGCNConv(K, M, **options)
    run, _ = compiled(conv)
    edge_index, num_nodes = GRAPHS["path"]  # no self-loops: equal to the last bit
    both(conv, run, torch.randn(num_nodes, K), edge_index, torch.rand(edge_index.shape[1]) + 0.1)


@pytest.mark.parametrize("config", CONFIGS)
def test_gcn_conv_compiles_with_a_graph(config: str) -> None:
    conv = QGCNConv(K, M, config=CONFIGS[config])
    run, counter = compiled(conv)
    for name in ("random", "power_law"):
        edge_index, num_nodes = GRAPHS[name]
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        both(conv, run, torch.randn(num_nodes, K), Graph.from_edge_index(edge_index, num_nodes))
    assert counter.frame_count == 1


@pytest.mark.parametrize("config", CONFIGS)
def test_a_bipartite_layer_compiles_once_for_all_sizes(config: str) -> None:
    conv = QSAGEConv((K, K), M, config=CONFIGS[config]).eval()
    run, counter = compiled(conv)
    for num_sources, num_targets in ((10, 7), (13, 9), (20, 20)):
        edge_index = torch.stack([torch.randint(n, (40,)) for n in (num_sources, num_targets)])
        rows = torch.randn(num_sources, K), torch.randn(num_targets, K)
        torch.testing.assert_close(run(rows, edge_index), conv(rows, edge_index), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_a_compiled_model_trains_like_the_eager_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = QGCNConv(K, 16), QLinear(16, M)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.out(self.conv(x, edge_index).relu())

    edge_index, num_nodes = GRAPHS["path"]
    x, target = torch.randn(num_nodes, K), torch.randint(M, (num_nodes,))
    losses = []
    for compile_it in (True, False):
        torch.manual_seed(3)
        model = Model()
        run = compiled(model)[0] if compile_it else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        history = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x, edge_index), target)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_a_compiled_eval_layer_rounds_to_nearest() -> None:
    layer = QLinear(K, M).eval()
    run, _ = compiled(layer)
    x = torch.randn(30, K)
    with torch.no_grad():
        assert torch.equal(run(x), run(x))
        assert torch.equal(run(x), layer(x))


def test_a_compiled_layer_runs_in_int8() -> None:
    conv = QGCNConv(K, M)
    run, _ = compiled(conv)
    edge_index, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, K, requires_grad=True)
    run(x, edge_index).sum().backward()
    with trace() as record:
        run(x, edge_index).sum().backward()
    for name in ("matmul.forward", "spmm.forward", "spmm.backward", "matmul.backward_dx", "matmul.backward_dw"):
        assert record.ops[name]["format"] == "int8", name


def test_compiled_edges_outside_the_nodes_raise() -> None:
    run, _ = compiled(QGCNConv(K, M))
    run(torch.randn(5, K), torch.tensor([[0, 4], [1, 2]]))
    with pytest.raises(RuntimeError, match="'edge_index' points outside the nodes"):
        run(torch.randn(5, K), torch.tensor([[0, 5], [1, 2]]))


@pytest.mark.parametrize("config", CONFIGS)
def test_linear_can_be_exported(config: str) -> None:
    layer = QLinear(K, M, config=CONFIGS[config]).eval()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(layer, (torch.randn(30, K),), dynamic_shapes=({0: rows},))
    for num_rows in (2, 30, 77):
        x = torch.randn(num_rows, K)
        assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize("config", CONFIGS)
def test_gcn_conv_can_be_exported(config: str) -> None:
    conv = QGCNConv(K, M, config=CONFIGS[config]).eval()
    edge_index, num_nodes = GRAPHS["path"]
    # an exported layer keeps the int32 indices that these sizes fit
    rows, edges = torch.export.Dim("rows", min=2, max=2**30), torch.export.Dim("edges", min=2, max=2**30)
    program = torch.export.export(conv, (torch.randn(num_nodes, K), edge_index), dynamic_shapes=({0: rows}, {1: edges}))
    for name in ("path", "isolated", "hub"):
        edge_index, num_nodes = GRAPHS[name]
        x = torch.randn(num_nodes, K)
        torch.testing.assert_close(program.module()(x, edge_index), conv(x, edge_index))


def test_functions_compile() -> None:
    edge_index, num_nodes = GRAPHS["path"]
    graph = Graph.from_edge_index(edge_index, num_nodes)
    config = QConfig()

    def spmm(x: Tensor) -> Tensor:
        return functional.spmm(graph, x, reduce="mean", config=config)

    def quantize(x: Tensor) -> Tensor:
        return functional.quantize(x, config).dequantize()

    for function, num_columns in itertools.product((spmm, quantize), (K, 5)):
        run = torch.compile(function, fullgraph=True, backend="aot_eager")
        x = torch.randn(num_nodes, num_columns)
        torch.manual_seed(2)
        actual = run(x)
        torch.manual_seed(2)
        assert torch.equal(actual, function(x))
