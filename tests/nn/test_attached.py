"""What somebody attaches to a layer, or runs it under: honored as by PyG's layer, or refused by name."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch_geometric import nn as pyg

from graphs import GRAPHS
from layer_cases import assert_same_pass, passes
from layers import LAYERS
from qgnn import QConfig, functional, trace
from qgnn import nn as qnn
from qgnn.nn._layer import PRODUCTS

K, M = 8, 6
EDGES, N = GRAPHS["random"]


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def pair(name: str, config: QConfig | None = None, **options: Any) -> tuple[Any, Any]:
    theirs = getattr(pyg, name)(K, M, **options)
    ours = getattr(qnn, f"Q{name}")(K, M, **options, config=config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_a_message_of_one_instance_is_called() -> None:
    theirs, ours = pair("SAGEConv", QConfig())
    for conv in (theirs, ours):
        conv.message = MethodType(lambda self, x_j: 2 * x_j, conv)
    x = torch.randn(N, K)
    assert_same_pass(passes(ours, x, EDGES), passes(theirs, x, EDGES))


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv"])
@pytest.mark.parametrize("spectral", [False, True])
def test_a_parametrized_weight_stays_in_the_kernels(name: str, spectral: bool) -> None:
    theirs, ours = pair(name)
    for conv in (theirs, ours):
        lin = conv.lin if hasattr(conv, "lin") and conv.lin is not None else conv.lin_l
        torch.manual_seed(1)
        if spectral:  # changes with each read
            parametrizations.spectral_norm(lin)
        else:
            parametrize.register_parametrization(lin, "weight", Halved())
    x = torch.randn(N, K)
    with trace() as record:
        assert_same_pass(passes(ours, x, EDGES), passes(theirs, x, EDGES), differences=("att_src", "att_dst", "att"))
        assert_same_pass(passes(ours, x, EDGES), passes(theirs, x, EDGES), differences=("att_src", "att_dst", "att"))
    assert "messages.forward" not in record.ops
    lin.register_forward_hook(lambda *_: None)
    with trace() as record:
        ours(x, EDGES)
    assert "messages.forward" in record.ops


@pytest.mark.parametrize("layer", [qnn.QLinear(K, M), qnn.QGATConv(K, M)], ids=["QLinear", "QGATConv"])
def test_script_names_what_to_use(layer: nn.Module) -> None:
    name = type(layer).__name__
    for module in (layer, nn.Sequential(layer)):
        with pytest.raises(TypeError, match=rf"'{name}' cannot be compiled by 'torch.jit.script'; use 'torch.compile'"):
            torch.jit.script(module)


def test_transforms_of_functions_name_what_to_use() -> None:
    layer, x = qnn.QLinear(K, M), torch.randn(3, N, K)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x[0],)).sum()

    with pytest.raises(NotImplementedError, match=r"'torch.func' does not transform .* use 'torch.autograd.grad'"):
        torch.func.grad(loss)(parameters)
    with pytest.raises(NotImplementedError, match=r"'torch.func' does not transform"):
        torch.func.vmap(layer)(x)
    layer.configure(None)
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for actual, grad in zip(torch.func.grad(loss)(parameters).values(), expected, strict=True):
        torch.testing.assert_close(actual, grad)


@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
def test_transforms_of_sums_over_neighbors_name_what_to_use(config: QConfig | None) -> None:
    layer, x = qnn.QSAGEConv(K, M, config=config), torch.randn(N, K)
    with pytest.raises(NotImplementedError, match=r"'torch.func' does not transform .* or PyG's layers"):
        torch.func.grad(lambda x: layer(x, EDGES).sum())(x)


@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
@pytest.mark.parametrize("aggr", ["max", "min"])
def test_the_gradient_of_equal_terms_goes_to_the_first(aggr: str, config: QConfig | None) -> None:
    edge_index = torch.tensor([[0, 1, 2], [3, 3, 3]])
    x = torch.ones(4, K, requires_grad=True)
    (grad,) = torch.autograd.grad(functional.spmm(edge_index, x, reduce=aggr, config=config)[3].sum(), x)
    expected = torch.zeros(4, K)
    expected[0] = 1
    assert torch.equal(grad, expected)
    theirs, ours = pyg.GINConv(nn.Identity(), aggr=aggr), qnn.QGINConv(nn.Identity(), aggr=aggr, config=config)
    for conv, share in ((theirs, torch.full((3, K), 1 / 3)), (ours, expected[:3])):
        (grad,) = torch.autograd.grad(conv(x, edge_index)[3].sum(), x)
        torch.testing.assert_close(grad[:3], share)


@pytest.mark.parametrize("name", ["GATConv", "GCNConv", "SAGEConv"])
def test_modules_that_no_product_reads_change_no_path(name: str) -> None:
    """A norm that somebody keeps with the layer."""
    layer = getattr(qnn, f"Q{name}")(K, M)
    layer.norm = nn.LayerNorm(M)
    with trace() as record:
        layer(torch.randn(N, K), EDGES)
    assert "matmul.forward" in record.ops
    assert "messages.forward" not in record.ops
    assert layer.operands == "int8"
    assert layer.note is None


@pytest.mark.parametrize("name", LAYERS)
def test_all_dense_layers_of_pygs_classes_are_known(name: str) -> None:
    """By their names: hooks on one of another name would go unheard."""
    parts = LAYERS[name].ours(None).named_modules()
    assert {place.split(".")[0] for place, part in parts if isinstance(part, pyg.Linear)} <= {*PRODUCTS, "nn", ""}
