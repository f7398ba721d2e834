"""What holds for every layer: without quantization it is PyG's, with it the error is that of int8."""

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, passes
from layers import LAYERS, K, exact_pair, learned, no_args
from qgnn import Graph, QConfig, functional
from qgnn.weak_cache import _entries

NEAREST = QConfig(rounding="nearest")
ALL = pytest.mark.parametrize("name", LAYERS)
TAKE_SETS = (
    "gcn",
    "gcn/weighted",
    "sg",
    "appnp",
    "graph/weighted",
    "graph/wide",
    "cheb",
    "sage",
    "sage/max",
    "gin",
    "gine",
)


def detached(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t.detach() if isinstance(t, Tensor) else t for t in args)


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    if torch.equal(actual, expected):  # also what neither of them uses
        return float("inf")
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@ALL
def test_layer_equals_pyg_without_quantization(name: str) -> None:
    theirs, ours = exact_pair(name)
    for graph, (edge_index, num_nodes) in GRAPHS.items():
        x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
        if graph in LAYERS[name].fails_on:
            assert all(t.isfinite().all() for t in passes(ours, x, edge_index, *args, extra=learned(args)).values())
            continue
        expected = passes(theirs, x, edge_index, *args, extra=learned(args))
        actual = passes(ours, x, edge_index, *args, extra=learned(args))
        assert_same_pass(actual, expected, differences=LAYERS[name].cancelling)


@contextmanager
def rows_of(ours: nn.Module, theirs: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """PyG's dense layers ``names`` give the rows that ours come to when they are rounded to nearest, by heads, to be
    gathered; their gradients are their own."""

    def hook(linear: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        codes = functional.quantize(args[0], NEAREST)
        rows = functional.linear(codes, linear.weight, linear.bias, config=NEAREST)
        rounded = functional.quantize(rows.view(-1, ours.heads, ours.out_channels), NEAREST).dequantize()
        return out + (rounded.view(out.shape) - out).detach()

    handles = [linear.register_forward_hook(hook) for linear in {getattr(theirs, name) for name in names}]
    yield
    for handle in handles:
        handle.remove()


@ALL
def test_layer_in_int8_has_the_error_of_int8(name: str) -> None:
    """A row of N(0, 1) has its absmax at 3 deviations; stochastic steps of absmax / 127 make 39 dB a product, and each
    further operand that is rounded takes 3 dB at most.

    Values with noise of 37 dB, 1.4 %, fall on the other side of 0 (of a second largest term) in 1.4 % / pi = 0.45 % of
    all cases, and then move a gradient that half of them have (or take one from here to there): 0.9 % of the power is
    20 dB. Twice that is allowed.

    Differences of such gradients, which GATv2's of the targets' rows are, keep less: there the gradient is held to
    that of PyG's layer with all its rows on the same side of 0.
    """
    torch.manual_seed(2)
    layer = LAYERS[name]
    theirs, ours = layer.pair(QConfig(), 64, 32)
    edge_index, num_nodes = GRAPHS["random"]
    x, args = torch.randn(num_nodes, 64), layer.args(edge_index, num_nodes)
    expected = passes(theirs, x, edge_index, *args, extra=learned(args))
    actual = passes(ours, x, edge_index, *args, extra=learned(args))
    assert sqnr(actual["out"], expected["out"]) >= 34
    if layer.kinked:
        ours.configure(NEAREST)
        actual = passes(ours, x, edge_index, *args, extra=learned(args))
        with rows_of(ours, theirs, layer.kinked):
            expected = passes(theirs, x, edge_index, *args, extra=learned(args))
    largest = max(value.abs().max() for value in expected.values())
    for key in (f"d{parameter}" for parameter in layer.vanishing if f"d{parameter}" in expected):
        assert actual.pop(key).abs().max() <= 1e-5 * largest  # fp32 sums of terms that cancel
        del expected[key]
    ratios = {key: sqnr(actual[key], value) for key, value in expected.items() if value.numel() > 1 and key != "out"}
    assert all(ratios.pop(key) >= 17 for key in layer.switched)
    assert all(ratio >= 30 for ratio in ratios.values()), ratios


@ALL
def test_layer_shares_a_state_dict_with_pyg(name: str) -> None:
    theirs, ours = LAYERS[name].theirs(), LAYERS[name].ours(QConfig())
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    torch.manual_seed(3)
    theirs.reset_parameters()
    torch.manual_seed(3)
    ours.reset_parameters()
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in theirs.state_dict().items())


@ALL
def test_layer_takes_the_arguments_of_pyg(name: str) -> None:
    theirs, ours = exact_pair(name)
    assert isinstance(ours, type(theirs))
    assert repr(ours).startswith(f"Q{repr(theirs)[:-1]}")
    assert repr(ours).endswith(", config=None)")
    expected = inspect.signature(type(theirs).__init__).parameters
    actual = inspect.signature(type(ours).__init__).parameters
    assert {key: p.default for key, p in expected.items()}.items() <= {
        key: p.default for key, p in actual.items()
    }.items()
    assert set(actual) - set(expected) == {"config", "epilogue"}
    assert list(inspect.signature(type(ours).forward).parameters) == list(
        inspect.signature(type(theirs).forward).parameters
    )


@ALL
def test_layer_survives_copy_and_pickle_after_a_pass(name: str) -> None:
    ours = LAYERS[name].ours(NEAREST)
    edge_index, num_nodes = GRAPHS["power_law"]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    expected = passes(ours, x, edge_index, *args, extra=learned(args))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_equal_pass(passes(twin, x, edge_index, *args, extra=learned(args)), expected)


@ALL
def test_layer_changes_none_of_its_inputs(name: str) -> None:
    ours: nn.Module = LAYERS[name].ours(QConfig())
    edge_index, num_nodes = GRAPHS["self_loops"]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    tensors = [x, edge_index, *(t for t in args if isinstance(t, Tensor)), *ours.parameters()]
    before = [t.detach().clone() for t in tensors]
    passes(ours, x, edge_index, *args, extra=learned(args))
    assert all(torch.equal(t, copied) for t, copied in zip(tensors, before, strict=True))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if layer.args is not no_args])
