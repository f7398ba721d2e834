"""An epilogue is the activation and dropout behind a layer, whichever kernel of it applies them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import GRAPHS
from layer_cases import assert_same_pass, passes
from layers import LAYERS, K, M, learned
from qgnn import QConfig
from qgnn.nn import Epilogue, QLinear

ALL = pytest.mark.parametrize("name", LAYERS)
CONFIGS = pytest.mark.parametrize("config", [None, QConfig(rounding="nearest")], ids=["fp32", "int8"])
EDGES, N = GRAPHS["random"]
EPILOGUES: list[tuple[Epilogue, Callable[[Tensor], Tensor]]] = [
    (Epilogue("relu", dropout=0.5), torch.relu),
    (Epilogue("leaky_relu", negative_slope=0.2), partial(nn.functional.leaky_relu, negative_slope=0.2)),
    (Epilogue("elu", alpha=0.7), partial(nn.functional.elu, alpha=0.7)),
    (Epilogue(dropout=0.5), lambda x: x),
]


class Behind(nn.Module):
    """A layer with a function behind it, and the layer's own names of parameters."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = [layer], function
        self.named_parameters = layer.named_parameters  # type: ignore[method-assign]

    def forward(self, *args: Any) -> Tensor:
        out = self.function(self.layer[0](*args))
        assert isinstance(out, Tensor)
        return out


def with_epilogue(name: str, config: QConfig | None, epilogue: Epilogue) -> tuple[nn.Module, nn.Module]:
    """A layer without and with the epilogue, and equal parameters."""
    torch.manual_seed(1)
    plain, layer = (LAYERS[name].ours(config) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    layer.configure(config, epilogue)
    return plain, layer


def exact_for(epilogue: Epilogue, config: QConfig | None) -> QConfig | None:
    """A config that keeps what the activation's gradient needs, where others keep ELU's derivative in one byte."""
    return config if config is None or epilogue.activation != "elu" else replace(config, save="fp32")


@ALL
@CONFIGS
def test_an_epilogue_is_the_activation_behind_the_layer(name: str, config: QConfig | None) -> None:
    for epilogue, function in EPILOGUES:
        plain, layer = (layer.eval() for layer in with_epilogue(name, exact_for(epilogue, config), epilogue))
        x, args = torch.randn(N, K), LAYERS[name].args(EDGES, N)
        expected = passes(Behind(plain, function), x, EDGES, *args, extra=learned(args))
        assert_same_pass(passes(layer, x, EDGES, *args, extra=learned(args)), expected)


@ALL
@CONFIGS
def test_an_epilogue_drops_elements_in_training(name: str, config: QConfig | None) -> None:
    plain, layer = with_epilogue(name, config, Epilogue("relu", dropout=0.25))
    x, args = torch.randn(N, K), LAYERS[name].args(EDGES, N)

    def run(module: nn.Module, seed: int = 2) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return passes(module, x, EDGES, *args, extra=learned(args))

    actual, positive = run(layer)["out"], run(plain)["out"].relu()
    kept = actual != 0
    torch.testing.assert_close(actual[kept], positive[kept] / 0.75)
    share = kept[positive > 0].double().mean()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / int((positive > 0).sum())) ** 0.5
    assert not torch.equal(kept, run(layer, seed=3)["out"] != 0)

    # What was dropped has no gradient, the rest that of the scaled rows; a step of a code where a tie is broken anew.
    factor = kept.to(x.dtype) / 0.75
    expected = run(Behind(plain, lambda out: out * factor))
    assert_same_pass(run(layer), expected, rel=1e-5 if config is None else 2e-2)


@CONFIGS
def test_a_dense_layer_has_an_epilogue_too(config: QConfig | None) -> None:
    x = torch.randn(N, K)
    for epilogue, function in EPILOGUES:
        exact = exact_for(epilogue, config)
        plain, layer = QLinear(K, M, config=exact), QLinear(K, M, config=exact, epilogue=epilogue)
        layer.load_state_dict(plain.state_dict())
        expected = passes(Behind(plain.eval(), function), x)
        assert_same_pass(passes(layer.eval(), x), expected)


def test_a_layer_tells_its_epilogue() -> None:
    layer = QLinear(K, M, config=None, epilogue=Epilogue("elu"))
    assert repr(layer) == (
        f"QLinear({K}, {M}, bias=True, config=None, "
        f"epilogue=Epilogue(activation='elu', dropout=0, negative_slope=0.01, alpha=1.0))"
    )


def test_an_epilogue_names_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"'Epilogue' expects 'activation' to be one of .* or None \(got 'gelu'\)"):
        Epilogue("gelu")
    with pytest.raises(ValueError, match=r"'dropout' to be a probability from 0 to 1 \(got 1.5\)"):
        Epilogue("relu", 1.5)
    with pytest.raises(TypeError, match=r"'QLinear' expects 'epilogue' to be an Epilogue or None \(got 'relu'\)"):
        QLinear(K, M, epilogue="relu")  # type: ignore[arg-type]
