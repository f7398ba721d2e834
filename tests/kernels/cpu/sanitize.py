"""Every launcher on inputs that break kernels, on a library with sanitizers: ``python sanitize.py LIBRARY SOURCES``.

Allocations have exactly the size of their values, so that the sanitizer sees an access beyond them. Prints the exported
functions that were called, and stops at the first argument that does not fit a function's declaration.
"""

import ctypes
import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
from qgnn.kernels.cpu import (
    activation,
    adjacency,
    attention_shared,
    blocks,
    codes,
    info,
    library,
    matmul,
    matmul_shared,
    quantize,
    quantize_grid,
    sddmm,
    softmax,
    spmm,
)
from torch import Tensor

from activation_cases import KEPT, assert_forward_equals_reference, backward_operands, dropout_of
from cpu_attention_cases import DROPOUT, GRAD, KINDS, backward, forward, graph_of, operands
from graphs import GRAPHS, RECTANGULAR
from grid_cases import GRIDS, INTEGERS
from kernel_cases import LAYOUTS, csr, random_codes, random_scales
from prototypes import misfits, prototypes
from qgnn.activation import Activation, mask_width
from shared_cases import operands_of, options_of

WIDTHS = (1, 7, 33, 130, 1030)
SEED = torch.tensor([-0x123456789ABCDEF])
CALLED: set[str] = set()


def watch_launches(sources: Path) -> None:
    """Lets each module's ``launch`` compare its arguments with the declaration first, and note the function's name."""
    declared, launch = prototypes(sources), library.launch

    def checked(name: str, *args: Tensor | float | None) -> None:
        assert misfits(declared[name], args) == []
        CALLED.add(name)
        launch(name, *args)

    for path in sources.glob("*.c"):
        importlib.import_module(f"qgnn.kernels.cpu.{path.stem}").launch = checked


def edge_lists() -> Iterator[tuple[Tensor, int, int]]:
    """``(edge_index, sources, targets)``: the graphs that break kernels, and one that is worth several threads."""
    yield from ((edge_index, num_nodes, num_nodes) for edge_index, num_nodes in GRAPHS.values())
    yield from RECTANGULAR.values()
    yield torch.randint(500, (2, 3000)), 500, 501


def activations(num_rows: int, width: int) -> Iterator[Activation]:
    for relu, threshold in ((True, 0), (False, 1 << 14), (True, 1 << 16)):
        yield Activation(relu, threshold, SEED, 6, torch.zeros((num_rows, mask_width(width)), dtype=torch.uint8))


def run_quantize() -> None:
    for N in (0, 1, 9, 300):
        for F in (0, *WIDTHS):
            x = torch.randn(N, F)
            for seed in (None, SEED):
                for granularity, block_size in (
                    ("row", 1),
                    ("tensor", 1),
                    ("block", 3),
                    ("block", 16),
                    ("block", 5000),
                ):
                    quantize.quantize(x, granularity=granularity, block_size=block_size, seed=seed, stream=1)
                for block_size in (4, 8, 16):
                    groups = torch.randn(N, 11 * block_size + 1)[:, :-1]
                    quantize.quantize(groups, granularity="block", block_size=block_size, seed=seed)
            quantize.quantize(LAYOUTS["column_major"](x).half(), bits=3)
            for a in activations(N, F):
                quantize.quantize_grad(x, mask=a.mask, factor=a.factor, seed=SEED, sum_columns=True)
            quantize.quantize_grad(LAYOUTS["every_second_row"](x))


def run_grids() -> None:
    matrices = [torch.randn(shape) for shape in ((0, 3), (3, 0), (1, 40_000), *((9, F) for F in WIDTHS))]
    for x in (*matrices, torch.randn(300, 70).t(), torch.randn(300, 70).half().t()):
        for grid, seed in itertools.product(GRIDS.values(), (None, SEED)):
            for block_size in (grid.block_size, 3, 600):
                quantize_grid.quantize_dequantize(x, grid._replace(block_size=block_size), seed=seed)
        for grid, seed in itertools.product(INTEGERS.values(), (None, SEED)):
            for block_size in (grid.block_size, 3, 600):
                quantize_grid.quantize_shared(x, grid._replace(block_size=block_size), seed=seed)


def run_activation() -> None:
    for N, F in ((0, 3), (3, 0), *((N, F) for N in (1, 9, 300) for F in WIDTHS)):
        x, bias, second = torch.randn(N, F), torch.randn(F), LAYOUTS["every_second_row"](torch.randn(N, F))
        for name, p in itertools.product(KEPT, (0.0, 0.3)):
            assert_forward_equals_reference(activation.activation, name, p, x, bias, second)
            assert_forward_equals_reference(activation.activation, name, p, second.half(), seed=None)
            options = {**backward_operands(name, N, F, "cpu"), "dropout": dropout_of(p, "cpu")}
            for sum_columns in (False, True):
                activation.activation_backward(second, sum_columns=sum_columns, **options)