def test_values_of_edges_stay_in_the_order_of_a_graph_s_edges(name: str, flow: str) -> None:
    _, ours = exact_pair(name)
    edge_index, num_nodes = GRAPHS["self_loops"]
    x, args = torch.randn(num_nodes, K), LAYERS[name].args(edge_index, num_nodes)
    graph, given = Graph.from_edge_index(edge_index, num_nodes), ours.flow
    try:
        ours.flow = flow
        expected = passes(ours, x, edge_index, *args, extra=learned(args))
        actual = passes(ours, x, graph, *args, extra=learned(args))
        assert_same_pass(actual, expected, differences=LAYERS[name].cancelling)
        constant = detached(args)
        assert torch.equal(ours(x, graph, *constant), actual["out"])
    finally:
        ours.flow = given


@ALL
def test_layer_keeps_no_batch_alive(name: str) -> None:
    """Whatever the layer remembers of a graph goes with the graph, and what it remembers of edges with them, though
    features and the values of edges live on."""
    ours = LAYERS[name].ours(NEAREST)
    edge_index, num_nodes = GRAPHS["self_loops"]
    x, args = torch.randn(num_nodes, K), detached(LAYERS[name].args(edge_index, num_nodes))
    counts, graphs = [], []
    for _ in range(3):
        graph, edges = Graph.from_edge_index(edge_index, num_nodes), edge_index.clone()
        graphs.append(weakref.ref(graph.csr.index))
        for form in (graph, edges):
            passes(ours, x, form, *args)
        del graph, edges, form
        gc.collect()
        counts.append(len(_entries))
    assert [graph() for graph in graphs] == [None] * 3
    assert counts[1] == counts[2]


@pytest.mark.parametrize("config", [NEAREST, None], ids=["int8", "fp32"])
@pytest.mark.parametrize("name", TAKE_SETS)
def test_sets_of_rows_are_rounded_on_their_own(name: str, config: QConfig | None) -> None:
    """Sets of very different magnitude give what each gives alone, bit for bit, as constants and as hidden rows."""
    ours = LAYERS[name].ours(config).eval()
    edge_index, num_nodes = GRAPHS["power_law"]
    args = detached(LAYERS[name].args(edge_index, num_nodes))
    x = torch.randn(3, num_nodes, K) * torch.tensor([1.0, 1e4, 1e-4]).view(-1, 1, 1)
    for rows in (x, x.clone().requires_grad_()):
        for out, alone in zip(ours(rows, edge_index, *args), rows.unbind(), strict=True):
            expected = ours(alone, edge_index, *args)
            if config is None:  # a product's library sums rows of another number in another order
                torch.testing.assert_close(out, expected)
            else:
                assert torch.equal(out, expected)
    assert ours(x[:0], edge_index, *args).shape == (0, *ours(x[0], edge_index, *args).shape)
    codes = functional.quantize(x, NEAREST)
    for out, alone in zip(ours(codes, edge_index, *args), codes.unbind(), strict=True):
        torch.testing.assert_close(out, ours(alone, edge_index, *args))
