"""trace(): calls, formats, backend, bytes and errors of what ran."""

import pytest
import torch
from torch import Tensor

import qgnn
from graphs import GRAPHS
from qgnn import QConfig, functional
from qgnn.trace import recording, report

N, K, M, E = 50, 16, 8, 200
OPS_OF_A_STEP = {
    "quantize.forward": 2,  # x and the weight
    "matmul.forward": 1,
    "spmm.forward": 1,
    "quantize.backward": 2,  # the gradient and the transposed weight
    "spmm.backward": 1,
    "matmul.backward_dx": 1,
    "matmul.backward_dw": 1,
    "sddmm.backward": 1,
}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "graph": GRAPHS["random"][0],
        "x": torch.randn(N, K, requires_grad=True),
        "weight": torch.randn(M, K, requires_grad=True),
        "edge_weight": torch.rand(E, requires_grad=True),
    }


def step(tensors: dict[str, Tensor], config: QConfig | None) -> None:
    functional.graph_linear(**tensors, config=config).sum().backward()


@pytest.mark.parametrize("bits", [8, 4])
def test_trace_of_a_step(tensors: dict[str, Tensor], bits: int) -> None:
    with qgnn.trace() as t:
        step(tensors, QConfig(bits=bits))
    assert {name: op["calls"] for name, op in t.ops.items()} == OPS_OF_A_STEP
    assert {op["format"] for op in t.ops.values()} == {f"int{bits}"}
    products = {name for name in t.ops if name.startswith("matmul")}
    assert {t.ops[name]["backend"].split("/")[0] for name in products} == {"c"}
    assert {t.ops[name]["backend"] for name in t.ops.keys() - products} == {"c"}
    assert all(op["bytes"] > 0 for op in t.ops.values())


def test_trace_of_full_precision_shows_no_integers(tensors: dict[str, Tensor]) -> None:
    with qgnn.trace() as t:
        step(tensors, None)
        functional.spmm(tensors["graph"], tensors["x"], activation="relu").sum().backward()
    assert {op["format"] for op in t.ops.values()} == {"float32"}
    assert {"matmul.forward", "spmm.forward", "spmm.backward", "activation.backward"} <= set(t.ops)
    assert not any(name.startswith("quantize") for name in t.ops)


def test_trace_counts_bytes() -> None:
    """Everything an operation reads and writes, once; a product does not read the codes that it makes itself."""
    edge_index = GRAPHS["random"][0]
    x, weight = torch.randn(N, K), torch.randn(M, K)
    seed = 8
    with qgnn.trace() as t:
        functional.linear(x, weight, torch.zeros(M), config=QConfig())
    x_codes, w_codes = N * K + N * 4, M * K + M * 4
    assert t.ops["quantize.forward"]["bytes"] == (N * K * 4 + x_codes + seed) + (M * K * 4 + w_codes + seed)
    assert t.ops["matmul.forward"]["bytes"] == w_codes + M * 4 + N * M * 4
    with qgnn.trace() as t:
        functional.linear(functional.quantize(x), weight, torch.zeros(M), config=QConfig())
    assert t.ops["matmul.forward"]["bytes"] == x_codes + w_codes + M * 4 + N * M * 4
    with qgnn.trace() as t:
        functional.spmm(edge_index, x, config=QConfig(rounding="nearest"))
    assert t.ops["quantize.forward"]["bytes"] == N * K * 4 + x_codes
    assert t.ops["spmm.forward"]["bytes"] == (N + 1) * 4 + E * 4 + x_codes + N * K * 4


@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
@pytest.mark.parametrize("bits", [8, 3])
def test_trace_measures_the_error(granularity: str, bits: int) -> None:
    x = torch.randn(40, 70)
    with qgnn.trace() as t:
        q = functional.quantize(x, QConfig(bits=bits, granularity=granularity, block_size=32))
    truth = float((q.dequantize() - x).norm() / x.norm())
    assert t.ops["quantize.forward"]["error"] == pytest.approx(truth, rel=1e-4)


def test_trace_averages_errors() -> None:
    x, y = torch.randn(20, 30), torch.randn(20, 30)
    errors = []
    for value in (x, y):
        with qgnn.trace() as t:
            functional.quantize(value, QConfig(bits=2), seed=0)
        errors.append(t.ops["quantize.forward"]["error"])
    with qgnn.trace() as t:
        functional.quantize(x, QConfig(bits=2), seed=0)
        functional.quantize(y, QConfig(bits=2), seed=0)
    assert t.ops["quantize.forward"]["error"] == pytest.approx(sum(errors) / 2)


def test_trace_error_of_zeros_is_zero() -> None:
    with qgnn.trace() as t:
        functional.quantize(torch.zeros(3, 4))
    assert t.ops["quantize.forward"]["error"] == 0


def test_trace_without_errors(tensors: dict[str, Tensor]) -> None:
    with qgnn.trace(error=False) as t:
        step(tensors, QConfig())
    assert all(op["error"] is None for op in t.ops.values())
    assert {name: op["calls"] for name, op in t.ops.items()} == OPS_OF_A_STEP


def test_nested_traces_both_record() -> None:
    x = torch.randn(4, 8)
    with qgnn.trace() as outer:
        functional.quantize(x)
        with qgnn.trace(error=False) as inner:
            functional.quantize(x)
        functional.quantize(x)
    assert outer.ops["quantize.forward"]["calls"] == 3
    assert inner.ops["quantize.forward"]["calls"] == 1
    assert outer.ops["quantize.forward"]["error"] > 0
    assert inner.ops["quantize.forward"]["error"] is None


def test_mixed_formats_are_all_shown() -> None:
    x = torch.randn(4, 8)
    with qgnn.trace() as t:
        for bits in (4, 8, 8):
            functional.quantize(x, QConfig(bits=bits))
    op = t.ops["quantize.forward"]
    assert op["format"] == "int8+int4"
    assert op["formats"] == {"int4": 1, "int8": 2}
    assert "int8 x2" in str(t)


def test_nothing_is_recorded_outside() -> None:
    x = torch.randn(4, 8)
    with qgnn.trace() as t:
        pass
    functional.quantize(x)
    assert t.ops == {}
    assert not recording()


def test_an_error_inside_closes_the_trace() -> None:
    with pytest.raises(TypeError, match="floating-point"), qgnn.trace():
        functional.quantize(torch.arange(4))
    assert not recording()


def test_trace_does_not_change_results(tensors: dict[str, Tensor]) -> None:
    plain = functional.graph_linear(**tensors, config=QConfig(), seed=1)
    with qgnn.trace():
        traced = functional.graph_linear(**tensors, config=QConfig(), seed=1)
    assert torch.equal(plain, traced)


def test_trace_prints_a_table(tensors: dict[str, Tensor]) -> None:
    with qgnn.trace() as t:
        step(tensors, QConfig())
    text = str(t)
    lines = text.splitlines()
    assert all(any(name in line and "│ c" in line for line in lines) for name in OPS_OF_A_STEP)
    for heading in ("op", "calls", "format", "backend", "MiB", "error"):
        assert heading in text
    quantize = next(line for line in lines if "quantize.forward" in line)
    assert f"{t.ops['quantize.forward']['error']:.4f}" in quantize
    assert "int8 x2" in quantize
    assert repr(t) == f"Trace({sum(OPS_OF_A_STEP.values())} calls of {len(OPS_OF_A_STEP)} ops)"


def test_long_names_of_backends_are_shown_whole() -> None:
    with qgnn.trace() as t:
        report("matmul.forward", "int8", "c/" + 60 * "y", ())
    assert str(t).count("y") == 60
