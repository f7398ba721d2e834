"""What the stateless API answers to a wrong argument: what it expected, what came, what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import GRAPHS
from qgnn import Graph, QConfig, formats, functional

EDGES, N = GRAPHS["random"]
K, M = 6, 4
INT8 = QConfig()

Call = Callable[..., Tensor]


def linear(x: Any, weight: Any = None, bias: Any = None, config: Any = INT8, **options: Any) -> Tensor:
    return functional.linear(x, torch.randn(M, K) if weight is None else weight, bias, config=config, **options)


def spmm(x: Any, config: Any = INT8, edges: Any = EDGES, **options: Any) -> Tensor:
    return functional.spmm(edges, x, config=config, **options)


def graph_linear(
    x: Any, weight: Any = None, bias: Any = None, config: Any = INT8, edges: Any = EDGES, **options: Any
) -> Tensor:
    weight = torch.randn(M, K) if weight is None else weight
    return functional.graph_linear(edges, x, weight, bias, config=config, **options)


ALL = pytest.mark.parametrize("call", [linear, spmm, graph_linear], ids=lambda call: call.__name__)
PRODUCTS = pytest.mark.parametrize("call", [linear, graph_linear], ids=lambda call: call.__name__)
AGGREGATIONS = pytest.mark.parametrize("call", [spmm, graph_linear], ids=lambda call: call.__name__)
CONFIGS = pytest.mark.parametrize("config", [None, INT8], ids=["fp32", "int8"])


@ALL
@CONFIGS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_x_of_no_real_type_is_rejected(call: Call, config: QConfig | None, dtype: torch.dtype) -> None:
    message = rf"'{call.__name__}' expects 'x' in a floating-point type \(got {dtype}\); use 'x\.float\(\)'"
    with pytest.raises(TypeError, match=message):
        call(torch.ones(N, K, dtype=dtype), config=config)


@ALL
@CONFIGS
def test_x_that_is_no_tensor_is_rejected(call: Call, config: QConfig | None) -> None:
    with pytest.raises(TypeError, match=rf"'{call.__name__}' expects 'x' to be a tensor \(got list\)"):
        call([[1.0]], config=config)


@ALL
@CONFIGS
def test_sparse_x_is_rejected(call: Call, config: QConfig | None) -> None:
    with pytest.raises(TypeError, match=rf"'{call.__name__}' expects 'x' to be dense \(got layout .*use 'x.to_dense"):
        call(torch.ones(N, K).to_sparse(), config=config)


@AGGREGATIONS
@CONFIGS
@pytest.mark.parametrize("shape", [(K,), (N, 2, K)], ids=str)
def test_x_without_two_dimensions_is_rejected(call: Call, config: QConfig | None, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'x' with two dimensions \[N, F\] \(got \["):
        call(torch.ones(shape), config=config)


@PRODUCTS
@CONFIGS
def test_a_scalar_is_rejected(call: Call, config: QConfig | None) -> None:
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'x' with"):
        call(torch.tensor(1.0), config=config)


@AGGREGATIONS
@CONFIGS
def test_x_with_a_wrong_number_of_rows_is_rejected(call: Call, config: QConfig | None) -> None:
    too_few = int(EDGES.max())
    with pytest.raises(
        ValueError, match=rf"indices from 0 to {too_few - 1} \(got {too_few}\); check that 'x' has a row"
    ):
        call(torch.ones(too_few, K), config=config)
    graph = Graph.from_edge_index(EDGES, N)
    for rows in (N - 1, N + 1):
        message = rf"'{call.__name__}' expects 'x' with one row for each of the graph's {N} source nodes \(got {rows}\)"
        with pytest.raises(ValueError, match=message):
            call(torch.ones(rows, K), config=config, edges=graph)


@PRODUCTS
@CONFIGS
def test_widths_that_disagree_are_rejected(call: Call, config: QConfig | None) -> None:
    message = rf"'{call.__name__}' expects 'x' with {K} columns, as 'weight' \[{M}, {K}\] has \(got \[{N}, {K + 1}\]\)"
    with pytest.raises(ValueError, match=message):
        call(torch.ones(N, K + 1), config=config)


@PRODUCTS
@CONFIGS
def test_a_weight_that_is_no_float_matrix_is_rejected(call: Call, config: QConfig | None) -> None:
    for weight in (torch.ones(K), torch.ones(1, M, K), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'weight' with two dimensions"):
            call(torch.ones(N, K), weight, config=config)
    with pytest.raises(TypeError, match=rf"'{call.__name__}' expects 'weight' in a floating-point type"):
        call(torch.ones(N, K), torch.ones(M, K, dtype=torch.int8), config=config)


@PRODUCTS
@CONFIGS
@pytest.mark.parametrize("shape", [(K,), (1, M), (1,), ()], ids=str)
def test_a_bias_of_another_shape_is_rejected(call: Call, config: QConfig | None, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'bias' of shape \[{M}\] \(got \["):
        call(torch.ones(N, K), bias=torch.ones(shape), config=config)


@ALL
@pytest.mark.parametrize("config", [{"bits": 8}, 8, "int8", formats.Int(8)], ids=repr)
def test_a_config_of_another_type_is_rejected(call: Call, config: Any) -> None:
    message = rf"'{call.__name__}' expects 'config' to be a QConfig or None \(got .*config=qgnn.QConfig\(bits=8\)"
    with pytest.raises(TypeError, match=message):
        call(torch.ones(N, K), config=config)


@ALL
def test_block_scales_are_rejected_in_products(call: Call) -> None:
    message = rf"'{call.__name__}' expects granularity 'row' or 'tensor' \(got 'block'\); .*'qgnn.functional.quantize'"
    with pytest.raises(ValueError, match=message):
        call(torch.ones(N, K), config=QConfig(granularity="block"))


@AGGREGATIONS
@CONFIGS
@pytest.mark.parametrize("reduce", ["prod", "add", None])
def test_an_unknown_reduction_is_rejected(call: Call, config: QConfig | None, reduce: Any) -> None:
    with pytest.raises(ValueError, match=r"expects 'reduce' to be one of \('sum', 'mean'.*\) \(got "):
        call(torch.ones(N, K), config=config, reduce=reduce)


@AGGREGATIONS
@CONFIGS
def test_edge_weights_given_twice_are_rejected(call: Call, config: QConfig | None) -> None:
    weight = torch.rand(EDGES.shape[1])
    with pytest.raises(ValueError, match="got 'edge_weight' and a graph that has weights; give one of them"):
        call(torch.ones(N, K), config=config, edges=Graph.from_edge_index(EDGES, N, weight), edge_weight=weight)
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), weight, (N, N)).coalesce()
    with pytest.raises(ValueError, match="got 'edge_weight' and a graph that has weights; give one of them"):
        call(torch.ones(N, K), config=config, edges=matrix, edge_weight=weight[: matrix._nnz()])


@AGGREGATIONS
@CONFIGS
def test_edge_weights_of_another_shape_or_type_are_rejected(call: Call, config: QConfig | None) -> None:
    num_edges = EDGES.shape[1]
    for weight in (torch.rand(num_edges - 1), torch.rand(num_edges, 1, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=rf"'edge_weight' expects one value an edge, \[{num_edges}\] \(got \["):
            call(torch.ones(N, K), config=config, edge_weight=weight)
    with pytest.raises(ValueError, match=r"'edge_weight' expects a floating-point tensor \(got torch.int64\)"):
        call(torch.ones(N, K), config=config, edge_weight=torch.ones(num_edges, dtype=torch.int64))


# The meta device stands for a second device: tensors on it have a device and no values.


@PRODUCTS
@CONFIGS
def test_a_weight_on_another_device_is_rejected(call: Call, config: QConfig | None) -> None:
    message = rf"'{call.__name__}' expects 'weight' on cpu \(got meta\); move it with '.to\('cpu'\)'"
    with pytest.raises(ValueError, match=message):
        call(torch.ones(N, K), torch.ones(M, K, device="meta"), config=config)


@PRODUCTS
@CONFIGS
def test_a_bias_on_another_device_is_rejected(call: Call, config: QConfig | None) -> None:
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'bias' on cpu \(got meta\)"):
        call(torch.ones(N, K), bias=torch.ones(M, device="meta"), config=config)


@AGGREGATIONS
@CONFIGS
def test_x_on_another_device_than_the_graph_is_rejected(call: Call, config: QConfig | None) -> None:
    weight = {} if call is spmm else {"weight": torch.ones(M, K, device="meta")}
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'x' on cpu \(got meta\)"):
        call(torch.ones(N, K, device="meta"), config=config, edges=Graph.from_edge_index(EDGES, N), **weight)


@AGGREGATIONS
@CONFIGS
def test_edge_weights_on_another_device_are_rejected(call: Call, config: QConfig | None) -> None:
    weight = torch.ones(EDGES.shape[1], device="meta")
    with pytest.raises(ValueError, match=r"expects 'edge_weight' on cpu \(got meta\)"):
        call(torch.ones(N, K), config=config, edge_weight=weight)


@PRODUCTS
def test_quantized_features_that_products_cannot_take_are_rejected(call: Call) -> None:
    x = torch.randn(N, K)
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects symmetric int8 codes .*; quantize with"):
        call(functional.quantize(x, formats.Int(8, symmetric=False)))
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects one scale a row or one a tensor \(got scales"):
        call(functional.quantize(x, QConfig(granularity="block", block_size=2)))
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects one scale a row or one a tensor \(got scales"):
        call(formats.Int(8).encode(x, dim=0))


@ALL
@pytest.mark.parametrize("seed", ["1", 1.5, True, torch.tensor([1, 2]), torch.tensor([1.0])], ids=repr)
def test_a_seed_of_another_type_is_rejected(call: Call, seed: Any) -> None:
    with pytest.raises(TypeError, match="'seed' expects an int"):
        call(torch.ones(N, K), seed=seed)


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        (
            torch.ones(3, dtype=torch.int64),
            TypeError,
            r"'quantize' expects 'x' in a floating-point type \(got torch.int64",
        ),
        ([1.0], TypeError, r"'quantize' expects 'x' to be a tensor \(got list\)"),
        (torch.tensor(1.0), ValueError, r" expects .* with at least one dimension \(got a scalar\)"),
        (torch.ones(3, 3).to_sparse(), TypeError, r"'quantize' expects 'x' to be dense"),
    ],
)
def test_quantize_rejects(argument: Any, error: type[Exception], message: str) -> None:
    for config in (QConfig(), formats.Int(8)):
        with pytest.raises(error, match=message):
            functional.quantize(argument, config)


def test_quantize_and_dequantize_reject_other_objects() -> None:
    with pytest.raises(TypeError, match=r"'quantize' expects 'config' to be a QConfig or None \(got 8\)"):
        functional.quantize(torch.ones(3), 8)
    with pytest.raises(TypeError, match=r"'dequantize' expects a QTensor \(got Tensor\)"):
        functional.dequantize(torch.ones(3))


X = torch.randn(30, 13)
BAD_ACTIVATIONS: list[tuple[type[Exception], dict[str, Any], str]] = [
    (TypeError, {"x": X.int()}, r"'x' in a floating-point type \(got torch.int32\)"),
    (ValueError, {"x": X[0, 0]}, r"'x' with at least one dimension \(got a scalar\)"),
    (ValueError, {"kind": "gelu"}, r"'kind' to be one of \('relu', 'leaky_relu', 'elu'\) or None \(got 'gelu'\)"),
    (ValueError, {"kind": "none"}, r"'kind' to be one of .* or None \(got 'none'\)"),
    (ValueError, {"dropout": 1.5}, r"'dropout' to be a probability from 0 to 1 \(got 1.5\)"),
    (ValueError, {"bias": X[0, 1:]}, r"'bias' of shape \[13\] \(got \[12\]\)"),
    (TypeError, {"bias": X[0].int()}, r"'bias' in a floating-point type \(got torch.int32\)"),
    (ValueError, {"bias": X[0].to("meta")}, r"'bias' on cpu \(got meta\); move it"),
    (ValueError, {"residual": X[1:]}, r"'residual' of shape \[30, 13\] \(got \[29, 13\]\)"),
    (
        TypeError,
        {"residual": X.half()},
        r"'residual' in torch.float32, as 'x' is \(got torch.float16\); use 'residual.to",
    ),
    (ValueError, {"negative_slope": float("nan")}, r"'negative_slope' to be finite \(got nan\)"),
    (ValueError, {"alpha": -1.0}, r"'alpha' to be a finite number from 0 on \(got -1.0\)"),
    (ValueError, {"alpha": float("inf")}, r"'alpha' to be a finite number from 0 on \(got inf\)"),
    (TypeError, {"config": 8}, r"'config' to be a QConfig or None \(got 8\)"),
]


@pytest.mark.parametrize(("error", "change", "message"), BAD_ACTIVATIONS)
def test_activation_refuses(error: type[Exception], change: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=f"^'activation' expects {message}"):
        functional.activation(**{"x": X} | change)
