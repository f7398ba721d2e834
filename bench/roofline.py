"""The bytes and operations that each primitive has to move and to do, and how long a GPU takes at the very least.

A primitive's bytes are what ``qgnn.trace()`` reports: operands read once and results written once, without the gaps
that align rows. Rows that edges gather come again and again from the L2 cache, in sectors of 32 bytes: those are
counted apart. A floor is the longest of three times (memory, L2, tensor cores); no version of the same passes runs
faster.
"""

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import NamedTuple

from .report import aligned

SECTOR = 32  # bytes that the L2 cache delivers at once
VECTOR = 16  # rows of codes start at multiples of it
SCALE, INDEX, SEED, FLOAT = 4, 4, 8, 4  # bytes of each


@dataclass(frozen=True)
class Machine:
    """A GPU. Datasheet figures are those of dense products; nothing here was measured.

    Args:
        memory: Peak of the memory, bytes a second (datasheet).
        l2: What gathers get from the L2 cache, bytes a second (assumed: 24.5 bytes a clock and multiprocessor).
        products: Peak operations a second by operand type (datasheet).
    """

    memory: float
    l2: float
    products: dict[str, float]


# Assumed shares of the datasheet's peaks: of the memory's what large copies reach, of the tensor cores' what large
# products do.
MEMORY_SHARE, PRODUCT_SHARE = 0.9, 0.6

_HOPPER = {"int8": 1979e12, "fp16": 989e12, "tf32": 495e12}
MACHINES = {
    "H100": Machine(3.35e12, 5.5e12, _HOPPER),  # SXM: 132 multiprocessors at 1.7 GHz
    "H200": Machine(4.8e12, 5.5e12, _HOPPER),
    "A100": Machine(2.04e12, 3.7e12, {"int8": 624e12, "fp16": 312e12, "tf32": 156e12}),  # SXM: 108 at 1.4 GHz
}


class Traffic(NamedTuple):
    """What one kernel moves and does.

    Args:
        bytes: Operands and results, each once.
        gathered: What passes through L2 because edges read rows repeatedly, results included; 0 without edges.
        operations: Of a dense product, two for each multiplication.
        product: Operand type of the product.
    """

    bytes: int
    gathered: int = 0
    operations: int = 0
    product: str = "tf32"

    def floor_us(self, machine: Machine) -> float:
        return 1e6 * max(
            self.bytes / (MEMORY_SHARE * machine.memory),
            self.gathered / machine.l2,
            self.operations / (PRODUCT_SHARE * machine.products[self.product]),
        )


class Step(NamedTuple):
    """A pass of a layer, named as in a trace where it is one of qgnn's primitives."""

    name: str
    traffic: Traffic


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def elementwise(*num_bytes: int) -> Traffic:
    """Tensors of these sizes, read or written."""
    return Traffic(sum(num_bytes))


def quantize(N: int, F: int, itemsize: int = FLOAT) -> Traffic:
    """x -> codes, row scales."""
    return Traffic(N * F * itemsize + N * F + N * SCALE + SEED)