def run_matmul() -> None:
    shapes = [(1, 1, 1), (21, 7, 33), (5, 300, 66), (3, 130, 1), (1100, 17, 79), (3, 2500, 5), (0, 3, 4), (3, 0, 4)]
    for N, K, M in shapes:
        for density in (1.0, 0.05):
            x_q = random_codes(N, K, "cpu") * (torch.rand(N, K) < density)
            w_q, x_scale, w_scale = random_codes(M, K, "cpu"), random_scales(N, "cpu"), random_scales(M, "cpu")
            matmul.matmul(x_q, x_scale, w_q, w_scale, torch.randn(M))
            for a in activations(N, M):
                matmul.matmul(x_q, x_scale, w_q, w_scale, activation=a)
            matmul.matmul(LAYOUTS["every_second_row"](x_q), x_scale[:1], LAYOUTS["column_major"](w_q), w_scale)
            matmul.matmul_requantize(x_q, x_scale, w_q, w_scale, seed=SEED)
            matmul.matmul_dw(random_codes(N, M, "cpu"), random_scales(N, "cpu"), x_q, x_scale)
            with mock.patch.multiple(matmul, has_vnni=lambda: True, _MIN_INTEGER_WORK=0):
                matmul.matmul(x_q, x_scale, w_q, w_scale)
                matmul.matmul_requantize(x_q, x_scale, w_q, w_scale)


def run_matmul_shared() -> None:
    for N, K, M in ((1, 1, 1), (13, 7, 33), (5, 300, 66), (300, 130, 40), (3, 0, 4), (0, 3, 4)):
        for G in (1, 5, 16, 32, 128):
            o = operands_of(N, K, M, G, "any")
            matmul_shared.matmul_shared(*o, **options_of(G))
            for layout in LAYOUTS.values():
                matmul_shared.matmul_shared(*map(layout, o[:4]), **options_of(G, fraction_bits=22))


def run_spmm(indptr: Tensor, index: Tensor, S: int, F: int) -> None:
    N, E = indptr.numel() - 1, index.numel()
    x_q, x_scale = random_codes(S, F, "cpu"), random_scales(S, "cpu")
    x, weight = torch.randn(S, F), torch.randn(E)
    factor = torch.randn(N)
    spmm.spmm(indptr, index, x_q, weight=weight, x_scale=x_scale, row_factor=factor, bias=torch.randn(F))
    spmm.spmm(indptr, index, x_q, x_scale=torch.ones(1))
    for a in activations(N, F):
        spmm.spmm(indptr, index, x_q, x_scale=x_scale, activation=a)
    spmm.spmm(indptr, index, LAYOUTS["every_second_row"](x))
    spmm.spmm_requantize(indptr, index, x_q, x_scale=x_scale, seed=SEED)
    spmm.spmm_requantize(indptr, index, x, weight=weight, row_factor=factor)
    spmm.spmm_extremum(indptr, index, x_q, x_scale=x_scale)
    for largest in (True, False):
        out, arg = spmm.spmm_extremum(indptr, index, x, weight=weight, largest=largest)
        spmm.spmm_extremum_dx(index, torch.randn_like(out), arg, S, weight=weight)


def run_sddmm(indptr: Tensor, index: Tensor, S: int, F: int) -> None:
    N = indptr.numel() - 1
    for heads in {1, 3 if F % 3 == 0 else F, F}:
        scales = {"target_scale": torch.rand(N, heads), "source_scale": torch.rand(S)}
        for op in ("dot", "add"):
            operands = (indptr, index, random_codes(N, F, "cpu"), random_codes(S, F, "cpu"))
            sddmm.sddmm(*operands, op=op, heads=heads, **scales)
            sddmm.sddmm(
                indptr, index, torch.randn(N, F), LAYOUTS["column_major"](torch.randn(S, F)), op=op, heads=heads
            )


def run_softmax(indptr: Tensor, index: Tensor, transposed: tuple[Tensor, Tensor], S: int) -> None:
    N, E = indptr.numel() - 1, index.numel()
    for H in (1, 2, 4, 7, 8, 33):
        out, grad = softmax.softmax(indptr, torch.randn(E, H)), torch.randn(E, H)
        softmax.softmax_backward(indptr, out, grad)
        scores = (torch.randn(N, H), torch.randn(S, H))
        out = softmax.attention_scores(indptr, index, *scores)
        softmax.attention_scores_backward(indptr, index, *transposed, *scores, out, grad)


def run_attention(edge_index: Tensor, S: int, N: int) -> None:
    for kind in KINDS:
        for H, D in ((1, 1), (3, 7), (1, 40), (17, 4), (11, 8), (5, 16), (2, 130)):
            for is_int8 in (True, False):
                g = graph_of(edge_index, S, N, torch.int32 if is_int8 else torch.int64)
                o = operands(kind, g, H, D, codes=is_int8, edges=True, dropout=True)
                grad = torch.randn(N, H * D)
                for case in (o, o.but(edge_score=None, edge_x=None, dropout=DROPOUT._replace(threshold=0))):
                    case.options.pop("edge_x" if kind == "attention" else "edge_score", None)
                    lse = forward(kind, g, case)[1]
                    backward(kind, g, case, lse, grad, needs_dedge=True, **GRAD)
                    backward(kind, g, case, lse, grad)


