"""Every layer with formats by component: honoured one by one, and exact where none is named."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import GRAPHS
from layer_cases import assert_same_pass, passes, relative_error
from layers import LAYERS, K, exact_pair, learned
from op_checks import traces_formats
from qgnn import QConfig
from qgnn.formats import MSFP, Int
from qgnn.nn import QGCNConv, QLinear, QSAGEConv

ALL = pytest.mark.parametrize("name", LAYERS)
EXACT = QConfig.only(rounding="nearest")
COARSE = MSFP(2)
ATTENTION = ("gat", "gatv2", "transformer")


def inputs(name: str, graph: str = "random") -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    edge_index, num_nodes = GRAPHS[graph]
    torch.manual_seed(4)
    return torch.randn(num_nodes, K), edge_index, LAYERS[name].args(edge_index, num_nodes)


def run(layer: nn.Module, name: str, graph: str = "random") -> dict[str, Tensor]:
    x, edge_index, args = inputs(name, graph)
    return passes(layer, x, edge_index, *args, extra=learned(args))


def configured(name: str, config: QConfig) -> nn.Module:
    """The layer of :func:`exact_pair` with another config: no new class is rendered and compiled."""
    layer = copy.deepcopy(exact_pair(name)[1])
    layer.configure(config)
    return layer


@ALL
def test_layer_without_formats_is_exact(name: str) -> None:
    """The same sums, in another order where the bias is added elsewhere."""
    assert_same_pass(run(configured(name, EXACT), name), run(exact_pair(name)[1], name), 1e-5, LAYERS[name].cancelling)


@ALL
def test_layer_trains_with_blocks(name: str) -> None:
    """MSFP16's step is 2^-7 of a power of two that is up to twice a block's largest value: to nearest, at least 7 bits
    against it, 40 dB for normal values. A layer rounds up to four operands one after the other, 6 dB, and a choice that
    falls on the other side costs a gradient more, as in int8."""
    layer, exact = configured(name, QConfig(fmt=MSFP(7), rounding="nearest")), exact_pair(name)[1]
    actual, expected = run(layer, name), run(exact, name)
    assert relative_error(actual["out"], expected["out"]) < 10 ** (-34 / 20)
    skipped = {*LAYERS[name].switched, *(f"d{key}" for key in LAYERS[name].cancelling)}
    for key, value in expected.items():
        assert actual[key].isfinite().all()
        if float(value.norm()) == 0:  # what the layer does not use
            assert float(actual[key].norm()) == 0
        elif key not in skipped and not key.startswith("dextra") and value.numel() > 1 and not LAYERS[name].kinked:
            assert relative_error(actual[key], value) < 10 ** (-28 / 20), key


COMPONENTS = ("activations", "weights", "messages", "aggregation", "output_gradient", "weight_gradient", "attention")
NOT_IN = {  # no dense product of their own, or none that reads rows before they are summed
    "weights": ("gin", "appnp"),
    "activations": ("gin", "appnp"),
    "weight_gradient": ("gin", "appnp"),
}


def has(name: str, component: str) -> bool:
    kind = name.split("/")[0]
    if name == "rgcn/max" and component in ("messages", "aggregation"):
        return False  # its maxima run in full precision, as its note says
    if component == "attention":
        return kind in ATTENTION
    return not any(kind == other for other in NOT_IN.get(component, ()))


@pytest.mark.parametrize("component", COMPONENTS)
@ALL
def test_layer_honours_each_of_its_components(name: str, component: str) -> None:
    layer = configured(name, QConfig.only(**{component: COARSE}, rounding="nearest"))
    actual, expected = run(layer, name), run(configured(name, EXACT), name)
    changed = {key for key, value in expected.items() if not torch.equal(actual[key], value)}
    if not has(name, component):
        assert not changed
    elif component in ("output_gradient", "weight_gradient"):
        assert changed
        assert "out" not in changed
    else:
        assert "out" in changed


@ALL
def test_evaluation_is_deterministic_and_copies_are_equal(name: str) -> None:
    config = QConfig(fmt=MSFP(3), components={"weights": Int(4), "attention": Int(8)})
    layer = configured(name, config)
    x, edge_index, args = inputs(name)
    run(layer, name)
    layer.eval()
    twin = copy.deepcopy(layer)
    assert twin.config == config
    assert twin.operands == config.name
    with torch.no_grad():
        out = layer(x, edge_index, *args)
        assert torch.equal(out, layer(x, edge_index, *args))
        assert torch.equal(out, twin(x, edge_index, *args))


PRODUCTS = [
    lambda config: (QLinear(K, K, config=config), ()),
    lambda config: (QGCNConv(K, K, config=config), (GRAPHS["random"][0],)),
    lambda config: (QSAGEConv(K, K, config=config), (GRAPHS["random"][0],)),
]


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by torch's own compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=traces_formats)])
@pytest.mark.parametrize("make", PRODUCTS, ids=["linear", "gcn", "sage"])
def test_evaluation_has_the_formats_of_training(make: Any, compiled: bool) -> None:
    """Of hidden rows, which need no gradient without one: the first layer's are features, the second's activations."""
    exact_features = QConfig.only(activations=COARSE, rounding="nearest")
    torch.compiler.reset()
    (first, args), (second, _) = make(exact_features), make(exact_features)
    x = torch.randn(GRAPHS["random"][1], K)

    def model() -> Tensor:
        return second(first(x, *args), *args)

    if compiled:
        model = torch.compile(model, fullgraph=True, backend="aot_eager")

    with torch.no_grad():
        before = model()  # constants are features until a training step tells otherwise
        second.config = EXACT
        assert torch.equal(before, model())
        second.config = exact_features
    trained = model()
    assert (first.takes_activations, second.takes_activations) == (False, True)
    for layer in (first, second):
        layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(), trained.detach())
        assert relative_error(model(), before) > 0.01
        twin = copy.deepcopy(second)
        torch.testing.assert_close(twin(first(x, *args), *args), trained.detach())
        (loaded, _), file = make(exact_features), io.BytesIO()
        torch.save(second.state_dict(), file)
        file.seek(0)
        loaded.eval().load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(loaded(first(x, *args), *args), trained.detach())
        loaded.load_state_dict(first.state_dict())
        assert not loaded.takes_activations
    torch.compiler.reset()


def test_layers_that_do_not_tell_them_remember_nothing() -> None:
    layer = QLinear(K, K)
    layer(torch.randn(3, K, requires_grad=True))
    assert "takes_activations" not in vars(layer)