def mask_bytes(N: int, F: int) -> int:
    """A bit a value, rows of whole bytes."""
    return N * -(-F // 8)


def quantize_grad(N: int, F: int, mask: bool = True) -> Traffic:
    """The gradient behind an epilogue -> codes with its 1-bit mask applied, row scales, column sums (the bias's)."""
    return Traffic(quantize(N, F).bytes + (mask_bytes(N, F) if mask else 0) + F * FLOAT)


def linear(N: int, K: int, M: int, bias: bool = True) -> Traffic:
    """fp32 x, weight, bias -> fp32 y: torch's on TF32 tensor cores. The gradient of x is one with K and M swapped."""
    return Traffic(FLOAT * (N * K + M * K + N * M + (M if bias else 0)), 0, 2 * N * K * M)


def linear_dw(N: int, K: int, M: int) -> Traffic:
    """fp32 gradient and x -> fp32 gradient of the weight."""
    return linear(N, K, M, bias=False)


def _codes(N: int, K: int, M: int) -> int:
    return N * K + N * SCALE + M * K + M * SCALE


def matmul(N: int, K: int, M: int, bias: bool = True) -> Traffic:
    """Codes and scales of x and weight, bias -> fp32 y."""
    num_bytes = _codes(N, K, M) + FLOAT * (N * M + (M if bias else 0))
    return Traffic(num_bytes, 0, 2 * N * K * M, "int8")


def matmul_requantize(N: int, K: int, M: int) -> Traffic:
    """Codes and scales of x and weight -> codes and scales of y."""
    return Traffic(_codes(N, K, M) + N * M + N * SCALE + SEED, 0, 2 * N * K * M, "int8")


def quantize_matmul(N: int, K: int, M: int) -> Traffic:
    """fp32 x, quantized in the prologue, and the weight's codes -> codes and scales of y, and those of x to keep."""
    rest = quantize(N, K).bytes - SEED
    return Traffic(rest + M * K + M * SCALE + N * M + N * SCALE + SEED, 0, 2 * N * K * M, "int8")


def matmul_dw(N: int, K: int, M: int) -> Traffic:
    """Codes and scales of the gradient and of x -> fp32 gradient of the weight, in fp16 products."""
    return Traffic(N * (M + K) + 2 * N * SCALE + M * K * FLOAT, 0, 2 * N * K * M, "fp16")


def gather(E: int, F: int, itemsize: int, scale: bool) -> int:
    """Bytes that L2 delivers for rows gathered by edges: whole sectors of a row and of its scale; index, weight."""
    row = F * itemsize if itemsize > 1 else _up(F, VECTOR)
    return E * (_up(row, SECTOR) + (SECTOR if scale else 0) + INDEX + FLOAT)


def spmm(
    N: int,
    E: int,
    F: int,
    itemsize: int = 1,
    *,
    bias: bool = False,
    mask: bool = False,
    requantize: bool = False,
    heads: int = 1,
) -> Traffic:
    """CSR graph with a weight an edge (and head), rows (codes and scales if ``itemsize`` is 1) -> fp32 rows, or codes
    and scales with ``requantize``; with ``mask`` a bit a value says what ReLU and dropout left."""
    result = N * F + N * SCALE + SEED if requantize else N * F * FLOAT
    rows = N * F * itemsize + (N * SCALE if itemsize == 1 else 0)
    structure = INDEX * (N + 1) + E * INDEX + E * heads * FLOAT
    extra = (F * FLOAT if bias else 0) + (mask_bytes(N, F) if mask else 0)
    through_l2 = gather(E, F, itemsize, itemsize == 1) + E * (heads - 1) * FLOAT + result
    return Traffic(structure + rows + result + extra, through_l2)


def sddmm(N: int, E: int, F: int, itemsize: int = 1, heads: int = 1) -> Traffic:
    """CSR graph and two matrices of rows -> the dot product of each edge's ends."""
    rows = 2 * (N * F * itemsize + (N * SCALE if itemsize == 1 else 0))
    result = E * heads * FLOAT
    through_l2 = gather(E, F, itemsize, itemsize == 1) + result
    return Traffic(INDEX * (N + 1) + E * INDEX + rows + result, through_l2)


def attention(N: int, E: int, F: int, H: int, itemsize: int = 1) -> Traffic:
    """CSR graph, two scores a node and head, rows (codes and a scale a head if ``itemsize`` is 1) -> fp32 rows, and the
    logarithm of each row's sum."""
    heads, result = N * H * FLOAT, N * F * FLOAT + N * H * FLOAT
    structure = INDEX * (N + 1) + E * INDEX
    rows = N * F * itemsize + (heads if itemsize == 1 else 0)
    return Traffic(structure + rows + 2 * heads + result, _gathered_by_head(E, F, H, itemsize) + result)


def attention_targets(N: int, E: int, F: int, H: int, itemsize: int = 1) -> Traffic:
    """The first pass backward: what :func:`attention` reads and the fp32 gradient -> the target scores' gradients, the
    gradient's codes, and four numbers a head for the second pass (three in full precision)."""
    heads = N * H * FLOAT
    read = attention(N, E, F, H, itemsize).bytes  # with the gradient in place of the result
    written = heads + (N * F + 4 * heads if itemsize == 1 else 3 * heads)
    seed = SEED if itemsize == 1 else 0
    through_l2 = _gathered_by_head(E, F, H, itemsize) + N * F * FLOAT + written
    return Traffic(read + written + seed, through_l2)


def attention_sources(N: int, E: int, F: int, H: int, itemsize: int = 1) -> Traffic:
    """The second pass backward, over the transposed graph: the gradient's rows and the numbers a head are gathered ->
    gradients of the rows, in fp32, and of the source scores."""
    heads, fields = N * H * FLOAT, 4 if itemsize == 1 else 3
    own = N * F * itemsize + heads + (heads if itemsize == 1 else 0)
    gathered = N * F * itemsize + fields * heads
    result = N * F * FLOAT + heads
    row = F * itemsize if itemsize > 1 else _up(F, VECTOR)
    through_l2 = E * (_up(row, SECTOR) + _up(fields * H * FLOAT, SECTOR) + INDEX) + own + result
    return Traffic(INDEX * (N + 1) + E * INDEX + own + gathered + result, through_l2)


def _gathered_by_head(E: int, F: int, H: int, itemsize: int) -> int:
    """Bytes that L2 delivers for rows with a score a head, codes with a scale a head too, each in whole sectors."""
    row = F * itemsize if itemsize > 1 else _up(F, VECTOR)
    sides = _up(H * FLOAT, SECTOR) * (2 if itemsize == 1 else 1)
    return E * (_up(row, SECTOR) + sides + INDEX)


def sums_by_edge(N: int, E: int, columns_in: int, columns_out: int) -> Traffic:
    """What goes over the edges of each node once, of so many fp32 values read and written: softmax and its kin."""
    return Traffic(INDEX * (N + 1) + E * FLOAT * (columns_in + columns_out))


def run(options: Namespace) -> int:
    """Print the tables; write a JSON line a step of each case to ``options.json``."""
    from . import cluster, steps

    cases = dict(steps.cases())
    for title, found in (*steps.tables(cases), cluster.table()):
        print(f"{title}\n{aligned(found)}\n")
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in steps.records(cases)))
    return 0
