"""The calls of launchers that are compiled, by name; a kernel that none of them launches fails a test.

To add one: a line in ``make_cases``, for a new kernel another one in ``work.WORK`` and its budget in
tests/machine_budgets.py. The same calls run on a GPU where compute-sanitizer watches them: ``bench.sanitize``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from qgnn.kernels.activation import activation, activation_backward
from qgnn.kernels.blocks import blocks_pack, blocks_unpack
from qgnn.kernels.codes import codes_pack, codes_unpack
from qgnn.kernels.matmul import matmul, matmul_dw, matmul_requantize, quantize_matmul, quantize_matmul_requantize
from qgnn.kernels.matmul_shared import matmul_shared
from qgnn.kernels.memory import empty_codes
from qgnn.kernels.quantize import quantize, quantize_grad
from qgnn.kernels.quantize_grid import quantize_dequantize, quantize_shared
from qgnn.kernels.sddmm import sddmm
from qgnn.kernels.softmax import attention_scores, attention_scores_backward, softmax, softmax_backward
from qgnn.kernels.spmm import spmm, spmm_extremum, spmm_requantize
from torch import Tensor

from qgnn.activation import Activation, mask_width
from qgnn.rounding import Grid

from .attention import ATTENTION_MAIN, AttentionInputs, attention_cases

MEAN_DEGREE = 14
FIXED8, AFFINE8 = Grid(0, True, 0, 7, 7, 7, -128, 127, False), Grid(0, False, 0, 0, 0, 0, -128, 127, True)
MSFP12, MXFP8 = Grid(16, True, 0, 3, 3, 3, -7, 7, False), Grid(32, False, 8, 0, 3, -6, -448, 448, False)
HUB_SHARE = 40  # rows whose edges the first row has: with enough rows it is a hub, whose chunks a second kernel adds


class _Inputs:
    """Operands of a graph, of equal degrees but for a hub, and of products: valid, so that the kernels can also run."""

    def __init__(self, device: torch.device, num_nodes: int) -> None:
        self.device, self.num_nodes = device, num_nodes
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.scale = self.vector(num_nodes)
        self.weight = self.vector(num_nodes * MEAN_DEGREE)

    def vector(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device)

    def graph(self, degree: int = MEAN_DEGREE) -> tuple[Tensor, Tensor]:
        indptr = torch.arange(self.num_nodes + 1, dtype=torch.int32, device=self.device) * degree
        indptr[1:HUB_SHARE] = min(HUB_SHARE, self.num_nodes) * degree
        index = torch.arange(self.num_nodes * degree, dtype=torch.int32, device=self.device) % self.num_nodes
        return indptr, index

    def codes(self, width: int, num_rows: int = 0) -> Tensor:
        return empty_codes(num_rows or self.num_nodes, width, self.device).fill_(1)

    def rows(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones((self.num_nodes, width), dtype=dtype, device=self.device)

    def columns(self, width: int) -> Tensor:
        return torch.ones((width, self.num_nodes), device=self.device).t()

    def mask(self, width: int) -> Tensor:
        return torch.full((self.num_nodes, mask_width(width)), 255, dtype=torch.uint8, device=self.device)

    def bytes(self, width: int, num_rows: int = 0) -> Tensor:
        return torch.full((num_rows or self.num_nodes, width), 255, dtype=torch.uint8, device=self.device)

    def activation(self, width: int) -> Activation:
        return Activation(relu=True, threshold=1 << 15, seed=self.seed, stream=1, mask=self.mask(width))

    def product(self, function: Callable[..., Any], K: int, M: int, **kwargs: Any) -> Callable[[], Any]:
        return lambda: function(self.codes(K), self.scale, self.codes(K, M), self.vector(M), **kwargs)

    def fused_product(
        self, function: Callable[..., Any], K: int, M: int, dtype: torch.dtype = torch.float32, **kwargs: Any
    ) -> Callable[[], Any]:
        return lambda: function(self.rows(K, dtype), self.codes(K, M), self.vector(M), seed=self.seed, **kwargs)


def _quantize_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    bf16 = torch.bfloat16
    behind = {"factor": 2.0, "seed": made.seed, "sum_columns": True}
    return {
        "quantize/fp32/F128": lambda: quantize(made.rows(128), seed=made.seed),
        "quantize/fp32/F128/column_major": lambda: quantize(made.columns(128), seed=made.seed),
        "quantize/bf16/F256/nearest": lambda: quantize(made.rows(256, bf16)),
        "quantize/fp32/F16": lambda: quantize(made.rows(16), seed=made.seed),
        "quantize/fp32/F100": lambda: quantize(made.rows(100), seed=made.seed),
        "quantize/fp32/F1433/two_passes": lambda: quantize(made.rows(1433), seed=made.seed),
        "quantize/fp32/F256/block": lambda: quantize(made.rows(256), granularity="block", seed=made.seed),
        "quantize/fp32/F256/tensor": lambda: quantize(made.rows(256), granularity="tensor", seed=made.seed),
        "quantize_grad/fp32/F128": lambda: quantize_grad(made.rows(128), mask=made.mask(128), **behind),
        "quantize_grad/bf16/F256": lambda: quantize_grad(made.rows(256, bf16), mask=made.mask(256), **behind),
        "quantize_grad/fp32/F100/unmasked": lambda: quantize_grad(made.rows(100), **behind),
    }


def _grid_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    def row() -> Tensor:
        return made.rows(128).view(1, -1)

    return {
        "quantize_dequantize/fp32/F128/msfp12": lambda: quantize_dequantize(made.rows(128), MSFP12),
        "quantize_dequantize/fp32/F128/msfp12/stochastic": lambda: quantize_dequantize(
            made.rows(128), MSFP12, seed=made.seed
        ),
        "quantize_dequantize/bf16/F256/mxfp8": lambda: quantize_dequantize(made.rows(256, torch.bfloat16), MXFP8),
        "quantize_dequantize/fp32/F128/fixed8": lambda: quantize_dequantize(made.rows(128), FIXED8),
        "quantize_dequantize/fp32/F128/affine8": lambda: quantize_dequantize(made.rows(128), AFFINE8),
        "quantize_dequantize/fp32/tensor/fixed8": lambda: quantize_dequantize(row(), FIXED8),
        "quantize_shared/fp32/F128/msfp12": lambda: quantize_shared(made.rows(128), MSFP12),
        "quantize_shared/bf16/F256/fixed8": lambda: quantize_shared(made.rows(256, torch.bfloat16), FIXED8),
    }


def _activation_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    bf16, drop = torch.bfloat16, made.activation(128)._replace(relu=False, mask=None)
    elu: dict[str, Any] = {"kind": "elu", "slope": 1.0, "steps": 255 * 65536.0, "seed": made.seed}

    def forward(width: int, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        rows = made.rows(width, dtype)
        return activation(rows, made.vector(width), rows, dropout=drop, stream=8, **options)

    def backward(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return activation_backward(made.rows(128, dtype), factor=2.0, **options)

    return {
        "activation/fp32/F128/relu": lambda: forward(128, kind="relu", mask=made.mask(128)),
        "activation/bf16/F256/leaky_relu": lambda: forward(
            256, bf16, kind="leaky_relu", slope=0.01, mask=made.mask(256)
        ),
        "activation/fp32/F128/elu/codes": lambda: forward(128, derivative=made.bytes(128), **elu),
        "activation/bf16/F128/elu": lambda: forward(128, bf16, derivative=made.rows(128, bf16), **elu),
        "activation_backward/fp32/F128/relu": lambda: backward(mask=made.mask(128), sum_columns=True),
        "activation_backward/fp32/F128/relu/no_sums": lambda: backward(mask=made.mask(128)),
        "activation_backward/bf16/F128/leaky_relu": lambda: backward(
            bf16, mask=made.mask(128), slope=0.01, dropout=drop, sum_columns=True
        ),
        "activation_backward/fp32/F128/elu/codes": lambda: backward(derivative=made.bytes(128), sum_columns=True),
        "activation_backward/bf16/F128/elu": lambda: backward(bf16, derivative=made.rows(128, bf16), sum_columns=True),
    }


def _matmul_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    bf16, last = torch.bfloat16, made.activation(256)

    def shared(K: int, M: int, G: int, **options: Any) -> Tensor:
        num_blocks = -(-K // G)
        operands = (made.codes(K), made.bytes(num_blocks), made.codes(K, M), made.bytes(num_blocks, M))
        return matmul_shared(*operands, block_size=G, fraction_bits=6, **options)

    fused, fused_requantize = quantize_matmul, quantize_matmul_requantize
    return {
        "matmul/fp32/K128/M256": made.product(matmul, 128, 256),
        "matmul/fp32/K128/M256/activation": made.product(matmul, 128, 256, activation=last),
        "matmul/bf16/K256/M128/bias": made.product(matmul, 256, 128, bias=made.vector(128), out_dtype=bf16),
        "matmul/fp32/K256/M256": made.product(matmul, 256, 256),
        "matmul/fp32/K100/M47": made.product(matmul, 100, 47),
        "matmul_requantize/K128/M256": made.product(matmul_requantize, 128, 256, seed=made.seed),
        "matmul_requantize/K128/M256/nearest": made.product(matmul_requantize, 128, 256),
        "matmul_requantize/K256/M256": made.product(matmul_requantize, 256, 256, seed=made.seed),
        "matmul_requantize/K256/M64": made.product(matmul_requantize, 256, 64, seed=made.seed),
        "matmul_dw/K128/M256": lambda: matmul_dw(made.codes(256), made.scale, made.codes(128), made.scale),
        "matmul_dw/K256/M256": lambda: matmul_dw(made.codes(256), made.scale, made.codes(256), made.scale),
        "matmul_dw/K100/M47": lambda: matmul_dw(made.codes(47), made.scale, made.codes(100), made.scale),
        "matmul_shared/fp32/K128/M256/G16": lambda: shared(128, 256, 16),
        "matmul_shared/bf16/K128/M256/G32": lambda: shared(128, 256, 32, bias=made.vector(256), out_dtype=bf16),
        "matmul_shared/fp32/K100/M47/G16": lambda: shared(100, 47, 16),
        "quantize_matmul/fp32/K128/M256": made.fused_product(fused, 128, 256),
        "quantize_matmul/fp32/K128/M256/activation": made.fused_product(
            fused, 128, 256, bias=made.vector(256), activation=last
        ),
        "quantize_matmul/bf16/K256/M256/activation": made.fused_product(
            fused, 256, 256, bf16, out_dtype=bf16, activation=last
        ),
        "quantize_matmul/fp32/K500/M47": made.fused_product(fused, 500, 47),
        "quantize_matmul_requantize/fp32/K128/M256": made.fused_product(fused_requantize, 128, 256),
        "quantize_matmul_requantize/fp32/K256/M256": made.fused_product(fused_requantize, 256, 256),
        "quantize_matmul_requantize/bf16/K512/M128": made.fused_product(fused_requantize, 512, 128, bf16),
        "quantize_matmul_requantize/fp32/K64/M256": made.fused_product(fused_requantize, 64, 256),
    }


def _spmm_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    bf16, by_head = torch.bfloat16, torch.ones((made.num_nodes * MEAN_DEGREE, 4), device=made.device)
    last: dict[str, Any] = {"bias": made.vector(256), "activation": made.activation(256)}

    def sums(x: Tensor, weight: Tensor | None = made.weight, degree: int = MEAN_DEGREE, **kwargs: Any) -> Tensor:
        scale = made.scale if x.dtype == torch.int8 else None
        return spmm(*made.graph(degree), x, weight=weight, x_scale=scale, **kwargs)

    def codes(x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scale = made.scale if x.dtype == torch.int8 else None
        return spmm_requantize(*made.graph(), x, x_scale=scale, seed=made.seed, **kwargs)

    def wide_indices() -> Tensor:
        indptr, index = made.graph()
        return spmm(indptr.long(), index.long(), made.codes(256), weight=made.weight, x_scale=made.scale)

    return {
        "spmm/int8/F16": lambda: sums(made.codes(16)),
        "spmm/int8/F64": lambda: sums(made.codes(64)),
        "spmm/int8/F128": lambda: sums(made.codes(128)),
        "spmm/int8/F256": lambda: sums(made.codes(256)),
        "spmm/int8/F256/epilogue": lambda: sums(made.codes(256), row_factor=made.scale, **last),
        "spmm/int8/F256/H4": lambda: sums(made.codes(256), by_head),
        "spmm/int8/F256/int64": wide_indices,
        "spmm/int8/F100": lambda: sums(made.codes(100)),
        "spmm/int8/F602": lambda: sums(made.codes(602)),
        "spmm/int8/F128/degree51": lambda: sums(made.codes(128), None, 51),
        "spmm/fp32/F128": lambda: sums(made.rows(128)),
        "spmm/fp32/F128/H4": lambda: sums(made.rows(128), by_head),
        "spmm/bf16/F256/epilogue": lambda: sums(made.rows(256, bf16), **last),
        "spmm_requantize/F256": lambda: codes(made.codes(256), weight=made.weight, row_factor=made.scale),
        "spmm_requantize/F512": lambda: codes(made.codes(512)),
        "spmm_requantize/fp32/F256": lambda: codes(made.rows(256), weight=made.weight),
        "spmm_extremum/fp32/F128": lambda: spmm_extremum(*made.graph(), made.rows(128), weight=made.weight),
        "spmm_extremum/int8/F64": lambda: spmm_extremum(
            *made.graph(), made.codes(64), x_scale=made.scale, largest=False
        ),
    }


def _softmax_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    def scores(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones((made.num_nodes * MEAN_DEGREE, heads), dtype=dtype, device=made.device)

    def rows_backward(heads: int) -> Tensor:
        return softmax_backward(made.graph()[0], scores(heads), scores(heads))

    def attention_backward(heads: int) -> tuple[Tensor, Tensor]:
        indptr, index = made.graph()
        order = torch.arange(index.numel(), dtype=torch.int32, device=made.device)
        rows = made.rows(heads), made.rows(heads), scores(heads), scores(heads)
        return attention_scores_backward(indptr, index, indptr, order, *rows)

    return {
        "softmax/fp32/H1": lambda: softmax(made.graph()[0], scores(1)),
        "softmax/fp32/H4": lambda: softmax(made.graph()[0], scores(4)),
        "softmax/bf16/H8": lambda: softmax(made.graph()[0], scores(8, torch.bfloat16)),
        "softmax_backward/fp32/H4": lambda: rows_backward(4),
        "attention_scores/fp32/H4": lambda: attention_scores(*made.graph(), made.rows(4), made.rows(4)),
        "attention_scores/fp32/H8": lambda: attention_scores(*made.graph(), made.rows(8), made.rows(8)),
        "attention_scores_backward/fp32/H4": lambda: attention_backward(4),
        "attention_scores_backward/fp32/H8": lambda: attention_backward(8),
    }


def _sddmm_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    def codes(width: int, heads: int = 1, op: str = "dot") -> Tensor:
        scale = made.scale if heads == 1 else made.rows(heads)
        x = made.codes(width)
        return sddmm(*made.graph(), x, x, op=op, heads=heads, target_scale=scale, source_scale=scale)

    return {
        "sddmm/int8/F128": lambda: codes(128),
        "sddmm/int8/F602": lambda: codes(602),
        "sddmm/int8/F256/H4": lambda: codes(256, 4),
        "sddmm/int8/F64/H8": lambda: codes(64, 8),
        "sddmm/fp32/F128": lambda: sddmm(*made.graph(), made.rows(128), made.rows(128)),
        "sddmm/fp32/F128/H4": lambda: sddmm(*made.graph(), made.rows(128), made.rows(128), heads=4),
        "sddmm_add/fp32/F128": lambda: sddmm(*made.graph(), made.rows(128), made.rows(128), op="add"),
        "sddmm_add/int8/F256/H4": lambda: codes(256, 4, "add"),
    }


def _blocks_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    bf16 = torch.bfloat16

    def pack(block_size: int, bits: int = 2, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return blocks_pack(made.rows(128, dtype), bits=bits, block_size=block_size, **options)

    def unpack(
        block_size: int, bits: int = 2, dtype: torch.dtype = torch.float32, edges: Tensor | None = None
    ) -> Tensor:
        num_blocks = made.num_nodes * 128 // block_size
        packed = torch.ones((num_blocks, block_size * bits // 8), dtype=torch.uint8, device=made.device)
        low = made.vector(num_blocks)
        return blocks_unpack(packed, low, low, bits=bits, size=num_blocks * block_size, dtype=dtype, edges=edges)

    def project(
        F: int, projection: int, block_size: int = 128, dtype: torch.dtype = torch.float32, edges: Tensor | None = None
    ) -> Any:
        signs = {"projection": projection, "projection_seed": made.seed, "projection_stream": 7}
        return blocks_pack(made.rows(F, dtype), bits=2, block_size=block_size, seed=made.seed, edges=edges, **signs)

    def unproject(F: int, projection: int, block_size: int = 128) -> Tensor:
        num_blocks = -(-made.num_nodes * projection // block_size)
        packed = torch.ones((num_blocks, block_size // 4), dtype=torch.uint8, device=made.device)
        low, size = made.vector(num_blocks), made.num_nodes * projection
        signs = {"projection": projection, "projection_seed": made.seed, "projection_stream": 7}
        return blocks_unpack(packed, low, low, bits=2, size=size, num_columns=F, **signs)

    def edges(bits: int) -> Tensor:
        return torch.arange(1 << bits, dtype=torch.float32, device=made.device)

    return {
        "blocks_pack/fp32/int2/G128": lambda: pack(128, seed=made.seed),
        "blocks_pack/fp32/int2/G128/edges": lambda: pack(128, seed=made.seed, edges=edges(2)),
        "blocks_pack/fp32/int4/G128/edges": lambda: pack(128, 4, seed=made.seed, edges=edges(4)),
        "blocks_pack/fp32/int2/G1024/nearest": lambda: pack(1024),
        "blocks_pack/fp32/int4/G64": lambda: pack(64, 4, seed=made.seed, metadata_dtype=torch.float16),
        "blocks_pack/fp32/int8/G16": lambda: pack(16, 8, seed=made.seed),
        "blocks_pack/bf16/int1/G256": lambda: pack(256, 1, bf16, seed=made.seed, metadata_dtype=bf16),
        "blocks_pack/bf16/int2/G128": lambda: pack(128, 2, bf16, seed=made.seed, metadata_dtype=bf16),
        "blocks_pack/fp32/int2/G32768/two_passes": lambda: pack(32768, seed=made.seed),
        "blocks_pack/fp32/F128/int2/projection16/G128": lambda: project(128, 16),
        "blocks_pack/fp32/F500/int2/projection64/G64/edges": lambda: project(500, 64, 64, edges=edges(2)),
        "blocks_pack/bf16/F128/int2/projection16/G128": lambda: project(128, 16, dtype=bf16),
        "blocks_pack/fp32/F256/int2/projection24/G128": lambda: project(256, 24),  # two kernels
        "blocks_unpack/fp32/F128/int2/projection16/G128": lambda: unproject(128, 16),
        "blocks_unpack/fp32/F500/int2/projection64/G64": lambda: unproject(500, 64, 64),
        "blocks_unpack/fp32/int2/G128": lambda: unpack(128),
        "blocks_unpack/fp32/int2/G128/edges": lambda: unpack(128, edges=edges(2)),
        "blocks_unpack/fp32/int8/G128": lambda: unpack(128, 8),
        "blocks_unpack/bf16/int1/G128": lambda: unpack(128, 1, bf16),
    }


def _codes_cases(made: _Inputs) -> dict[str, Callable[[], Any]]:
    def pack(bits: int) -> Tensor:
        return codes_pack(made.codes(256) if bits <= 8 else made.codes(256).short(), bits=bits)

    def unpack(bits: int) -> Tensor:
        stored = torch.ones((made.num_nodes, 32 * bits), dtype=torch.uint8, device=made.device)
        return codes_unpack(stored, bits=bits, num_codes=256, signed=True)

    cases: dict[str, Callable[[], Any]] = {}
    for bits in (3, 4, 7, 11):
        cases[f"codes_pack/F256/int{bits}"] = partial(pack, bits)
        cases[f"codes_unpack/F256/int{bits}"] = partial(unpack, bits)
    return cases


def make_cases(device: torch.device, num_nodes: int) -> dict[str, Callable[[], Any]]:
    """Calls of the launchers, by name."""
    made = _Inputs(device, num_nodes)
    return {
        **_quantize_cases(made),
        **_grid_cases(made),
        **_activation_cases(made),
        **_matmul_cases(made),
        **_spmm_cases(made),
        **_softmax_cases(made),
        **_sddmm_cases(made),
        **attention_cases(AttentionInputs(made.graph(), num_nodes, device)),
        **_blocks_cases(made),
        **_codes_cases(made),
    }


# What most models spend their time in, every kernel among it; the variants are compiled for fewer architectures.
MAIN = {
    "blocks_pack/fp32/int2/G128",
    "blocks_unpack/fp32/int2/G128",
    "blocks_pack/fp32/F128/int2/projection16/G128",
    "blocks_unpack/fp32/F128/int2/projection16/G128",
    "codes_pack/F256/int3",
    "codes_unpack/F256/int3",
    "quantize/fp32/F128",
    "quantize_grad/fp32/F128",
    "quantize_dequantize/fp32/F128/msfp12",
    "activation/fp32/F128/elu/codes",
    "activation_backward/fp32/F128/relu",
    "matmul/fp32/K128/M256",
    "matmul_requantize/K128/M256",
    "matmul_dw/K128/M256",
    "matmul_shared/fp32/K128/M256/G16",
    "quantize_matmul/fp32/K128/M256/activation",
    "quantize_matmul_requantize/fp32/K128/M256",
    "spmm/int8/F256/epilogue",
    "spmm_requantize/F256",
    "spmm/fp32/F128",
    "spmm_extremum/fp32/F128",
    "sddmm/int8/F128",
    "sddmm_add/fp32/F128",
    "attention_scores/fp32/H4",
    "attention_scores_backward/fp32/H4",
    *ATTENTION_MAIN,
}
