"""Torch's default type is that of new parameters and of nothing else: results are bit for bit those under fp32."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

import qgnn
from graphs import GRAPHS
from layer_cases import passes
from layers import LAYERS, K, learned
from op_arguments import OPERATORS, arguments_of
from qgnn import QConfig, functional
from qgnn.cli.info import probe
from qgnn.data.graph_sets import OneHotAtoms, OneHotDegree
from qgnn.functional.blocks import _edges_on
from qgnn.ops import _backends

TYPES = pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def assert_same(run: Callable[..., Any], default: torch.dtype, *given: Any) -> None:
    """A function of copies, which no cache knows, gives the same tensors under both default types."""
    results = []
    for dtype in (torch.float32, default):
        torch.manual_seed(3)
        copies = copy.deepcopy(given)
        with default_type(dtype):
            results.append(tensors(run(*copies)))
    for actual, expected in zip(*reversed(results), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
        assert torch.equal(actual.isnan(), expected.isnan())


@TYPES
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_operators(
    name: str, kernels: bool, default: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(_backends, "c_backend", lambda: None)
    operator, on = getattr(torch.ops.qgnn, name), device if kernels else "cpu"
    given = {k: t.to(on) if isinstance(t, Tensor) else t for k, t in arguments_of(name).items()}
    assert_same(lambda given: operator(**given), default, given)


def all_passes(layer: nn.Module, *given: Any) -> list[Tensor]:
    return list(passes(layer, *given, extra=learned(given)).values())


@TYPES
@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, config: QConfig | None, default: torch.dtype) -> None:
    for graph in ("isolated", "empty"):
        edge_index, num_nodes = GRAPHS[graph]
        args = LAYERS[name].args(edge_index, num_nodes)
        assert_same(all_passes, default, LAYERS[name].ours(config), torch.randn(num_nodes, K), edge_index, *args)


@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_made_under_float64(name: str, config: QConfig | None) -> None:
    """Their parameters are of that type, as PyG's are, and they do what converted layers do."""
    converted = LAYERS[name].ours(config).double()
    with default_type(torch.float64):
        layer = LAYERS[name].ours(config)
    assert {t.dtype for t in layer.state_dict().values()} <= {torch.float64}
    layer.load_state_dict(converted.state_dict())
    edge_index, num_nodes = GRAPHS["isolated"]
    x, results = torch.randn(num_nodes, K, dtype=torch.float64), []
    args = [
        t.detach().double().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in LAYERS[name].args(edge_index, num_nodes)
    ]
    for module, default in ((converted, torch.float32), (layer, torch.float64)):
        torch.manual_seed(3)
        given = copy.deepcopy((x, edge_index, *args))
        with default_type(default):
            results.append(all_passes(module, *given))
    for actual, expected in zip(*results, strict=True):
        assert actual.isfinite().all()
        assert torch.equal(actual, expected)


@TYPES
@pytest.mark.parametrize("options", [{}, {"bins": "optimal"}, {"projection": 4}], ids=str)
def test_compression(options: dict[str, Any], default: torch.dtype) -> None:
    def restored(x: Tensor) -> Tensor:
        _edges_on.cache_clear()
        return functional.decompress(functional.compress(x, seed=1, **options))

    assert_same(restored, default, torch.randn(40, 64))
    assert qgnn.bins.optimal_bins(2, 64).dtype == torch.float32


@TYPES
def test_compressed_activations(default: torch.dtype) -> None:
    """Codes of two values too: which side of a kink an element is on."""
    kinks = (F.relu_, F.leaky_relu_, F.relu6, F.dropout, lambda x: F.hardtanh(x / 9 + 256.5, 256.0, 257.0))

    def gradients(x: Tensor, weight: Tensor) -> list[Tensor]:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        with qgnn.compress_activations(bits=2, min_size=1, seed=1):
            total = sum(kink(x @ weight).square().sum() for kink in kinks)
        return list(torch.autograd.grad(total, (x, weight)))

    assert_same(gradients, default, torch.randn(40, 32), torch.randn(32, 32))


@TYPES
def test_data(default: torch.dtype) -> None:
    def features() -> list[Tensor]:
        graph = qgnn.data.synthetic("cora", scale=0.05)
        ring = torch.stack([torch.arange(6), torch.arange(6).roll(1)])
        degrees = OneHotDegree(3)(Data(edge_index=ring, num_nodes=6))
        atoms = OneHotAtoms()(Data(x=torch.zeros(4, 9, dtype=torch.long), edge_index=ring[:, :0], y=torch.ones(1, 1)))
        return [graph.x, graph.edge_index, graph.y, degrees.x, atoms.x]

    assert_same(features, default)
    with default_type(default):
        assert qgnn.data.wordnet().x.dtype == torch.float32


@TYPES
def test_probe(default: torch.dtype, device: str) -> None:
    """What serves an op is told of fp32."""
    expected = probe(device)
    with default_type(default):
        assert probe(device) == expected
