"""Mixed products in layers: sets of rows, codes that are given, a compiler, and what stochastic rounding is off by."""

import weakref
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from dense import assert_within, sum_bound
from graphs import GRAPHS
from op_checks import assert_unbiased, gradients, traces_formats
from qgnn import QConfig, QTensor, functional, trace
from qgnn.formats import MSFP, MXFP4, Int, _format, parse
from qgnn.functional import _mixed, _operands
from qgnn.functional._operands import Operand
from qgnn.nn import QGATConv, QGCNConv, QLinear, QSAGEConv

B, N, K, M = 3, 21, 40, 12  # no multiples of blocks of 16 or 32
NAMES = ("int4", "int8-affine", "fixed6", "fixed12", "msfp12", "mxint8", "mxfp6-e2m3", "fp8-e4m3")
FORMATS = pytest.mark.parametrize("name", NAMES)


def config_of(name: str, rounding: str = "nearest", **options: Any) -> QConfig:
    """One format for all operands, and one more, for the config not to be that of fused kernels."""
    return QConfig(fmt=parse(name), rounding=rounding, components={"aggregation": Int(8)}, **options)


def sets() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(B, N, K) * torch.logspace(-1, 1, K)
    return x, torch.randn(M, K), torch.randn(B, N, M) * torch.logspace(-1, 1, N)[:, None]


# ---- sets of rows


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@FORMATS
def test_sets_of_rows_are_the_rows_of_one_matrix(name: str, granularity: str) -> None:
    """Bit for bit, with their gradients, which sum over the rows of all sets; as codes, they are packed by row."""
    if granularity == "tensor" and not parse(name).scales_slices:
        pytest.skip("blocks are the same with either granularity")
    (x, weight, upstream), config = sets(), config_of(name, granularity=granularity)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight, config=config)

    def run_codes(x: Tensor, weight: Tensor) -> Tensor:
        return run(functional.quantize(x, config, straight_through=True), weight)

    expected, grads = gradients(run, {"x": x.flatten(0, 1), "weight": weight}, upstream.flatten(0, 1))
    for function in (run, run_codes):
        y, own = gradients(function, {"x": x, "weight": weight}, upstream)
        assert torch.equal(y, expected.view(B, N, M))
        assert torch.equal(own["x"], grads["x"].view(B, N, K))
        assert torch.equal(own["weight"], grads["weight"])
    one = functional.quantize(x[0, 0], config)
    assert torch.equal(run(one, weight), run(x[0, 0], weight))


