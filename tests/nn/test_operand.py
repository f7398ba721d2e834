"""Operands of a layer: constants are rounded once for all layers and steps, hidden rows anew."""

import pytest
import torch
from torch import nn

from graphs import GRAPHS
from layer_cases import assert_equal_pass
from qgnn import QConfig, QTensor, functional, trace
from qgnn.nn import QGCNConv, QLinear
from qgnn.nn._common import operand

INT8, NEAREST = QConfig(), QConfig(rounding="nearest")
EDGES, N = GRAPHS["random"]
K, M = 16, 8


def codes(x: object) -> torch.Tensor:
    assert isinstance(x, QTensor)
    return x.codes


def roundings(layers: list[nn.Module], x: torch.Tensor) -> int:
    with trace() as record:
        for layer in layers:
            layer(x)
    return record.ops["quantize.forward"]["calls"] if "quantize.forward" in record.ops else 0


def test_a_constant_is_rounded_once_and_to_nearest() -> None:
    x = torch.randn(N, K)
    first = codes(operand(x, INT8))
    assert torch.equal(first, functional.quantize(x, NEAREST).codes)
    assert codes(operand(x, INT8)) is first
    assert codes(operand(x, NEAREST)) is first  # in training and in evaluation
    assert codes(operand(x, INT8, shared=True)) is first
    assert codes(operand(x, QConfig(bits=4))) is not first
    assert codes(operand(x, QConfig(granularity="tensor"))) is not first


def test_a_write_to_a_constant_is_noticed() -> None:
    x = torch.randn(N, K)
    first = codes(operand(x, INT8)).clone()
    x.neg_()
    second = codes(operand(x, INT8))
    assert torch.equal(second, -first)
    x[0, 0] = 100.0
    assert codes(operand(x, INT8))[0, 0] == 127
    x.data = torch.randn(N, K)
    assert torch.equal(codes(operand(x, INT8)), functional.quantize(x, NEAREST).codes)


def test_layers_and_steps_share_the_codes_of_a_constant() -> None:
    x = torch.randn(N, K)
    layers: list[nn.Module] = [QLinear(K, M) for _ in range(3)]
    assert roundings(layers, x) == 1 + 3  # the rows, and each layer's weight
    assert roundings(layers, x) == 3
    for layer in layers:
        layer.eval()
    assert roundings(layers, x) == 3


def test_hidden_rows_are_rounded_anew() -> None:
    x = torch.randn(N, K, requires_grad=True)
    assert operand(x, INT8) is x  # the product rounds them itself
    first, second = (operand(x, INT8, shared=True) for _ in range(2))
    assert isinstance(first, QTensor)
    assert first.origin is x
    assert not torch.equal(codes(first), codes(second))
    with torch.no_grad():
        assert operand(x, INT8) is x
        shared = operand(x, INT8, shared=True)
        assert isinstance(shared, QTensor)
        assert shared.origin is None


def test_rows_that_are_to_be_kept_are_not_replaced_by_codes() -> None:
    kept = QConfig(save="fp32")
    for x in (torch.randn(N, K), torch.randn(N, K, requires_grad=True)):
        assert operand(x, kept) is x
        assert operand(x, kept, shared=True) is x
        assert operand(x, None) is x
    with torch.no_grad():
        assert isinstance(operand(torch.randn(N, K), kept, shared=True), QTensor)
    q = functional.quantize(torch.randn(N, K))
    assert operand(q, INT8) is q


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_codes(dtype: torch.dtype) -> None:
    x, layer = torch.randn(N, K), QLinear(K, M, config=NEAREST)
    first, out = codes(operand(x, INT8)), layer(x)
    with torch.autocast("cpu", dtype):
        assert codes(operand(x, INT8)) is first
        assert torch.equal(layer(x), out)


@pytest.mark.parametrize("config", [INT8, NEAREST], ids=["stochastic", "nearest"])
def test_codes_that_are_remembered_change_no_result(config: QConfig) -> None:
    """Rows that were rounded before, and a copy of them: equal to the bit under one seed."""
    layers = [QLinear(K, M, config=config), QGCNConv(K, M, config=config)]
    x = torch.randn(N, K)
    for layer in layers:
        rest = () if isinstance(layer, QLinear) else (EDGES,)
        layer(x, *rest)
        results = []
        for rows in (x, x.clone()):
            torch.manual_seed(3)
            out = layer(rows, *rest)
            grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
            results.append({"out": out.detach()} | {str(i): grad for i, grad in enumerate(grads)})
        assert_equal_pass(*results)


def test_codes_go_with_the_constant_that_they_were_made_of() -> None:
    import gc
    import weakref

    x = torch.randn(N, K)
    gone = weakref.ref(codes(operand(x, INT8)))
    assert gone() is not None
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # checks of shapes, which a trace fixes
def test_a_traced_layer_has_no_codes_of_its_example() -> None:
    layer, x, other = QLinear(K, M).eval(), torch.randn(N, K), torch.randn(N, K)
    layer(x)
    with torch.no_grad():  # which a trace takes down, for what is kept for a gradient
        traced = torch.jit.trace(layer, (x,))
        assert torch.equal(traced(other), layer(other))


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    layer, x = QLinear(K, M, config=NEAREST), torch.randn(3, N, K)
    with pytest.raises(NotImplementedError, match=r"'torch.func' does not transform operators of qgnn"):
        torch.func.vmap(layer)(x)


def test_a_graph_that_is_recorded_takes_no_codes_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without gradients takes what is remembered of constants, but replays run on what the rows are by then."""
    x, config = torch.randn(8, 6), QConfig()
    remembered = operand(x, config)
    with torch.no_grad():
        assert operand(x, config) is remembered
        monkeypatch.setattr("qgnn.nn._common.is_recorded", lambda _: True)
        assert operand(x, config) is x
