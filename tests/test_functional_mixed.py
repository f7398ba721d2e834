"""Products with formats by component, against float64 products of operands rounded along what is summed over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from dense import assert_within, sum_bound
from op_checks import assert_inputs_unchanged, assert_unbiased, gradients, saved_tensors, shares_memory, traces_formats
from qgnn import QConfig, QTensor, functional, trace
from qgnn.formats import MSFP, MXFP4, MXINT8, Blocks, FixedPoint, Format, Int, parse
from qgnn.functional import _mixed

N, K, M = 21, 40, 12  # no multiples of blocks of 16 or 32
NAMES = ("int4", "int8-affine", "fixed6", "fixed12", "msfp12", "mxint8", "mxfp6-e2m3", "fp8-e4m3")
FORMATS = pytest.mark.parametrize("name", NAMES)


def config_of(name: str, **options: Any) -> QConfig:
    """One format for all operands; of integers one more is named, for the config not to be that of fused kernels."""
    named = {"weight_gradient": None, "aggregation": Int(8)} if name.startswith("int4") else {}
    return QConfig(fmt=parse(name), rounding="nearest", components=named, **options)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(N, K), torch.randn(M, K), torch.randn(M)
    x *= torch.logspace(-1, 1, K)  # blocks of other columns have other scales
    return {"x": x.to(dtype), "weight": weight.to(dtype), "bias": bias.to(dtype)}


UPSTREAM = torch.randn(N, M, generator=torch.Generator().manual_seed(2)) * torch.logspace(-1, 1, N)[:, None]


def run(config: QConfig | None, **options: Any) -> Callable[..., Tensor]:
    return lambda x, weight, bias=None: functional.linear(x, weight, bias, config=config, **options)


def rounded(x: Tensor, fmt: Format | None, dim: int) -> Tensor:
    """float64 values in a format along a dimension: the definition."""
    return x.double() if fmt is None else fmt.quantize(x.detach().float(), dim).double()


def expected(config: QConfig, x: Tensor, weight: Tensor, g: Tensor, dims: int = -1) -> dict[str, tuple[Tensor, Tensor]]:
    """Each product, and the sum of its terms' magnitudes; ``dims=0`` rounds along the wrong dimension."""
    fmt = {name: config.format_of(name) for name in ("activations", "weights", "output_gradient")}
    of_x, of_w, of_g = fmt.values()
    across = -1 - dims
    pairs = {
        "out": (rounded(x, of_x, dims), rounded(weight, of_w, dims).t()),
        "x": (rounded(g, of_g, dims), rounded(weight, of_w, across)),
        "weight": (rounded(g, of_g, across).t(), rounded(x, of_x, across)),
    }
    rows = all(f is None or (f.is_integer and f.scales_slices) for f in (of_x, of_g))
    if rows and None not in (of_x, of_g) and config.keeps_codes:  # scales of rows are folded into the gradient
        pairs["weight"] = (rounded(g, of_g, dims).t(), rounded(x, of_x, dims))
    return {key: (a @ b, a.abs() @ b.abs()) for key, (a, b) in pairs.items()}


def results(config: QConfig | None, tensors: dict[str, Tensor] | None = None, **options: Any) -> dict[str, Tensor]:
    tensors = inputs() if tensors is None else tensors
    y, grads = gradients(run(config, **options), tensors, UPSTREAM.to(tensors["x"].dtype))
    return {"out": y, **grads}


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@FORMATS
def test_linear_is_the_product_of_operands_rounded_along_the_sum(name: str, granularity: str) -> None:
    """fp32 sums of up to K terms; operands, scales and the bias see three more roundings."""
    if granularity == "tensor" and parse(name).scales_slices:
        pytest.skip("blocks are the same with either granularity; one scale for all has no dimension")
    config, t = config_of(name, granularity=granularity), inputs()
    actual = results(config)
    for key, (exact, magnitude) in expected(config, t["x"], t["weight"], UPSTREAM).items():
        if key == "out":
            exact, magnitude = exact + t["bias"].double(), magnitude + t["bias"].double().abs()
        assert_within(actual[key], exact, sum_bound(torch.tensor(K), magnitude, 4))
    assert_within(
        actual["bias"], UPSTREAM.double().sum(0), sum_bound(torch.tensor(N), UPSTREAM.double().abs().sum(0), 0)
    )


@FORMATS
def test_the_other_dimension_gives_something_else(name: str) -> None:
    """By more than a hundred times what sums in fp32 may be off."""
    config, t = config_of(name), inputs()
    actual, wrong = results(config), expected(config, t["x"], t["weight"], UPSTREAM, dims=0)
    for key, (exact, magnitude) in wrong.items():
        error = (actual[key].double() - exact - (t["bias"] if key == "out" else 0)).abs()
        assert error.max() > 100 * sum_bound(torch.tensor(K), magnitude, 4).max(), key