@pytest.mark.parametrize("save", ["int8", "fp32"])
@pytest.mark.parametrize("name", ["fixed6", "int4"])
def test_int32_holds_parts_of_the_sum_over_many_rows(name: str, save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the gradient of a weight is, but of codes with a scale a row."""
    x, weight, upstream = torch.randn(90, K), torch.randn(M, K), torch.randn(90, M)
    run = lambda x, weight: functional.linear(x, weight, config=config_of(name, save=save))  # noqa: E731
    _, whole = gradients(run, {"x": x, "weight": weight}, upstream)
    monkeypatch.setattr(_operands, "MAX_INT32_TERMS", 40)
    with trace() as record:
        _, parts = gradients(run, {"x": x, "weight": weight}, upstream)
    assert record.ops["matmul.backward_dw"]["calls"] == (3 if save == "fp32" else 1)
    assert torch.equal(parts["x"], whole["x"])
    torch.testing.assert_close(parts["weight"], whole["weight"])


def test_the_gradient_s_rows_are_rounded_where_they_are_read() -> None:
    """Not for the gradient of the weight of packed blocks, whose columns meet the gradient's."""
    weight = torch.randn(M, K, requires_grad=True)
    for x in (torch.randn(32, K), torch.randn(32, K, requires_grad=True)):
        y = functional.linear(x, weight, config=config_of("msfp12"))
        with trace() as record:
            y.sum().backward()
        columns, others = 1, 2 * x.requires_grad  # rows, and the transposed weight that they meet
        assert record.ops["quantize.shared"]["calls"] == columns + others


def test_codes_of_sets_lie_along_the_columns() -> None:
    x, weight, _ = sets()
    for fmt in (Int(4), MSFP(3), MXFP4()):
        with pytest.raises(
            ValueError, match=r"'linear' expects codes of more than two dimensions to lie along the last"
        ):
            functional.linear(fmt.encode(x, 1), weight, config=config_of("msfp12"))


@pytest.mark.parametrize("make", [QGCNConv, QSAGEConv], ids=["gcn", "sage"])
@pytest.mark.parametrize("name", ["int4", "msfp12", "mxfp6-e2m3"])
def test_layers_take_sets_of_rows_and_of_codes(name: str, make: Any) -> None:
    """Each set by itself, as PyG's layers do."""
    edges, num_nodes = GRAPHS["random"]
    x, config = torch.randn(2, num_nodes, K), config_of(name)
    layer = make(K, M, config=config)
    expected = torch.stack([layer(rows, edges) for rows in x])
    assert torch.equal(layer(x, edges), expected)
    out = layer(functional.quantize(x, config), edges)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_attention_says_that_it_takes_one_set() -> None:
    edges, num_nodes = GRAPHS["random"]
    config = config_of("msfp12")
    for x in (torch.randn(2, num_nodes, K), functional.quantize(torch.randn(2, num_nodes, K), config)):
        with pytest.raises(ValueError, match=r"'QGATConv' expects node features of shape \[N, F\] \(got \[2, "):
            QGATConv(K, M, config=config)(x, edges)


# ---- codes that are given


@pytest.mark.parametrize("name", ["msfp12", "mxfp6-e2m3"])
def test_one_part_of_large_constants_is_decoded_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 rows: 21 are two parts, and 40 columns three."""
    decoded: list[weakref.ref[Tensor]] = []
    operand_of = _mixed.operand_of

    def spied(q: QTensor) -> Operand:
        assert not any(t() is not None for t in decoded)
        operand = operand_of(q)
        values = operand.codes if operand.values is None else operand.values
        assert values is not None
        assert values.shape[0] <= 16
        decoded.append(weakref.ref(values))
        return operand

    config, weight = config_of(name), torch.randn(2, K, requires_grad=True)
    q = functional.quantize(torch.randn(N, K), config)
    expected = torch.autograd.grad(functional.linear(q, weight, config=config).sum(), weight)
    monkeypatch.setattr(_mixed, "CHUNK", 8 * K)
    monkeypatch.setattr(_mixed, "operand_of", spied)
    out = functional.linear(q, weight, config=config)
    assert len(decoded) == 2
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight), expected)
    assert len(decoded) == 2 + 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6-e2m3"])
def test_codes_of_narrow_types_are_multiplied_in_fp32(name: str, dtype: torch.dtype) -> None:
    """By a weight that no narrow type holds: fp32 sums of K terms, and the result rounded once."""
    config = QConfig.only(features=parse(name), rounding="nearest")
    x, weight, _ = sets()
    q = functional.quantize(x[0].to(dtype), config)
    y = functional.linear(q, weight, config=config)
    values, w = q.dequantize().double(), weight.double().t()
    assert_within(y, values @ w, sum_bound(torch.tensor(K), values.abs() @ w.abs(), 4), dtype)


# ---- compilers


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by torch's own compiler
@traces_formats
@pytest.mark.parametrize("name", ["msfp12", "mxfp4"])
def test_a_compiled_layer_is_the_eager_one(name: str) -> None:
    """Bit for bit, forward and backward, random bits included: the compiler's backend runs the same kernels."""
    edges, num_nodes = GRAPHS["random"]
    layer, x = QGCNConv(K, M, config=config_of(name, "stochastic")), torch.randn(num_nodes, K, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def step(run: Any) -> list[Tensor]:
        torch.manual_seed(3)
        out = run(x, edges)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    expected = step(layer)
    torch.compiler.reset()
    actual = step(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of frames behind the break
def test_where_formats_cannot_be_traced_eager_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_format, "TRACES_FORMATS", False)
    linear, x = QLinear(K, M, config=config_of("mxfp4")), torch.randn(5, K)
    for function in (linear, MXFP4().encode):
        torch.compiler.reset()
        expected, actual = function(x), torch.compile(function, backend="eager")(x)
        assert torch.equal(*(t if isinstance(t, torch.Tensor) else t.dequantize() for t in (actual, expected)))
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"number formats expect torch 2\.12 or newer"):
            torch.compile(function, fullgraph=True, backend="eager")(x)
    torch.compiler.reset()


@traces_formats
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by torch's own compiler
def test_a_compiler_meets_no_scales_of_a_type_that_it_has_no_code_for() -> None:
    """Torch's own one, for numbers that are powers of two in a byte; values are the same without."""
    seen: set[torch.dtype] = set()

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.update(t.dtype for node in graph.graph.nodes if isinstance(t := node.meta.get("val"), Tensor))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    x = torch.randn(2, K)
    backend = aot_autograd(fw_compiler=record)
    run = torch.compile(lambda x: MXFP4().encode(x).dequantize(), fullgraph=True, backend=backend)
    assert torch.equal(run(x), MXFP4().quantize(x))
    assert torch.float8_e5m2 in seen
    assert torch.float8_e8m0fnu not in seen
    torch.compiler.reset()


# ---- derivatives


@pytest.mark.parametrize("make", [QLinear, QGCNConv, QSAGEConv, QGATConv], ids=["linear", "gcn", "sage", "gat"])
@pytest.mark.parametrize("name", ["fixed6", "msfp12", "mxfp4", "fp8-e4m3"])
def test_layers_have_no_second_derivatives(name: str, make: Any) -> None:
    edges, num_nodes = GRAPHS["random"]
    layer, x = make(K, M, config=config_of(name)), torch.randn(num_nodes, K, requires_grad=True)
    out = layer(x) if make is QLinear else layer(x, edges)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="'linear' has no second derivatives, which a gradient of a gradient"):
        dx.sum().backward()