def run_graphs() -> None:
    for edge_index, S, N in edge_lists():
        with mock.patch.object(attention_shared, "CHUNK", 8 if N % 2 else 128):
            run_attention(edge_index, S, N)
        order = torch.argsort(edge_index[1], stable=True)
        for dtype in (torch.int32, torch.int64):
            indptr, index = csr(edge_index, N, "cpu", dtype)
            in_order = torch.stack([torch.arange(order.numel()), edge_index[0][order]])
            transposed = csr(in_order, S, "cpu", dtype)
            run_spmm(indptr, index, S, 0)
            for F in WIDTHS if order.numel() > 1000 else WIDTHS[:-1]:
                run_spmm(indptr, index, S, F)
                run_sddmm(indptr, index, S, F)
            run_softmax(indptr, index, transposed, S)
            other = torch.int64 if dtype == torch.int32 else torch.int32
            run_spmm(indptr, index.to(other), S, 33)
            run_sddmm(indptr, index.to(other), S, 33)
            run_softmax(indptr, index.to(other), (transposed[0].to(other), transposed[1]), S)


def run_adjacency() -> None:
    for (edge_index, S, N), dtype in itertools.product(edge_lists(), (torch.int32, torch.int64)):
        E = edge_index.shape[1]
        for num_new in (0, 1, 40):
            order = torch.argsort(edge_index[1], stable=True).to(dtype)
            edges = (*csr(edge_index, N, "cpu", dtype), order)
            # No order at all: what does not ascend must not lead outside either.
            new = torch.randint(max(N, 1), (3, num_new if N else 0))
            for weight in (None, torch.rand(E), torch.rand(E).half()):
                keep = torch.rand(E) < (1 - num_new / 40)
                adjacency.adjacency_filter(
                    *edges, keep, num_kept=int(keep.sum()), weight=weight, number=torch.randperm(S)
                )
                new_weight = None if weight is None else torch.rand(new.shape[1])
                adjacency.adjacency_merge(*edges, *new, weight=weight, new_weight=new_weight)
        if E:
            with suppress(ValueError):  # more are found than there is room for
                adjacency.adjacency_filter(
                    *edges[:2], torch.zeros_like(edges[2]), torch.ones(E).bool(), num_kept=E // 2
                )


def run_codes() -> None:
    """Rows and storage that end behind any of the eight codes of a group."""
    for bits, R in itertools.product(range(1, 17), (0, 1, 3)):
        for num_codes in (*range(18), 8192 + 5):
            values = torch.zeros((R, num_codes), dtype=torch.int8 if bits <= 8 else torch.int16)
            stored = codes.codes_pack(values, bits=bits)
            for signed in (False, True):
                codes.codes_unpack(stored, bits=bits, num_codes=num_codes, signed=signed)


def run_blocks() -> None:
    for bits in (1, 2, 4, 8):
        for block_size in (8, 24, 128, 1000, 1 << 16):
            for size in (0, 1, 129, 40_000):
                for metadata in (torch.float32, torch.float16, torch.bfloat16):
                    x = torch.randn(size)
                    packed = blocks.blocks_pack(
                        x, bits=bits, block_size=block_size, metadata_dtype=metadata, seed=SEED if size % 2 else None
                    )
                    blocks.blocks_unpack(*packed, bits=bits, size=size)
                if bits <= 4:
                    edges = torch.arange(1 << bits).float()
                    packed = blocks.blocks_pack(x, bits=bits, block_size=block_size, seed=SEED, edges=edges)
                    blocks.blocks_unpack(*packed, bits=bits, size=size, edges=edges)
    for N, F, projection, block_size in (
        (0, 5, 8, 8),
        (9, 0, 8, 8),
        (13, 33, 1, 8),
        (13, 130, 40, 24),
        (1003, 7, 100, 64),
    ):
        signs = {"projection": projection, "projection_seed": SEED}
        for dtype in (torch.float32, torch.bfloat16):
            packed = blocks.blocks_pack(torch.randn(N, F).to(dtype), bits=2, block_size=block_size, **signs)
            blocks.blocks_unpack(*packed, bits=2, size=N * projection, num_columns=F, dtype=dtype, **signs)


def main() -> None:
    path, sources = sys.argv[1:]
    library._share_openmp()
    library._library = ctypes.CDLL(path)
    watch_launches(Path(sources))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        run_quantize()
        run_grids()
        run_activation()
        run_matmul()
        run_matmul_shared()
        run_blocks()
        run_codes()
        run_adjacency()
        run_graphs()
        info.info()
    print(json.dumps(sorted(CALLED)))


if __name__ == "__main__":
    main()
