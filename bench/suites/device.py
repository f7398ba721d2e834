"""What the machine allows, measured in the same run as everything else: copies, reads from the L2 cache, products.

The providers do less than any primitive, so nothing is compared with them; other records are shown as shares of the
copy. A product's size is in its case's name: 2 n^3 operations.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import TOLERANCE, Setting, randn, require_bf16, tf32

COPY_MIB, L2_MIB, READS = 1024, 8, 1024
SIZE = 8192


def _copy(x: Tensor) -> Work:
    """Into memory that is there."""
    out = torch.empty_like(x)
    return Work(lambda: out.copy_(x))


def _read_l2(x: Tensor, reads: int) -> Work:
    if not x.is_cuda:
        raise UnavailableError("a kernel for GPUs")
    from ..read_l2 import read

    return Work(lambda: read(x, reads))


def _fp32(a: Tensor, b: Tensor) -> Work:
    return Work(lambda: a @ b)


def _bf16(a: Tensor, b: Tensor, setting: Setting) -> Work:
    require_bf16(setting)
    return _fp32(a.bfloat16(), b.bfloat16())


def _int8(a: Tensor, b: Tensor) -> Work:
    """Operands are whole numbers, so nothing is rounded."""
    a_q, b_q = a.to(torch.int8), b.t().contiguous().to(torch.int8).t()
    return Work(lambda: torch._int_mm(a_q, b_q))


def _products(size: int, setting: Setting) -> Case:
    a, b = (randn(size, size, setting=setting, seed=seed).mul_(3).round_().clamp_(-8, 8) for seed in (1, 2))
    setups: dict[str, Callable[[], Work]] = {
        "ceiling: int8": partial(_int8, a, b),
        "ceiling: bf16": partial(_bf16, a, b, setting),
        "ceiling: tf32" if setting.is_cuda else "ceiling: fp32": tf32(partial(_fp32, a, b)),
    }
    # Small whole numbers: exact in every type but for the rounding of bf16 results.
    providers = [Provider(name, setup, TOLERANCE["bf16"]) for name, setup in setups.items()]
    # The reference of 8192^3 in float64 would take a second: the product in fp32 of whole numbers is exact too.
    return Case(f"matmul/{size}x{size}x{size}", "forward", lambda: [a @ b], providers)


def cases(setting: Setting) -> Iterator[Case]:
    scale = 1 if setting.is_cuda and not setting.quick else 1 / 256
    x = randn(round(COPY_MIB * scale) * 2**18, setting=setting, seed=1)
    copy = Provider("ceiling: copy", partial(_copy, x), 0.0)
    yield Case(f"copy/{x.nbytes >> 20}MiB", "forward", lambda: [x], [copy], 2 * x.nbytes)
    table = x[: L2_MIB * 2**18].clone()
    read = Provider("ceiling: read", partial(_read_l2, table, READS), TOLERANCE["fp32"])
    sums = partial(torch.full, (READS,), float(table.double().sum()), dtype=torch.float64, device=x.device)
    yield Case(f"l2/{table.nbytes >> 20}MiB", "forward", lambda: [sums()], [read], READS * table.nbytes)
    yield _products(SIZE if scale == 1 else 128, setting)