@pytest.mark.parametrize("name", ["fixed6", "msfp12", "mxint8", "fp8-e4m3"])
def test_rows_that_are_kept_as_they_are_are_rounded_along_the_sum(name: str) -> None:
    config, t = config_of(name, save="fp32"), inputs()
    exact, magnitude = expected(config, t["x"], t["weight"], UPSTREAM)["weight"]
    assert_within(results(config)["weight"], exact, sum_bound(torch.tensor(N), magnitude, 4))
    kept = saved_tensors(lambda: run(config)(*(v.requires_grad_() for v in t.values())))
    assert shares_memory(t["x"], kept)


CHANGES = {
    "activations": {"out", "weight"},
    "weights": {"out", "x"},
    "output_gradient": {"x", "weight"},
    "weight_gradient": {"weight"},
    "features": set(),
    "messages": set(),
    "aggregation": set(),
    "attention": set(),
}


@pytest.mark.parametrize("fmt", [Int(4), MSFP(3), MXFP4()], ids=str)
@pytest.mark.parametrize("component", CHANGES)
def test_a_component_changes_what_it_is_part_of(component: str, fmt: Format) -> None:
    """... and leaves the rest bit for bit that of full precision."""
    exact, actual = results(None), results(QConfig.only(**{component: fmt}, rounding="nearest"))
    for key, value in exact.items():
        if key in CHANGES[component]:
            error = float((actual[key] - value).norm() / value.norm())
            assert 0.01 < error < 0.4, (key, error)  # steps of 1/7 of a row's, or of a block's, largest value
        else:
            # a component of a product makes it run by itself, with a bias that is added elsewhere
            torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))


def test_the_weight_s_gradient_is_rounded_along_its_rows() -> None:
    """MXINT8 leaves alone what it rounded before."""
    dw = results(QConfig.only(weight_gradient=MXINT8(), rounding="nearest"))["weight"]
    assert torch.equal(dw, MXINT8().quantize(dw))
    assert not torch.equal(dw, MXINT8().quantize(dw, 0))