# ---- stochastic rounding


def unclamped(*shape: int) -> Tensor:
    """Values none of which is clamped: the largest magnitude of each block of 16 or more, along either dimension, lies
    between 0.5 and 0.7, below the largest element of each format, which is 3/4 of a power of two or more."""
    x = 1.4 * torch.rand(shape) - 0.7
    i, j = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    return torch.where((i - j) % 16 == 0, x.sign() * 0.6, x)


@pytest.mark.parametrize("name", ["msfp12", "mxfp6-e3m2", "mxfp4", "fp8-e4m3", "int4-affine"])
def test_products_of_rounded_operands_are_unbiased(name: str) -> None:
    """Operands of one shape: two that shared random bits would show in the products. The bound is the sampling error of
    as many normal scores as there are values, and of each rounding 2**-14 of its largest value."""
    torch.manual_seed(3)
    tensors, upstream = {"x": unclamped(32, 32), "weight": unclamped(32, 32)}, unclamped(32, 32)
    config = config_of(name, "stochastic")

    def run(x: Tensor, weight: Tensor, seed: int = 0, config: QConfig | None = None) -> Tensor:
        return functional.linear(x, weight, config=config, seed=seed)

    exact, grads = gradients(run, {k: v.double() for k, v in tensors.items()}, upstream.double())

    def draw(seed: int) -> dict[str, Tensor]:
        y, drawn = gradients(lambda x, weight: run(x, weight, seed, config), tensors, upstream)
        return {"y": y, **drawn}

    assert_unbiased(draw, {"y": exact, **grads})
