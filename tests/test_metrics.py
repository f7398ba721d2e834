"""``qgnn.metrics``: errors by known values and properties; widths by brute force, for tensors and layers of models."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

import qgnn
from graphs import GRAPHS
from qgnn import QConfig
from qgnn.config import OPERANDS
from qgnn.formats import MSFP, Blocks, Int
from qgnn.metrics import apply_bits, bias, cosine, error_x, select_bits, select_bits_per_layer, sqnr
from qgnn.nn import QGCNConv, QLinear

EDGES, N = GRAPHS["random"]
NUM_VALUES = 1 << 20
TAIL = math.erfc(4 / math.sqrt(2))  # normal values beyond 4 deviations

floats = st.floats(-1000, 1000, width=32, allow_subnormal=False)
pairs = st.lists(st.tuples(floats, floats), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def normal() -> Tensor:
    """Midpoints of equal parts of the normal distribution up to 4 deviations, which both occur."""
    p = (torch.arange(NUM_VALUES, dtype=torch.float64) + 0.5) / NUM_VALUES
    return (math.sqrt(2) * torch.erfinv(2 * p - 1)).clamp(-4, 4).float()


@pytest.mark.parametrize(
    ("form", "known"),
    [
        ("elementwise", {8: 0.039, 6: 0.125, 5: 0.22, 4: 0.384, 3: 0.666}),
        ("norm", {8: 0.010, 6: 0.040, 5: 0.084, 4: 0.179}),
    ],
)
def test_error_x_of_normal_values_rounded_to_nearest(normal: Tensor, form: str, known: dict[int, float]) -> None:
    """Half a unit of the third digit; what midpoints leave out of a mean of values up to 1, which vary by 2 a step; and
    the tails."""
    for bits, value in known.items():
        found = float(error_x(normal, Int(bits).quantize(normal), form))
        assert abs(found - value) <= 0.0005 + 2**bits / NUM_VALUES + TAIL, (bits, found)


@pytest.mark.parametrize(("bits", "known"), [(8, 0.054), (6, 0.176), (5, 0.311), (4, 0.548)])
def test_error_x_of_normal_values_rounded_at_random(normal: Tensor, bits: int, known: float) -> None:
    """Half a unit of the third digit, the tails, and five standard errors of the mean."""
    rounded = Int(bits).quantize(normal, seed=1)
    ratios = (rounded - normal).double().abs() / normal.double().abs()
    deviation = float(ratios.std()) / math.sqrt(NUM_VALUES)
    assert abs(float(error_x(normal, rounded)) - known) <= 0.0005 + TAIL + 5 * deviation


def test_metrics_of_known_values() -> None:
    x, x_hat = torch.tensor([4.0, -2.0, 0.0, 1.0]), torch.tensor([3.0, -2.0, 5.0, 1.5])
    assert float(error_x(x, x_hat)) == (0.25 + 0 + 0.5) / 3
    assert float(error_x(x, x_hat, "norm")) == (1 + 5 + 0.5) / 7
    assert float(bias(x, x_hat)) == (-1 + 5 + 0.5) / 7
    assert float(sqnr(x, x_hat)) == pytest.approx(10 * math.log10(21 / 26.25), rel=1e-14)
    dot, lengths = 12 + 4 + 0 + 1.5, 21 * (9 + 4 + 25 + 2.25)
    assert float(cosine(x, x_hat)) == pytest.approx(dot / math.sqrt(lengths), rel=1e-14)
    for value in (error_x(x, x_hat), bias(x, x_hat), sqnr(x, x_hat), cosine(x, x_hat)):
        assert value.shape == ()
        assert value.dtype == torch.float64


@pytest.mark.parametrize("form", ["elementwise", "norm"])
def test_errors_of_zeros_nothing_and_poison(form: str) -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert float(error_x(zero, zero, form)) == 0
    assert float(error_x(zero, one, form)) == math.inf
    assert float(error_x(zero[:0], zero[:0], form)) == 0
    assert error_x(torch.tensor([1.0, math.nan]), torch.ones(2), form).isnan()
    assert error_x(torch.ones(2), torch.tensor([1.0, math.nan]), form).isnan()
    assert float(sqnr(zero, one)) == -math.inf
    assert float(bias(zero, zero)) == 0
    assert float(cosine(zero, zero)) == 1
    assert float(cosine(zero, one)) == 0


@given(pairs)
def test_exact_values_have_no_error(values: list[tuple[float, float]]) -> None:
    x = torch.tensor(values)
    assert float(error_x(x, x)) == float(error_x(x, x, "norm")) == float(bias(x, x)) == 0
    assert float(sqnr(x, x)) == math.inf
    assert float(cosine(x, x)) == pytest.approx(1, rel=1e-14)
    assert not x.any() or float(cosine(x, -x)) == pytest.approx(-1, rel=1e-14)


@given(pairs, st.integers(-40, 40))
def test_errors_do_not_depend_on_scale(values: list[tuple[float, float]], power: int) -> None:
    """Powers of two scale all of fp64 exactly."""
    x, x_hat = torch.tensor(values, dtype=torch.float64).unbind(1)
    scaled = (x * 2.0**power, x_hat * 2.0**power)
    for metric in (error_x, sqnr, bias):
        assert torch.equal(metric(*scaled), metric(x, x_hat))
    assert torch.equal(error_x(*scaled, "norm"), error_x(x, x_hat, "norm"))
    torch.testing.assert_close(cosine(x, scaled[1]), cosine(x, x_hat), rtol=1e-14, atol=1e-14)  # square roots


def test_cosine_of_many_tensors_is_that_of_one_long_vector() -> None:
    x, y = [torch.randn(3, 4), torch.randn(5), None, torch.randn(2)], [torch.randn(3, 4), torch.randn(5), None, None]
    first, second = torch.cat([x[0].flatten(), x[1], x[3]]), torch.cat([y[0].flatten(), y[1], torch.zeros(2)])
    torch.testing.assert_close(cosine(iter(x), y), cosine(first, second), rtol=1e-14, atol=0)


def test_metrics_take_codes() -> None:
    x = torch.randn(6, 8)
    q = Int(4).encode(x)
    assert torch.equal(error_x(x, q), error_x(x, q.dequantize()))


@pytest.mark.parametrize("fmt", [Int(8), Int(3, symmetric=False), Int], ids=str)
@pytest.mark.parametrize("dim", [0, None])
def test_select_bits_is_the_first_width_below_the_threshold(fmt: Any, dim: int | None) -> None:
    x = torch.randn(40, 30) * torch.rand(40, 1)
    symmetric = fmt is Int or fmt.symmetric

    def error(bits: int) -> float:
        values = x.flatten() if dim is None else x
        return float(error_x(values, Int(bits, symmetric).quantize(values, dim or 0), "norm"))

    for threshold in (0.005, 0.05, 0.2, 0.9, 0.0):
        expected = next((bits for bits in range(2, 9) if error(bits) <= threshold), None)
        assert select_bits(x, threshold, fmt, dim=dim, form="norm") == expected


@given(pairs, st.floats(0, 1), st.floats(0, 1))
def test_select_bits_is_monotone_in_the_threshold(values: list[tuple[float, float]], a: float, b: float) -> None:
    x = torch.tensor(values).flatten()
    narrow, wide = (select_bits(x, threshold) or 99 for threshold in (max(a, b), min(a, b)))
    assert narrow <= wide


def test_select_bits_of_normal_values(normal: Tensor) -> None:
    """The threshold of the paper rejects 4 bits; in the other form it would not."""
    assert select_bits(normal) == 5
    assert select_bits(normal, seed=1) == 6
    assert select_bits(normal, form="norm") == 4
    assert select_bits(normal, widths=(8, 6)) == 6
    assert select_bits(normal, widths=(3, 4)) is None
    assert select_bits(torch.zeros(5)) == 2
    assert select_bits(torch.tensor(3.0)) == 2


class Net(nn.Module):
    def __init__(self, config: QConfig) -> None:
        super().__init__()
        self.conv, self.norm = QGCNConv(8, 16, config=config), nn.BatchNorm1d(16)
        self.linear, self.last = QLinear(16, 4, config=config), QLinear(4, 2, config=None)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.conv(x, edge_index)).relu(), 0.5, self.training)
        return self.last(self.linear(x=h))


def loss_of(out: Tensor, batch: Data) -> Tensor:
    return out.square().sum()


def data() -> Data:
    return Data(x=torch.randn(N, 8) ** 3, edge_index=EDGES)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_select_bits_per_layer_measures_what_layers_read(granularity: str) -> None:
    """In eval mode each operand can be had by hand."""
    net, batches = Net(QConfig(granularity=granularity)).eval(), [data(), data(), data()]
    found = select_bits_per_layer(net, batches, 0.15, loss=loss_of, num_batches=2)

    exact, operands = Net(None).eval(), {}
    exact.load_state_dict(net.state_dict())
    for batch in batches[:2]:
        h = exact.conv(batch.x, EDGES)
        hidden = exact.norm(h).relu()
        y = exact.linear(hidden)
        dh, dy = torch.autograd.grad(exact.last(y).square().sum(), [h, y])
        for key, x in {
            ("conv", "features"): batch.x,
            ("conv", "weights"): exact.conv.lin.weight,
            ("conv", "output_gradient"): dh,
            ("linear", "activations"): hidden,
            ("linear", "weights"): exact.linear.weight,
            ("linear", "output_gradient"): dy,
        }.items():
            operands.setdefault(key, []).append(x)
    dim = None if granularity == "tensor" else -1
    expected: dict[str, dict[str, int | None]] = {"conv": {}, "linear": {}}
    for (name, component), tensors in operands.items():
        widths = [select_bits(x, 0.15, dim=dim) for x in tensors]
        expected[name][component] = None if None in widths else max(w for w in widths if w is not None)
    assert found == expected
    assert len({bits for layer in found.values() for bits in layer.values()}) > 1, "all of one width tells nothing"


def test_select_bits_per_layer_leaves_no_trace() -> None:
    """In training mode; of a model compiled in part, whose graph cannot hold a hook."""
    net, batch = Net(QConfig()), data()
    run = torch.compile(net, backend="eager")
    net.linear = torch.compile(net.linear, backend="eager", fullgraph=True)
    batch.x.requires_grad_()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    state = torch.get_rng_state()
    found = select_bits_per_layer(run, [batch], loss=loss_of)
    assert found.keys() == {"conv", "linear._orig_mod"}
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(t.grad is None for t in (batch.x, *net.parameters()))
    assert net.conv.config == QConfig()
    assert not net.conv._forward_hooks


def test_apply_bits_sets_components() -> None:
    net = Net(QConfig(bits=6))
    apply_bits(net, {"conv": {"weights": 4, "output_gradient": None}, "linear": {}})
    assert net.linear.config == QConfig(bits=6)
    config = net.conv.config
    assert config is not None
    assert [config.format_of(name) for name in ("weights", "output_gradient", "features")] == [Int(4), None, Int(6)]
    apply_bits(net, {"conv": {"output_gradient": 4}}, lambda bits: MSFP(bits - 1))
    assert net.conv.config is not None
    assert net.conv.config.format_of("output_gradient") == MSFP(3)
    assert net.conv.config.format_of("weights") == Int(4)


def test_apply_bits_keeps_packed_blocks_where_operands_have_one_width() -> None:
    packed = QConfig(save=Blocks(2, 64))
    net = Net(packed)
    with pytest.raises(
        ValueError, match=r"'apply_bits' expects one width of all operands for 'conv', which keeps packed"
    ):
        apply_bits(net, {"linear": dict.fromkeys(OPERANDS, 4), "conv": {"weights": 4}})
    assert net.linear.config == packed, "all layers, or none"
    apply_bits(net, {"linear": dict.fromkeys(OPERANDS, 4)})
    assert net.linear.config is not None
    assert (net.linear.config.save, net.linear.config.bits) == (Blocks(2, 64), 4)
    assert net.conv.config is not None
    net.conv.config = replace(net.conv.config, save="int8")  # what the error says
    apply_bits(net, {"conv": {"weights": 4}})
    assert net.conv.config.format_of("weights") == Int(4)


def test_select_bits_per_layer_leaves_out_exact_components() -> None:
    net = Net(QConfig.only(weights=Int(8)))
    found = select_bits_per_layer(net, [data()], loss=loss_of, forward=lambda model, batch: model(batch.x, EDGES))
    assert {component for layer in found.values() for component in layer} == {"weights"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: error_x(torch.ones(2), torch.ones(3)), ValueError, r"'error_x' expects 'x_hat' of shape \[2\]"),
        (lambda: error_x(torch.ones(2), torch.ones(2), "mean"), ValueError, "'form' to be one of"),
        (lambda: sqnr([1.0], torch.ones(1)), TypeError, r"'sqnr' expects 'x' to be a real tensor \(got list"),
        (lambda: bias(torch.ones(1), torch.ones(1, dtype=torch.cfloat)), TypeError, "tensor of torch.complex64"),
        (lambda: cosine([torch.ones(1)], []), ValueError, "as many tensors"),
        (lambda: cosine([], []), ValueError, "at least one tensor"),
        (lambda: cosine(3, 4), TypeError, "tensors, or lists of them"),
        (lambda: cosine(torch.ones(1), torch.ones(2)), ValueError, r"of shape \[1\]"),
        (lambda: select_bits(torch.ones(2).int()), TypeError, "floating-point tensor"),
        (lambda: select_bits(torch.ones(2), fmt=lambda bits: bits), TypeError, "'fmt' to be a format"),
        (lambda: select_bits(torch.ones(2), form="max"), ValueError, "'form' to be one of"),
        (
            lambda: select_bits(torch.ones(2), form="cosine"),
            ValueError,
            r"'form' to be one of \('elementwise', 'norm'\) \(got 'cosine'\); .* smaller ones are better: of 'cosine'",
        ),
        (
            lambda: select_bits(torch.ones(2), form=sqnr),
            ValueError,
            "smaller ones are better: of 'sqnr' larger ones are",
        ),
        (lambda: select_bits(torch.ones(2), -0.1), ValueError, r"'threshold' of at least 0, .* \(got -0.1\)"),
        (lambda: select_bits(torch.ones(2), math.nan), ValueError, r"'threshold' of at least 0, .* \(got nan\)"),
        (lambda: select_bits(torch.ones(2), "0.3"), TypeError, r"'threshold' to be a number \(got '0.3'\)"),
        (lambda: select_bits(torch.ones(2), fmt="int8"), TypeError, r"'fmt' to be a format, .* \(got 'int8'\)"),
        (lambda: select_bits(torch.ones(2), widths=(9,)), ValueError, "from 2 to 8"),
        (lambda: select_bits_per_layer(nn.Linear(2, 2), []), ValueError, "model with quantized layers"),
        (lambda: select_bits_per_layer(QLinear(2, 2), []), ValueError, "at least one batch"),
        (lambda: apply_bits(Net(QConfig()), {"last": {"weights": 4}}), ValueError, "names of quantized layers"),
        (
            lambda: apply_bits(QLinear(2, 2, config=QConfig.only()), {"": {"weights": 4}}),
            ValueError,
            "expects 'fmt' for 'weights'",
        ),
    ],
)
def test_metrics_say_what_is_wrong(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_metrics_are_public() -> None:
    assert qgnn.metrics.error_x is error_x