def test_what_needs_a_gradient_is_an_activation() -> None:
    t = inputs()
    x, weight = t["x"], t["weight"]
    only_features = QConfig.only(features=MSFP(1), rounding="nearest")
    only_activations = QConfig.only(activations=MSFP(1), rounding="nearest")
    plain = functional.linear(x, weight)
    coarse = functional.linear(MSFP(1).quantize(x), weight)
    for learns in (False, True):
        rows = x.clone().requires_grad_(learns)
        for config, is_coarse in ((only_features, not learns), (only_activations, learns)):
            y = functional.linear(rows, weight, config=config)
            torch.testing.assert_close(y, coarse if is_coarse else plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["int4", "msfp11", "mxfp4"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """Operands of one shape: two that shared random bits would show in the products."""
    torch.manual_seed(3)
    tensors, upstream = {"x": torch.randn(5, 5), "weight": torch.randn(5, 5)}, torch.randn(5, 5)
    fmt = parse(name)
    config = QConfig(fmt=fmt, components={"weights": fmt, "aggregation": fmt, "weight_gradient": fmt})
    exact, grads = gradients(run(None), {k: v.double() for k, v in tensors.items()}, upstream.double())

    def draw(seed: int) -> dict[str, Tensor]:
        y, drawn = gradients(run(config, seed=seed), tensors, upstream)
        return {"y": y, **drawn}

    if name == "int4":  # blocks of the others clamp the largest magnitudes
        assert_unbiased(draw, {"y": exact, **grads})
    first, again, other = (draw(seed) for seed in (1, 1, 2))
    for key, value in first.items():
        assert torch.equal(again[key], value)
        assert not torch.equal(other[key], value)


@FORMATS
def test_codes_that_are_given_are_those_of_a_product_s_own_rounding(name: str) -> None:
    config, t = config_of(name), inputs()
    q = functional.quantize(t["x"], config)
    assert (q.columns is not None) == (not (parse(name).is_integer and parse(name).scales_slices))
    (y, grads), (own, own_grads) = (
        gradients(lambda weight, rows=rows: functional.linear(rows, weight, config=config), {"weight": t["weight"]})
        for rows in (q, t["x"])
    )
    assert torch.equal(y, own)
    torch.testing.assert_close(grads["weight"], own_grads["weight"])
    sides = 1 if q.columns is None else 2
    values = sides * q.shape.numel() * parse(name).bits_per_value / 8
    slack = (N + K) * 16  # rows that do not fill their last block or byte, and scales of slices
    assert values <= q.nbytes <= values + slack


def test_codes_pass_their_gradient_to_their_origin() -> None:
    config, t = config_of("msfp12"), inputs()
    x = t["x"].requires_grad_()
    q = functional.quantize(x, config, straight_through=True)
    assert isinstance(q, QTensor)
    functional.linear(q, t["weight"], config=config).backward(UPSTREAM)
    expected_dx = results(config)["x"]
    assert torch.equal(x.grad, expected_dx)


@FORMATS
def test_epilogue_and_inputs_of_other_shapes(name: str) -> None:
    config, t = config_of(name), inputs()
    x, weight, bias = t.values()
    y = functional.linear(x, weight, bias, config=config)
    assert torch.equal(functional.linear(x, weight, bias, activation="relu", config=config), y.relu())
    dropped = functional.linear(x, weight, bias, dropout=0.5, config=config, seed=1)
    assert torch.equal(dropped, torch.where(dropped == 0, dropped, 2 * y))
    assert 0.3 < float((dropped == 0).double().mean()) < 0.7  # 5 deviations of 252 draws: 0.16
    if not parse(name).scales_slices:
        return
    sets = torch.stack([x, x.flip(0)])
    torch.testing.assert_close(functional.linear(sets, weight, bias, config=config), torch.stack([y, y.flip(0)]))
    for shape in ((0, K), (3, 0, K)):
        rows = torch.empty(shape, requires_grad=True)
        out, dw = functional.linear(rows, weight.requires_grad_(), bias, config=config), None
        dx, dw = torch.autograd.grad(out.sum(), (rows, weight))
        assert (out.shape, dx.shape) == ((*shape[:-1], M), shape)
        assert torch.equal(dw, torch.zeros(M, K))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int4", "int8-affine", "msfp12", "mxfp6-e2m3"])
def test_other_types(name: str, dtype: torch.dtype) -> None:
    """Values that all types hold: what is computed is that of fp32, and stored in the type."""
    config = config_of(name)
    tensors = {key: t.bfloat16().half().float() for key, t in inputs().items()}
    wide = gradients(run(config), tensors, UPSTREAM.bfloat16().float())
    y, grads = gradients(run(config), {k: t.to(dtype) for k, t in tensors.items()}, UPSTREAM.bfloat16().to(dtype))
    for actual, exact in ((y, wide[0]), *((grads[key], wide[1][key]) for key in grads)):
        assert actual.dtype == dtype
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * K)
        torch.testing.assert_close(actual.float(), exact, rtol=eps, atol=eps * float(exact.abs().max()))
    q = functional.quantize(tensors["x"].to(dtype), config)
    out = functional.linear(q, tensors["weight"].to(dtype), tensors["bias"].to(dtype), config=config)
    # the values that affine codes stand for are rounded to the type first
    error = 1 + K if name == "int8-affine" else 1
    torch.testing.assert_close(out.float(), wide[0], rtol=eps, atol=error * eps * float(wide[0].abs().max()))


@FORMATS
def test_a_product_keeps_packed_codes_of_its_rows(name: str) -> None:
    config, fmt = config_of(name), parse(name)
    t = {key: v.requires_grad_() for key, v in inputs().items()}
    kept = [v for v in saved_tensors(lambda: run(config)(**t)) if not shares_memory(v, [t["weight"]])]
    assert not shares_memory(t["x"], kept)
    rows = N if fmt.is_integer and fmt.scales_slices else K
    slack = rows * (4 + fmt.bits_per_value)  # a last block or byte of each slice, and its scale
    assert sum(v.untyped_storage().nbytes() for v in kept) <= N * K * fmt.bits_per_value / 8 + 2 * slack + 16
    constant = inputs()["weight"]
    assert sum(v.nbytes for v in saved_tensors(lambda: run(config)(t["x"], constant))) <= constant.nbytes


def test_inputs_are_left_alone() -> None:
    for name in ("int4", "msfp12", "mxfp6-e2m3"):
        assert_inputs_unchanged(run(config_of(name)), {k: v.requires_grad_() for k, v in inputs().items()})


@pytest.mark.parametrize("name", ["int4", "msfp12", "mxfp6-e2m3"])
def test_linear_has_no_second_derivatives(name: str) -> None:
    t = {key: v.requires_grad_() for key, v in inputs().items()}
    y = functional.linear(**t, config=config_of(name))
    (dx,) = torch.autograd.grad(y.square().sum(), t["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="'linear' has no second derivatives, which a gradient of a gradient"):
        dx.sum().backward()


def test_errors() -> None:
    with pytest.raises(ValueError, match="save='int8' or 'fp32' where operands have other formats than one symmetric"):
        QConfig(fmt=MSFP(3), save=Blocks())
    exact = QConfig.only(weights=Int(4))
    with pytest.raises(ValueError, match="'quantize' expects a format for the component 'features' in 'config'"):
        functional.quantize(torch.randn(3, 4), exact)
    with pytest.raises(ValueError, match=r"'linear' expects granularity 'row' or 'tensor' \(got 'block'\)"):
        functional.linear(torch.randn(3, 4), torch.randn(2, 4), config=QConfig(fmt=MXINT8(), granularity="block"))


@pytest.mark.parametrize(
    ("name", "fmt", "backend"),
    [
        ("int4", "int4", "c"),
        ("msfp12", "msfp12", "c"),
        ("mxint8", "mxint8", "c"),
        ("mxfp4", "mxfp4 in float32", "torch"),
    ],
)
def test_a_trace_says_what_was_emulated(name: str, fmt: str, backend: str) -> None:
    with trace() as record:
        results(config_of(name))
    rows = {op: row for op, row in record.ops.items() if op.startswith("matmul")}
    assert set(rows) == {"matmul.forward", "matmul.backward_dx", "matmul.backward_dw"}
    assert {row["format"] for row in rows.values()} == {fmt}
    assert {row["backend"].split("/")[0] for row in rows.values()} == {backend}
    mixed = QConfig.only(activations=Int(4), weights=MSFP(3), output_gradient=None)
    with trace() as record:
        results(mixed)
    assert record.ops["matmul.forward"]["format"] == "int4 x msfp12 in float32"


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by torch's own compiler
@traces_formats
@pytest.mark.parametrize("name", ["int4", "msfp12", "mxfp4"])
def test_linear_compiles_once_and_exports(name: str) -> None:
    config = config_of(name)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run(config), fullgraph=True, dynamic=True, backend=counter)
    for rows in (50, 90, 33):  # a single block of rows would be compiled anew
        x, weight = torch.randn(rows, K), inputs()["weight"]
        tensors = {"x": x, "weight": weight}
        (y, grads), (own, own_grads) = gradients(compiled, tensors), gradients(run(config), tensors)
        torch.testing.assert_close(y, own)
        for key, value in own_grads.items():
            torch.testing.assert_close(grads[key], value, rtol=1e-5, atol=1e-4)
    assert counter.frame_count == 1
    torch.compiler.reset()

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(inputs()["weight"])

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight, config=config)

    product = Product()
    dims = ({0: torch.export.Dim("rows", min=2, max=2**30)},)
    program = torch.export.export(product, (inputs()["x"],), dynamic_shapes=dims).module()
    for rows in (2, 100):
        x = torch.randn(rows, K)
        torch.testing.assert_close(program(x), product(x))


@pytest.mark.parametrize("fmt", [FixedPoint(8), Int(8), Int(4)], ids=str)
def test_codes_with_scales_of_columns_are_multiplied_by_them(fmt: Any) -> None:
    x = torch.randn(24, 24) * torch.arange(1.0, 25)[:, None]
    q, w = fmt.encode(x, 0), torch.randn(5, 24)
    y = functional.linear(q, w, config=QConfig.only(rounding="nearest", weights=FixedPoint(16)))
    assert (y - q.dequantize() @ w.t()).abs().max() <= 2.0**-13 * (q.dequantize().abs() @ w.abs().t()).max()


@pytest.mark.parametrize(("fmt", "rows"), [(MXFP4(), 16), (MSFP(3), 32)], ids=str)
def test_large_constants_are_decoded_by_parts(fmt: Format, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same products, however many parts: each row of a result is one of the rows. Values of a part take no more
    bytes than the twelve rows of the other operand, down to a power of two: 8 in fp32, but 16 at least; 32 of codes."""
    x, w = torch.randn(72, 80), torch.randn(12, 80, requires_grad=True)
    config = QConfig(fmt=fmt, rounding="nearest")
    whole = functional.linear(functional.quantize(x, config), w, config=config)
    whole.sum().backward()
    expected, w.grad = w.grad, None
    monkeypatch.setattr(_mixed, "CHUNK", 80 * 7)
    sizes: list[int] = []
    decode = _mixed.operand_of
    monkeypatch.setattr(_mixed, "operand_of", lambda q: sizes.append(q.shape[0]) or decode(q))
    parts = functional.linear(functional.quantize(x, config), w, config=config)
    parts.sum().backward()
    assert sizes == [min(rows, n - first) for n in (72, 80) for first in range(0, n, rows)]
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(w.grad, expected)
