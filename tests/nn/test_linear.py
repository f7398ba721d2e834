"""QLinear: torch's and PyG's dense layer without quantization, within the formats' error with it."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import Linear

from layer_cases import (
    assert_equal_pass,
    assert_same_pass,
    assert_unbiased,
    kept_bytes,
    linear_bounds,
    passes,
    relative_error,
)
from qgnn import QConfig, functional, trace
from qgnn.nn import QLinear

N, K, M = 40, 24, 16
NEAREST = QConfig(rounding="nearest")
SHAPES = [(N, K), (K,), (1, K), (0, K), (3, 5, K), (2, 3, 4, K), (3, 0, K)]


def twins(config: QConfig | None = None, bias: bool = True, width: int = K) -> tuple[Linear, nn.Linear, QLinear]:
    pyg, plain, ours = Linear(width, M, bias), nn.Linear(width, M, bias), QLinear(width, M, bias, config=config)
    plain.load_state_dict(pyg.state_dict())
    ours.load_state_dict(pyg.state_dict())
    return pyg, plain, ours


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_pyg_and_torch(shape: tuple[int, ...], bias: bool) -> None:
    pyg, plain, ours = twins(bias=bias)
    x = torch.randn(shape)
    actual = passes(ours, x)
    assert_same_pass(actual, passes(pyg, x))
    assert_same_pass(actual, passes(plain, x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_linear_takes_any_leading_dimensions(shape: tuple[int, ...], bias: bool) -> None:
    _, plain, ours = twins(NEAREST, bias)
    x = torch.randn(shape)
    expected, actual = passes(plain, x), passes(ours, x)
    assert {k: v.shape for k, v in actual.items()} == {k: v.shape for k, v in expected.items()}
    flat = passes(ours, x.reshape(-1, K))
    assert torch.equal(actual["out"].reshape(-1, M), flat["out"])
    for name, value in expected.items():
        assert value.numel() == 0 or (actual[name] - value).abs().max() <= 0.06 * value.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_linear_keeps_the_type(dtype: torch.dtype) -> None:
    x = torch.randn(N, K, dtype=dtype)
    for config in (None, NEAREST):
        pyg, _, ours = (layer.to(dtype) for layer in twins(config))
        expected, actual = passes(pyg, x), passes(ours, x)
        for name, value in expected.items():
            assert actual[name].dtype == dtype
            error = relative_error(actual[name], value)
            assert error < 4 * torch.finfo(dtype).eps + (0.018 if config else 0), (name, error)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("save", ["int8", "fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantized_linear_stays_within_its_error_bound(bits: int, granularity: str, save: str, rounding: str) -> None:
    config = QConfig(bits=bits, granularity=granularity, save=save, rounding=rounding)
    ours = QLinear(K, M, bias=False, config=config)
    x = torch.randn(N, K) * torch.logspace(-2, 2, N)[:, None]
    actual = passes(ours, x)
    upstream = torch.randn(N, M, generator=torch.Generator().manual_seed(7), dtype=torch.float64).float()
    for name, ball in linear_bounds(x, ours.weight, upstream, config).items():
        assert ball.contains(actual[name]), name
        error = (actual[name].double() - ball.value).norm() / ball.radius.norm()
        assert 0.005 < error < 0.5, (name, error)


def test_quantized_linear_noise_has_the_size_that_rounding_gives_it() -> None:
    """SQNR against what uniform rounding errors of both operands add up to, not only a bound of it; constants are
    rounded to nearest whatever the config says."""
    variances = {"nearest": 1 / 12, "stochastic": 1 / 6}
    for bits in (8, 6, 4):
        for rounding, learned in (("nearest", True), ("stochastic", True), ("stochastic", False)):
            config, variance = QConfig(bits=bits, rounding=rounding), variances[rounding]
            ours = QLinear(256, 64, bias=False, config=config)
            x = torch.randn(200, 256, requires_grad=learned)
            qmax = 2 ** (bits - 1) - 1
            of_x = variance if learned else variances["nearest"]
            x_noise = (x.abs().amax(1, keepdim=True) / qmax).square() * of_x
            w_noise = (ours.weight.abs().amax(1, keepdim=True) / qmax).square() * variance
            power = x.square().sum(1, keepdim=True) * w_noise.t() + x_noise * ours.weight.square().sum(1)
            y = x.double() @ ours.weight.double().t()
            predicted = 10 * torch.log10(y.square().sum() / power.sum())
            measured = 10 * torch.log10(y.square().sum() / (ours(x) - y).square().sum())
            # 12,800 outputs; errors of a row share 256 draws: 1 dB is 25% of the noise power
            assert abs(measured - predicted) < 1, (bits, rounding, learned, measured, predicted)


def test_quantized_linear_is_unbiased() -> None:
    _, plain, ours = twins(QConfig(bits=4))
    x = torch.randn(N, K)
    exact = passes(plain.double(), x.double())
    del exact["dbias"]
    assert_unbiased(lambda: passes(ours, x), exact, draws=300)


def test_linear_draws_in_training_and_not_in_evaluation() -> None:
    _, _, ours = twins(QConfig())
    x = torch.randn(N, K)
    first, second = passes(ours, x), passes(ours, x)
    assert not any(torch.equal(first[name], second[name]) for name in ("out", "dx", "dweight"))
    torch.manual_seed(5)
    first = passes(ours, x)
    torch.manual_seed(5)
    assert_equal_pass(passes(ours, x), first)
    ours.eval()
    state = torch.get_rng_state()
    assert_equal_pass(passes(ours, x), passes(ours, x))
    assert torch.equal(torch.get_rng_state(), state)
    nearest = QLinear(K, M, config=NEAREST)
    nearest.load_state_dict(ours.state_dict())
    assert_equal_pass(passes(ours, x), passes(nearest, x))


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_linear_takes_a_lazy_size(config: QConfig | None) -> None:
    ours = QLinear(-1, M, config=config)
    x = torch.randn(3, N, K)
    ours(x)
    assert ours.weight.shape == (M, K)
    assert ours.in_channels == K
    with trace() as record:
        ours(x)
    assert record.ops["matmul.forward"]["format"] == ("int8" if config else "float32")
    lazy = QLinear(-1, M, config=config)
    lazy.load_state_dict(ours.state_dict())
    assert torch.equal(lazy(x), ours(x))
    quantized = functional.quantize(x, NEAREST)
    fresh = QLinear(-1, M, config=config)
    fresh(quantized)
    assert fresh.weight.shape == (M, K)


def test_linear_takes_every_argument_of_pyg() -> None:
    ours = inspect.signature(QLinear.__init__).parameters
    theirs = inspect.signature(Linear.__init__).parameters
    positional = [p for p in ours if ours[p].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [p for p in theirs if p in positional]
    torch.manual_seed(1)
    expected = Linear(K, M, True, weight_initializer="glorot", bias_initializer="zeros")
    torch.manual_seed(1)
    actual = QLinear(K, M, True, weight_initializer="glorot", bias_initializer="zeros")
    assert torch.equal(actual.weight, expected.weight)
    assert torch.equal(actual.bias, expected.bias)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        QLinear(K, M, no_such_argument=1)


@pytest.mark.parametrize("config", [{"bits": 8}, 8, "int8"])
def test_linear_rejects_a_config_of_another_type(config: Any) -> None:
    with pytest.raises(TypeError, match=r"'QLinear' expects 'config' to be a QConfig or None \(got .*write config="):
        QLinear(K, M, config=config)


def test_linear_rejects_block_scales() -> None:
    with pytest.raises(ValueError, match=r"'QLinear' expects granularity 'row' or 'tensor' \(got 'block'\)"):
        QLinear(K, M, config=QConfig(granularity="block"))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_shares_a_state_dict_with_pyg_and_torch(bias: bool) -> None:
    pyg, plain, ours = twins(QConfig(), bias)
    ours.reset_parameters()
    assert not torch.equal(ours.weight, pyg.weight)
    for other in (pyg, plain):
        other.load_state_dict(ours.state_dict(), strict=True)
        assert torch.equal(other.weight, ours.weight)
    assert list(ours.state_dict()) == list(pyg.state_dict())


def test_linear_repr_tells_sizes_and_config() -> None:
    assert repr(QLinear(K, M, config=None)) == f"QLinear({K}, {M}, bias=True, config=None)"
    assert "config=QConfig(bits=4," in repr(QLinear(K, M, config=QConfig(bits=4)))


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_linear_survives_copy_and_pickle_after_a_pass(config: QConfig | None) -> None:
    ours = QLinear(K, M, config=config)
    x = torch.randn(N, K)
    expected = passes(ours, x)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_equal_pass(passes(twin, x), expected)


def test_linear_calls_its_hooks() -> None:
    ours = QLinear(K, M)
    seen: list[str] = []
    ours.register_forward_pre_hook(lambda *_: seen.append("pre"))
    ours.register_forward_hook(lambda *_: seen.append("forward"))
    ours.register_full_backward_hook(lambda *_: seen.append("backward"))
    ours(torch.randn(N, K, requires_grad=True)).sum().backward()
    assert seen == ["pre", "forward", "backward"]


def test_trace_shows_what_a_linear_ran() -> None:
    x = torch.randn(N, K, requires_grad=True)
    products = {"matmul.forward", "matmul.backward_dx", "matmul.backward_dw"}
    with trace() as record:
        QLinear(K, M)(x).sum().backward()
    assert record.ops.keys() == products | {"quantize.forward", "quantize.backward"}
    assert {op["format"] for op in record.ops.values()} == {"int8"}
    assert {record.ops[name]["calls"] for name in products} == {1}
    with trace() as record:
        QLinear(K, M, config=None)(x).sum().backward()
    assert record.ops.keys() == products
    assert {(op["format"], op["calls"]) for op in record.ops.values()} == {("float32", 1)}
    num_bytes = {name: record.ops[name]["bytes"] for name in products}
    assert num_bytes.pop("matmul.forward") - 4 * M == 4 * (N * K + K * M + N * M)
    assert set(num_bytes.values()) == {4 * (N * K + K * M + N * M)}
    for config in (QConfig(), None):
        with trace() as record:
            QLinear(K, M, config=config)(x.detach()).sum().backward()
        assert "matmul.backward_dx" not in record.ops
        with trace() as record:
            QLinear(K, M, config=config).requires_grad_(False)(x).sum().backward()
        assert "matmul.backward_dw" not in record.ops


def test_linear_keeps_codes_in_place_of_x() -> None:
    pyg, _, ours = twins(QConfig(), width=256)
    x = torch.randn(N, 256)
    assert kept_bytes(lambda: ours(x), ignore=tuple(ours.parameters())) == N * (256 + 4) + 8  # codes, scales, the seed
    assert kept_bytes(lambda: pyg(x), ignore=tuple(pyg.parameters())) == x.nbytes
    quantized = functional.quantize(x)
    constant = (*ours.parameters(), quantized.codes, quantized.scale)
    assert kept_bytes(lambda: ours(quantized), ignore=constant) == 8
    ours.weight.requires_grad_(False)
    moving = x.clone().requires_grad_()
    assert kept_bytes(lambda: ours(moving), ignore=tuple(ours.parameters())) == 8


def test_linear_takes_features_that_are_quantized_already() -> None:
    _, plain, ours = twins(NEAREST)
    x = torch.randn(3, N, K)
    for config in (NEAREST, QConfig(granularity="tensor", rounding="nearest")):
        quantized = functional.quantize(x, config)
        same = QLinear(K, M, config=config)
        same.load_state_dict(ours.state_dict())
        results = []
        for value in (quantized, x):
            same.zero_grad()
            out = same(value)
            out.square().sum().backward()
            results.append((out.detach(), same.weight.grad.clone(), same.bias.grad.clone()))
        for first, second in zip(*results, strict=True):
            assert torch.equal(first, second)
        exact = QLinear(K, M, config=None)
        exact.load_state_dict(ours.state_dict())
        torch.testing.assert_close(exact(quantized), plain(quantized.dequantize()))


def test_two_linears_in_a_row_train() -> None:
    x = torch.randn(200, K)
    target = torch.nn.functional.one_hot((x[:, :4] @ torch.randn(4, 3)).argmax(1), 3).float()
    model = nn.Sequential(QLinear(K, 32), nn.ReLU(), QLinear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert (model.eval()(x).argmax(1) == target.argmax(1)).float().mean() > 0.97
