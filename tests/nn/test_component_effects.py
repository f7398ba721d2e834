"""What formats of single components change in a layer, and what a trace and a summary say of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import GRAPHS
from layer_cases import assert_equal_pass, passes
from layers import LAYERS, K, learned
from qgnn import QConfig, quantize_, summary, trace
from qgnn import nn as qnn
from qgnn.formats import MSFP, MXFP4, Float8, Int

ALL = pytest.mark.parametrize("name", LAYERS)
EDGES, NUM_NODES = GRAPHS["power_law"]
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")


def run(name: str, config: QConfig | None, learns: bool = True) -> dict[str, Tensor]:
    """Output and gradients of a pass of a layer, the same weights and inputs for each config."""
    torch.manual_seed(3)
    ours = LAYERS[name].ours(config)
    x, args = torch.randn(NUM_NODES, K), LAYERS[name].args(EDGES, NUM_NODES)
    torch.manual_seed(4)
    if learns:
        return passes(ours, x, EDGES, *args, extra=learned(args))
    parameters = dict(ours.named_parameters())
    out = ours(x, EDGES, *args)
    grads = torch.autograd.grad(out, list(parameters.values()), out.detach().cos(), materialize_grads=True)
    return {"out": out.detach(), **{f"d{key}": grad for key, grad in zip(parameters, grads, strict=True)}}


def only(component: str) -> QConfig:
    return QConfig.only(rounding="nearest", **{component: Int(3)})


def changed(name: str, config: QConfig, learns: bool = True) -> set[str]:
    """What differs from full precision by more than sums in another order do."""
    exact, actual = run(name, QConfig.only(), learns), run(name, config, learns)
    return {key for key in exact if not torch.allclose(actual[key], exact[key], rtol=1e-3, atol=1e-4)}


@ALL
def test_output_gradients_change_gradients_alone(name: str) -> None:
    assert "out" not in changed(name, only("output_gradient"))


@pytest.mark.parametrize("name", ["gcn", "sage", "graph/weighted", "gat", "gatv2", "transformer", "sg", "rgcn", "cheb"])
@pytest.mark.parametrize("component", ["weights", "activations", "output_gradient", "weight_gradient"])
def test_products_honor_their_components(name: str, component: str) -> None:
    differs = changed(name, only(component))
    weights = {key for key in differs if key.endswith(("weight", "root"))}
    if component == "weight_gradient":
        assert weights
        assert not differs & {"out", "dx"}
    elif component == "output_gradient":
        assert differs & {"dx", *weights}
        assert "out" not in differs
    else:
        assert "out" in differs


@pytest.mark.parametrize("name", ["gcn", "sage", "graph/weighted", "gin", "gcn2", "sg", "appnp", "cheb", "rgcn", "gat"])
@pytest.mark.parametrize("component", ["messages", "aggregation"])
def test_sums_honor_their_components(name: str, component: str) -> None:
    assert "out" in changed(name, only(component))


@ALL
def test_attention_is_a_component_of_attention_layers(name: str) -> None:
    assert ("out" in changed(name, only("attention"))) == (LAYERS[name].name in ATTENTION)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "cheb"])
def test_constants_are_features_and_others_activations(name: str) -> None:
    assert "out" in changed(name, only("features"), learns=False)
    assert "out" not in changed(name, only("features"), learns=True)
    assert "out" not in changed(name, only("activations"), learns=False)


@pytest.mark.parametrize("fmt", [MSFP(3), MXFP4(), Float8(), Int(4, symmetric=False)], ids=str)
def test_evaluation_rounds_to_nearest(fmt: Any) -> None:
    conv = qnn.QGCNConv(K, 8, config=QConfig(fmt=fmt))
    x = torch.randn(NUM_NODES, K)
    assert not torch.equal(conv(x, EDGES), conv(x, EDGES))
    conv.eval()
    assert torch.equal(conv(x, EDGES), conv(x, EDGES))


def test_a_converted_model_says_its_formats() -> None:
    model = nn.ModuleList([qnn.QGCNConv.pyg(K, 8), qnn.QGCNConv.pyg(8, 8)])
    quantize_(model, QConfig(fmt=MSFP(3)), keep_last=False)
    assert str(summary(model)).count("msfp12") == 2
    quantize_(model, QConfig.only(weights=Int(4)), keep_last=False)
    assert "weights=int4" in str(summary(model))


def test_a_trace_says_what_ran_on_integers_and_what_did_not() -> None:
    def formats(fmt: Any) -> dict[str, tuple[str, str]]:
        conv = qnn.QGCNConv(K, 8, config=QConfig(fmt=fmt))
        with trace(error=False) as record:
            conv(torch.randn(NUM_NODES, K, requires_grad=True), EDGES).sum().backward()
        return {key: (op["format"], op["backend"]) for key, op in record.ops.items() if key.startswith("matmul")}

    kernels, emulated = formats(MSFP(3)), formats(MXFP4())
    assert set(kernels) == set(emulated) == {"matmul.forward", "matmul.backward_dx", "matmul.backward_dw"}
    assert {fmt for fmt, _ in kernels.values()} == {"msfp12"}
    assert all(fmt == "mxfp4 in float32" and backend == "torch" for fmt, backend in emulated.values())


def test_a_schedule_of_widths_equals_configs_made_by_hand() -> None:
    conv = qnn.QGCNConv(K, 8, config=QConfig(fmt=MSFP(7), rounding="nearest"))
    other = qnn.QGCNConv(K, 8, config=QConfig(fmt=MSFP(3), rounding="nearest"))
    other.load_state_dict(conv.state_dict())
    conv.config = conv.config.with_bits(4)
    x = torch.randn(NUM_NODES, K)
    assert_equal_pass(passes(conv, x, EDGES), passes(other, x, EDGES))
