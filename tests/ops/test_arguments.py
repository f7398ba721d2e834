"""Every operator refuses what its kernels would read or write beyond the end of, whoever calls it."""

import re
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from op_arguments import GRAPH, OPERATORS, E, F, H, K, S, T, arguments_of, codes, exponents
from op_checks import PLAIN_PRODUCT
from qgnn import QConfig
from qgnn.nn import QLinear
from qgnn.ops import _checks


def call(name: str, **change: Any) -> Any:
    return getattr(torch.ops.qgnn, name)(**arguments_of(name) | change)


def on_meta(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_arguments_here_are_right(name: str) -> None:
    """Otherwise the other tests would show nothing."""
    results, fakes = call(name), getattr(torch.ops.qgnn, name)(**on_meta(arguments_of(name)))
    for result, fake in zip(*([r] if isinstance(r, Tensor) else r for r in (results, fakes)), strict=True):
        assert (result.shape, result.dtype) == (fake.shape, fake.dtype)


SEVEN = torch.rand(E)
LONG_POINTERS = torch.tensor([0, 2, 3, 3, 8], dtype=torch.int32)
FALLING_POINTERS = torch.tensor([0, 5, 3, 3, 7], dtype=torch.int32)
BAD = [
    ("spmm", ValueError, {"weight": torch.rand(E - 1)}, "'weight' of shape [E] or [E, H] with E = 7 (got [6])"),
    ("spmm", ValueError, {"weight": torch.rand(E, 4), "weight_t": None}, "F to be a multiple of H (got F = 6, H = 4)"),
    ("spmm", ValueError, {"weight": torch.rand(E, 0), "weight_t": None}, "F to be a multiple of H (got F = 6, H = 0)"),
    ("spmm", ValueError, {"weight_t": torch.rand(E + 1)}, "'weight_t' of shape [E] or [E, H] with E = 7 (got [8])"),
    ("spmm", ValueError, {"weight_t": torch.rand(E, 3)}, "'weight_t' of the shape of 'weight', [7] (got [7, 3])"),
    ("spmm", ValueError, {"dropout_seed": None}, "'dropout_seed' with a 'threshold' (got None)"),
    ("spmm", ValueError, {"threshold": 65537}, "'threshold' to be from 0 to 65536 (got 65537)"),
    ("spmm", ValueError, {"dropout_seed": torch.tensor(1)}, "'dropout_seed' as one torch.int64, of shape [1]"),
    ("spmm", ValueError, {"row_factor": torch.rand(T - 1)}, "'row_factor' of shape [T] with T = 4 (got [3])"),
    ("spmm", ValueError, {"bias": torch.rand(F - 1)}, "'bias' of shape [F] with F = 6 (got [5])"),
    ("spmm", ValueError, {"x": torch.randn(S)}, "'x' of shape [S, F] (got [5])"),
    ("spmm", ValueError, {"x": torch.randn(S - 1, F)}, "'index' from 0 to 3 (got 4)"),
    ("spmm", ValueError, {"x": codes(S, F), "x_scale": torch.rand(3)}, "'x_scale' of shape [S] or [1] with S = 5"),
    ("spmm", TypeError, {"x_scale": torch.rand(S)}, "'x' as int8 codes, since it has a scale (got torch.float32)"),
    ("spmm", TypeError, {"x": codes(S, F)}, "'x' in a floating-point type (got torch.int8); int8 codes come with"),
    ("spmm", TypeError, {"index": GRAPH.csr.index.short()}, "'index' in torch.int32 or torch.int64 (got torch.int16)"),
    ("spmm", ValueError, {"indptr": torch.empty(0, dtype=torch.int32)}, "'indptr' of shape [T+1] (got [0])"),
    ("spmm", ValueError, {"indptr": LONG_POINTERS}, "'indptr' to rise from 0 to the number of edges, 7"),
    ("spmm", ValueError, {"indptr": FALLING_POINTERS}, "'indptr' to rise from 0 to the number of edges, 7"),
    ("spmm", ValueError, {"indptr": GRAPH.csr.indptr + 1}, "'indptr' to rise from 0"),
    ("spmm", ValueError, {"index": GRAPH.csr.index - 1}, "'index' from 0 to 4 (got -1)"),
    ("spmm", ValueError, {"seed": torch.tensor([1, 2])}, "'seed' as one torch.int64, of shape [1] (got torch.int64 of"),
    ("spmm", ValueError, {"seed": torch.tensor([1], dtype=torch.int32)}, "'seed' as one torch.int64"),
    ("spmm", ValueError, {"bits": 1}, "'bits' to be one of (0, 2, 3, 4, 5, 6, 7, 8) (got 1)"),
    ("spmm", ValueError, {"granularity": "block"}, "'granularity' to be one of ('row', 'tensor') (got 'block')"),
    ("spmm", ValueError, {"weight": SEVEN.to("meta")}, "'weight' on cpu, where its first argument is (got meta)"),
    ("spmm", TypeError, {"x": None}, "'x' to be a tensor (got None)"),
    ("spmm", TypeError, {"row_factor": torch.rand(T).double()}, "'row_factor' in torch.float32 (got torch.float64)"),
    ("spmm", TypeError, {"weight": SEVEN.to(torch.float8_e5m2)}, "'weight' in a floating-point type (got torch.float8"),
    ("spmm_backward", TypeError, {"x_scale": torch.rand(S).half()}, "'x_scale' in torch.float32 (got torch.float16)"),
    ("spmm_backward", ValueError, {"grad": torch.randn(T + 1, F)}, "'indptr' of shape [T+1] with T = 5 (got [5])"),
    ("spmm_backward", ValueError, {"indptr_t": LONG_POINTERS}, "'x' of shape [S, F] with F = 6, S = 4 (got [5, 6])"),
    ("spmm_backward", ValueError, {"index_t": GRAPH.csc.index + 1}, "'index_t' from 0 to 3 (got 4)"),
    ("spmm_backward", ValueError, {"order_t": GRAPH.csc.order - 1}, "'order_t' from 0 to 6 (got -1)"),
    ("spmm_backward", ValueError, {"mask": torch.zeros(T, 2).byte()}, "'mask' of shape [T, F/8] with F = 6, T = 4"),
    ("spmm_backward", TypeError, {"mask": torch.zeros(T, 1)}, "'mask' in torch.uint8, as the forward pass made it"),
    ("spmm_extremum", ValueError, {"weight": torch.rand(E + 1)}, "'weight' of shape [E] with E = 7"),
    (
        "spmm_extremum_backward",
        ValueError,
        {"num_sources": S - 1},
        "'x' of shape [S, F] with F = 6, S = 4 (got [5, 6])",
    ),
    ("spmm_extremum_backward", ValueError, {"index": GRAPH.csr.index + 1}, "'index' from 0 to 4 (got 5)"),
    ("spmm_extremum_backward", ValueError, {"arg": torch.zeros(T, 1).int()}, "'arg' of shape [T, F] with F = 6, T = 4"),
    ("spmm_extremum_backward", ValueError, {"arg": torch.full((T, F), E)}, "'arg' from -1 to 6 (got 7)"),
    ("spmm_extremum_backward", ValueError, {"arg": torch.full((T, F), -2)}, "'arg' from -1 to 6 (got -2)"),
    ("incidence_sum", ValueError, {"edge_x": torch.randn(E - 1, F)}, "'order' of shape [E] with E = 6 (got [7])"),
    ("incidence_sum", ValueError, {"order": GRAPH.csr.order + 1}, "'order' from 0 to 6 (got 7)"),
    ("incidence_sum", ValueError, {"node": GRAPH.csr.order}, "'node' from 0 to 3 (got 6)"),
    ("incidence_sum", TypeError, {"edge_x": codes(E, F)}, "'edge_x' in a floating-point type (got torch.int8)"),
    ("incidence_sum_backward", ValueError, {"grad": torch.randn(2, F)}, "'node' from 0 to 1 (got 3)"),
    ("sddmm", ValueError, {"op": "mul"}, "'op' to be one of ('dot', 'add') (got 'mul')"),
    ("sddmm", ValueError, {"heads": 4}, "'x_target' of shape [T, H*D] with H = 4 (got [4, 6])"),
    ("sddmm", ValueError, {"heads": 0}, "'heads' to be at least 1 (got 0)"),
    (
        "sddmm",
        ValueError,
        {"x_source": torch.randn(S, F + H)},
        "'x_source' of shape [S, H*D] with D = 2, H = 3 (got [5, 9])",
    ),
    ("sddmm_backward", ValueError, {"target_scale": torch.rand(T, 2)}, "'target_scale' of shape [T] or [T, H] or [1]"),
    ("sddmm_backward", ValueError, {"grad": torch.randn(E - 1, H)}, "'grad' of shape [E] or [E, F] with E = 7"),
    ("sddmm_backward", ValueError, {"grad": torch.randn(E, 1)}, "'grad' of shape [E, 3] (got [7, 1])"),
    ("sddmm_backward", ValueError, {"grad": torch.randn(E)}, "'grad' with two dimensions (got [7])"),
    ("softmax", ValueError, {"indptr": LONG_POINTERS}, "'indptr' to rise from 0 to the number of edges, 7"),
    ("softmax_backward", ValueError, {"out": torch.rand(E, H + 1)}, "'out' of shape [E, H] with E = 7, H = 3"),
    ("attention", ValueError, {"x": torch.randn(S, F + 1)}, "'x' of shape [S, H*D] with H = 3, S = 5 (got [5, 7])"),
    ("attention", ValueError, {"score_source": torch.randn(S, 2)}, "'score_source' of shape [S, H] with H = 3"),
    ("attention", ValueError, {"edge_attr": torch.randn(E - 1, K)}, "'edge_attr' of shape [E, K] with E = 7"),
    ("attention", ValueError, {"edge_weight": torch.randn(F, K)}, "'edge_weight' of shape [H, K] with H = 3, K = 2"),
    ("attention", ValueError, {"edge_order": None}, "together (got no 'edge_order')"),
    ("attention", ValueError, {"edge_order": GRAPH.csr.order + 1}, "'edge_order' from 0 to 6 (got 7)"),
    ("attention", ValueError, {"index": GRAPH.csr.index + 1}, "'index' from 0 to 4 (got 5)"),
    ("attention", ValueError, {"dropout_seed": None}, "'dropout_seed' with a 'threshold' (got None)"),
    ("attention", TypeError, {"x": codes(S, F)}, "'x' in a floating-point type (got torch.int8); int8 codes come with"),
    ("attention_backward", ValueError, {"x_scale": torch.rand(S)}, "'x_scale' of shape [S, H] with H = 3, S = 5"),
    ("attention_backward", ValueError, {"lse": torch.rand(T, 2)}, "'lse' of shape [T, H] with H = 3, T = 4"),
    ("attention_backward", ValueError, {"index_t": GRAPH.csc.index + 1}, "'index_t' from 0 to 3 (got 4)"),
    ("attention_gatv2", ValueError, {"att": torch.randn(H, 3)}, "'x_target' of shape [T, H*D] with D = 3, H = 3"),
    ("attention_gatv2", ValueError, {"edge_weight": torch.randn(H, K)}, "'edge_weight' of shape [H*D, K] with D = 2"),
    ("attention_gatv2_backward", ValueError, {"order_t": GRAPH.csc.order - 1}, "'order_t' from 0 to 6 (got -1)"),
    (
        "attention_gatv2",
        ValueError,
        {"x_target": codes(T, F), "target_scale": torch.rand(T, H), "bits": 0},
        "all rows as codes with scales, or none (got no 'source_scale')",
    ),
    (
        "attention_dot_backward",
        ValueError,
        {"key": torch.randn(S, F), "key_scale": None},
        "all rows as codes with scales, or none (got no 'key_scale')",
    ),
    ("attention", ValueError, {"score_target": torch.randn(T, 0)}, "'score_source' of shape [S, H] with H = 0"),
    ("attention_gatv2", ValueError, {"att": torch.randn(0, 2)}, "'x_target' of shape [T, H*D] with D = 2, H = 0"),
    ("attention_dot", TypeError, {"value": torch.randn(S, F).half()}, "rows of one type (got torch.float32 and torch."),
    ("attention_dot", ValueError, {"heads": 4}, "'query' of shape [T, H*D] with H = 4 (got [4, 6])"),
    ("attention_dot", ValueError, {"key": torch.randn(S - 1, F)}, "'value' of shape [S, H*D] with D = 2, H = 3, S = 4"),
    ("attention_dot_backward", TypeError, {"key": torch.randn(S, F)}, "'key' as int8 codes, since it has a scale"),
    ("attention_scores", ValueError, {"score_source": torch.rand(2, H)}, "'index' from 0 to 1 (got 4)"),
    ("attention_scores_backward", ValueError, {"order_t": GRAPH.csc.order + 1}, "'order_t' from 0 to 6 (got 7)"),
    ("matmul", ValueError, {"bias": torch.rand(1)}, "'bias' of shape [M] with M = 3 (got [1])"),
    ("matmul", ValueError, {"bits": 0}, "'bits' to be from 2 to 8 (got 0)"),
    ("matmul", TypeError, {"weight": codes(H, F)}, "'weight' in a floating-point type (got torch.int8)"),
    (
        "matmul_backward",
        ValueError,
        {"grad": torch.randn(S, H - 1)},
        "'weight' of shape [M, K] with M = 2 (got [3, 6])",
    ),
    (
        "matmul_backward",
        ValueError,
        {"grad": torch.randn(S, 9), "weight": torch.randn(9, F), "mask": torch.zeros(2, S).byte().t()},
        "'mask' to be contiguous, as the forward pass made it",
    ),
    ("matmul", ValueError, {"low": None}, "'packed', 'low', 'step' and 'packed_seed' together (got no 'low')"),
    ("matmul", ValueError, {"packed_seed": None}, "'packed_seed' together (got no 'packed_seed')"),
    ("matmul", ValueError, {"step": torch.rand(3)}, "'step' of shape [B] with B = 2 (got [3])"),
    ("matmul", ValueError, {"packed_bits": 3}, "'packed_bits' to be one of (1, 2, 4, 8) (got 3)"),
    ("matmul_backward", TypeError, {"packed": codes(2, 4)}, "'packed' in torch.uint8, as 'blocks_pack' made it"),
    ("matmul_backward", ValueError, {"packed_bits": 4}, "'edges' in torch.float32, of shape [16] for 4-bit codes"),
    ("matmul_backward", ValueError, {"projection": 1 << 16}, "'projection' to be from 0 to 65535 (got 65536)"),
    ("graph_linear_backward", ValueError, {"packed_seed": torch.tensor(1)}, "'packed_seed' as one torch.int64, of"),
    (
        "graph_linear_backward",
        ValueError,
        {"edges": torch.tensor([0, 2.0, 1, 3])},
        "'edges' to rise from 0 to 3 by at least",
    ),
    ("graph_linear", ValueError, {"edge_weight": torch.rand(E - 1)}, "'edge_weight' of shape [E] or [E, H] with E = 7"),
    ("graph_linear_backward", ValueError, {"hidden": codes(S, F)}, "'hidden' of shape [S, M] with M = 3, S = 5"),
    (
        "activation",
        ValueError,
        {"kind": "gelu"},
        "'kind' to be one of ('none', 'relu', 'leaky_relu', 'elu') (got 'gelu')",
    ),
    ("activation", ValueError, {"bias": torch.rand(F + 1)}, "'bias' of shape [F] with F = 6 (got [7])"),
    ("activation", ValueError, {"residual": torch.randn(S - 1, F)}, "'residual' of shape [N, F] with F = 6, N = 5"),
    (
        "activation",
        TypeError,
        {"residual": torch.randn(S, F).half()},
        "'residual' in torch.float32, as 'x' is (got torch",
    ),
    ("activation", ValueError, {"dropout_seed": None}, "'dropout_seed' with a 'threshold' (got None)"),
    (
        "activation_backward",
        ValueError,
        {"mask": torch.zeros(S, 2).byte()},
        "'mask' of shape [N, F/8] with F = 6, N = 5",
    ),
    ("activation_backward", ValueError, {"derivative": torch.zeros(S, 1).byte()}, "'derivative' of shape [N, F] with"),
    ("activation_backward", ValueError, {"kind": "elu"}, "'derivative' of kind 'elu' (got None)"),
    ("activation_backward", ValueError, {"derivative": torch.zeros(F, S).t()}, "'derivative' to be contiguous, as the"),
    (
        "activation_backward",
        TypeError,
        {"derivative": codes(S, F)},
        "'derivative' in a floating-point type (got torch.int8)",
    ),
    ("adjacency_filter", TypeError, {"keep": torch.ones(E).byte()}, "'keep' in torch.bool (got torch.uint8)"),
    ("adjacency_filter", ValueError, {"keep": torch.ones(E - 1).bool()}, "'keep' of shape [E] with E = 7 (got [6])"),
    ("adjacency_filter", ValueError, {"order": GRAPH.csr.order + 1}, "'order' from 0 to 6 (got 7)"),
    ("adjacency_filter", ValueError, {"indptr": FALLING_POINTERS}, "'indptr' to rise from 0 to the number of edges, 7"),
    ("adjacency_filter", ValueError, {"number": torch.arange(S - 1)}, "'index' from 0 to 3 (got 4)"),
    ("adjacency_merge", ValueError, {"new_row": torch.tensor([0, 3, 4])}, "'new_row' from 0 to 3 (got 4)"),
    ("adjacency_merge", ValueError, {"new_order": torch.arange(2)}, "'new_order' of shape [A] with A = 3 (got [2])"),
    ("adjacency_merge", ValueError, {"new_weight": None}, "'weight' and 'new_weight' together (got no 'new_weight')"),
    (
        "adjacency_merge",
        TypeError,
        {"new_index": torch.rand(3)},
        "'new_index' in torch.int32 or torch.int64 (got torch.",
    ),
    ("quantize", ValueError, {"granularity": "rwo"}, "one of ('row', 'tensor', 'block') (got 'rwo')"),
    ("quantize", ValueError, {"bits": 16}, "'bits' to be from 2 to 8 (got 16)"),
    ("quantize", ValueError, {"block_size": 0}, "'block_size' to be at least 1 (got 0)"),
    ("quantize", ValueError, {"seed": torch.tensor(1)}, "'seed' as one torch.int64, of shape [1]"),
    ("quantize_dequantize", ValueError, {"block_size": -1}, "'block_size' to be from 0 to"),
    ("quantize_dequantize", ValueError, {"mantissa_bits": 17}, "'mantissa_bits' to be from 0 to 16 (got 17)"),
    ("quantize_dequantize", ValueError, {"min_exponent": -17}, "'min_exponent' to be from -16 to 16 (got -17)"),
    ("quantize_dequantize", ValueError, {"high": 0.0}, "'high' above 0 and up to 65536 (got -6.0 and 0.0)"),
    ("quantize_dequantize", ValueError, {"low": float("nan")}, "'low' from -65536 to 0"),
    ("quantize_dequantize", ValueError, {"x": torch.randn(S)}, "'x' of shape [R, C] (got [5])"),
    ("quantize_dequantize", ValueError, {"seed": torch.tensor(1)}, "'seed' as one torch.int64, of shape [1]"),
    ("quantize_shared", TypeError, {"x": codes(S, F)}, "'x' in a floating-point type (got torch.int8)"),
    ("quantize_shared", ValueError, {"affine": True}, "a grid of integers of at most 8 bits with a shared power of"),
    ("quantize_shared", ValueError, {"high": 200.0}, "a grid of integers of at most 8 bits with a shared power of"),
    (
        "matmul_codes",
        TypeError,
        {"x": torch.randn(S, F)},
        "'x' as int8 codes, since it has a scale (got torch.float32)",
    ),
    ("matmul_codes", ValueError, {"weight_scale": torch.rand(2)}, "'weight_scale' of shape [M] or [1] with M = 3"),
    ("matmul_codes", ValueError, {"pass_": "backward"}, "one of ('forward', 'backward_dx', 'backward_dw')"),
    ("matmul_codes", ValueError, {"bias": torch.randn(1)}, "'bias' of shape [M] with M = 3 (got [1])"),
    ("matmul_codes_dw", ValueError, {"x": codes(S + 1, F)}, "'x' of shape [N, K] with N = 5 (got [6, 6])"),
    ("matmul_codes_dw", TypeError, {"grad": torch.randn(S, H)}, "'grad' as int8 codes, since it has a scale"),
    ("matmul_codes_dw", TypeError, {"x_scale": torch.rand(S).half()}, "'x_scale' in torch.float32 (got torch.float16)"),
    ("matmul_shared", ValueError, {"x_exponent": exponents(S, 1)}, "of shape [N, K/G] with G = 4, K = 6, N = 5 (got"),
    ("matmul_shared", ValueError, {"block_size": 6}, "'x_exponent' of shape [N, K/G] with G = 6, K = 6, N = 5"),
    ("matmul_shared", ValueError, {"weight_exponent": exponents(H, 3)}, "of shape [M, K/G] with G = 4, K = 6, M = 3"),
    ("matmul_shared", ValueError, {"block_size": 129}, "'block_size' to be from 1 to 128 (got 129)"),
    ("matmul_shared", ValueError, {"fraction_bits": 23}, "'fraction_bits' to be from 0 to 22 (got 23)"),
    ("matmul_shared", TypeError, {"weight_exponent": codes(H, 2)}, "'weight_exponent' in torch.uint8, biased by 127"),
    ("matmul_shared", TypeError, {"x": torch.randn(S, F)}, "'x' as int8 codes, since it has a scale (got torch.float"),
    ("blocks_pack", ValueError, {"seed": torch.tensor([1.0])}, "'seed' as one torch.int64"),
    (
        "blocks_pack",
        ValueError,
        {"projection_seed": torch.tensor(1)},
        "'projection_seed' as one torch.int64, of shape [1]",
    ),
    ("blocks_pack", ValueError, {"edges": torch.rand(3)}, "'edges' in torch.float32, of shape [4] for 2-bit codes"),
    ("blocks_pack", ValueError, {"edges": torch.tensor([0, 2.0, 1, 3])}, "'edges' to rise from 0 to 3 by at least"),
    (
        "blocks_pack",
        ValueError,
        {"x": torch.rand(9)},
        "'x' of shape [N, F] with a 'projection' of its columns (got [9])",
    ),
    ("blocks_unpack", ValueError, {"projection_seed": None}, "'projection_seed' with a 'projection' (got None)"),
    ("blocks_unpack", ValueError, {"edges": torch.tensor([0, 1, 2, 4.0])}, "'edges' to rise from 0 to 3 by at least"),
    ("blocks_unpack", ValueError, {"low": torch.ones(2)}, "'low' of shape [B] with B = 3 (got [2])"),
]


@pytest.mark.parametrize(("name", "error", "change", "message"), BAD)
def test_operators_refuse(name: str, error: type[Exception], change: dict[str, Any], message: str) -> None:
    call(name)  # what passed is remembered: not this
    with pytest.raises(error, match=rf"^'qgnn::{name}' expects .*{re.escape(message)}"):
        call(name, **change)
    looks_at_values = "rise from" in message or "from 0 to" in message or "from -1 to" in message
    if looks_at_values or "meta" in message:
        return
    with pytest.raises(error, match=re.escape(message)):  # so does the fake
        getattr(torch.ops.qgnn, name)(**on_meta(arguments_of(name) | change))


def test_every_operator_is_among_the_bad_inputs() -> None:
    assert {name for name, *_ in BAD} == set(OPERATORS)


def test_integer_sums_are_limited_to_what_int32_holds() -> None:
    wide = {"x": torch.ones(1, _checks.MAX_TERMS + 1), "weight": torch.ones(1, _checks.MAX_TERMS + 1), "bias": None}
    for name in ("matmul", "graph_linear"):
        with pytest.raises(ValueError, match=rf"'qgnn::{name}' sums at most 131072 products .*K = 131073"):
            getattr(torch.ops.qgnn, name)(**on_meta(arguments_of(name) | wide))
    widest = {"x": torch.ones(1, _checks.MAX_TERMS), "weight": torch.ones(1, _checks.MAX_TERMS), "bias": None}
    y, *_ = call("matmul", **widest, seed=None, threshold=0)
    torch.testing.assert_close(y, torch.full((1, 1), float(_checks.MAX_TERMS)))


def test_indices_are_searched_once() -> None:
    """... while they live unchanged: a write to them is noticed."""
    arguments = arguments_of("spmm")
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for check in (_checks._check_pointers, _checks._check_indices):
            patch.setattr(_checks, check.__name__, lambda *args, check=check: seen.append(args[1]) or check(*args))
        for _ in range(3):
            torch.ops.qgnn.spmm(**arguments)
            assert seen == ["indptr", "index"]
        arguments["index"][0] = S
        with pytest.raises(ValueError, match=f"'index' from 0 to {S - 1} \\(got {S}\\)"):
            torch.ops.qgnn.spmm(**arguments)


@pytest.mark.parametrize("name", ["spmm", "spmm_backward", "sddmm", "sddmm_backward", "attention_scores_backward"])
@pytest.mark.parametrize("wide", ["indptr", "index", "indptr_t", "order_t"])
@pytest.mark.parametrize("double", [False, True])
def test_index_types_may_differ(name: str, wide: str, double: bool) -> None:
    arguments = arguments_of(name)
    if double:  # float64 is plain PyTorch's
        floats = {k: t for k, t in arguments.items() if isinstance(t, Tensor) and t.dtype == torch.float32}
        arguments |= {k: t.double() for k, t in floats.items() if not k.endswith("scale")}
    function = getattr(torch.ops.qgnn, name)
    expected, results = function(**arguments), function(**arguments | {wide: arguments[wide].long()})
    for result, value in zip(*([r] if isinstance(r, Tensor) else r for r in (results, expected)), strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize(("name", "weight"), [("spmm_backward", "weight"), ("graph_linear_backward", "edge_weight")])
def test_weights_of_both_orders_have_one_shape(name: str, weight: str) -> None:
    with pytest.raises(ValueError, match=rf"^'qgnn::{name}' expects '{weight}_t' of the shape of '{weight}', \[7\]"):
        call(name, **{f"{weight}_t": torch.rand(E, H)})


@pytest.mark.parametrize("name", ["spmm", "spmm_extremum"])
def test_rows_that_are_not_rounded_have_no_codes_to_keep(name: str) -> None:
    results = call(name, bits=0, keep_codes=True)
    kept = results[1:3] if name == "spmm" else results[2:]
    assert [t.numel() for t in kept] == [0, 0]


def test_threads_share_what_is_remembered() -> None:
    """Each thread brings indices of its own beside shared pointers, so entries come and go under one key."""
    indptr, failures = GRAPH.csr.indptr.clone(), []

    def work() -> None:
        try:
            for _ in range(300):
                call("spmm", indptr=indptr, index=GRAPH.csr.index.clone())
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_sizes_that_depend_on_data_compile() -> None:
    """The fake cannot know whether two of them are the same; the call itself does."""
    layer, x, w = QLinear(F, H, config=QConfig(rounding="nearest")), torch.randn(9, F), torch.randn(H, F)
    x_q, x_scale = codes(9, F), torch.rand(9)

    def of_some(mask: Tensor, scale_mask: Tensor) -> tuple[Tensor, Tensor]:
        options = (w, None, None, 8, "row", False, *PLAIN_PRODUCT)
        return layer(x[mask]), torch.ops.qgnn.matmul(x_q[mask], x_scale[scale_mask], *options)[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(of_some, backend="aot_eager", dynamic=True, fullgraph=True)
        for rows in (5, 2):
            mask = torch.arange(9) < rows
            for result, expected in zip(compiled(mask, mask), of_some(mask, mask), strict=True):
                assert torch.equal(result, expected)
        with pytest.raises(ValueError, match=r"'x_scale' of shape \[N\] or \[1\] with N = 5 \(got \[4\]\)"):
            compiled(torch.arange(9) < 5, torch.arange(9) < 4)


@given(st.data())
def test_a_wrong_argument_never_gets_through(data: st.DataObject) -> None:
    """Any tensor with another shape or type either raises one of our errors or is a legal call of its own."""
    name = data.draw(st.sampled_from(OPERATORS))
    arguments = arguments_of(name)
    victim = data.draw(st.sampled_from([k for k, v in arguments.items() if isinstance(v, Tensor)]))
    t = arguments[victim]
    shape = data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    dtype = data.draw(st.sampled_from([t.dtype, torch.int8, torch.int32, torch.int64, torch.float32, torch.float16]))
    value = data.draw(st.sampled_from([-9, 0, 3, 2**31 - 1]))
    changed = torch.full(shape, min(value, torch.iinfo(dtype).max) if not dtype.is_floating_point else 1.0, dtype=dtype)
    message = f"'qgnn::{name}'"
    try:
        call(name, **{victim: changed})
    except (ValueError, TypeError) as error:
        message = str(error)
    assert message.startswith((f"'qgnn::{name}'", "'sddmm'"))
