"""Inputs and error bounds that the kernel tests share."""

import pytest
import torch
from torch import Tensor

SIZES = [1, 7, 32, 33, 130]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
UNIT = 2.0**-24  # unit roundoff of fp32

# The interpreter multiplies an infinity by zero, overflows or converts a NaN where a GPU does so silently.
quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def random_codes(num_rows: int, width: int, device: str) -> Tensor:
    return torch.randint(-127, 128, (num_rows, width), dtype=torch.int8, device=device)


def random_scales(num_rows: int, device: str) -> Tensor:
    """Scales over five orders of magnitude."""
    return 10.0 ** (5 * torch.rand(num_rows, device=device) - 4)


def surrounded(x: Tensor, filler: float) -> Tensor:
    """The same values as a view into a larger buffer that holds ``filler`` everywhere else."""
    buffer = torch.full((x.shape[0] + 3, x.shape[1] + 29), filler, dtype=x.dtype, device=x.device)
    view = buffer[1:-2, 5:-24]
    view.copy_(x)
    return view


def every_second_row(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def far_columns(x: Tensor) -> Tensor:
    """The same values, column-major, with columns so far apart that the offset of the last one takes 32 bits and the
    stride itself fewer. Only the pages of the values take memory, if the system gives it out as it is written."""
    stride = -(-(2**31) // (x.shape[1] - 1))
    num_elements = (x.shape[1] - 1) * stride + x.shape[0]
    storage = torch.UntypedStorage(num_elements * x.element_size(), device=x.device)
    return torch.tensor([], dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, (1, stride)).copy_(x)


def far_rows(x: Tensor) -> Tensor:
    """The same values with rows as far apart, at multiples of 16, even if they are read in words of two bytes."""
    stride = -(-(2**31) * (2 if x.element_size() == 1 else 1) // (x.shape[0] - 1) // 16) * 16
    num_elements = (x.shape[0] - 1) * stride + 1024
    storage = torch.UntypedStorage(num_elements * x.element_size(), device=x.device)
    return torch.tensor([], dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, (stride, 1)).copy_(x)


LAYOUTS = {"every_second_row": every_second_row, "column_major": column_major}


def csr(edge_index: Tensor, num_targets: int, device: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """``indptr`` and ``index`` of edges ``[source, target]``."""
    source, target = edge_index
    counts = torch.bincount(target, minlength=num_targets)[:num_targets]
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return indptr.to(device, dtype), source[torch.argsort(target, stable=True)].to(device, dtype)


def dense(indptr: Tensor, index: Tensor, value: Tensor, num_sources: int) -> Tensor:
    """The float64 matrix of a CSR graph; values of multi-edges are added."""
    row = torch.repeat_interleave(indptr.diff().long(), output_size=index.numel())
    matrix = torch.zeros((indptr.numel() - 1, num_sources), dtype=torch.float64, device=index.device)
    return matrix.index_put((row, index.long()), value.double(), accumulate=True)


def storage_error(dtype: torch.dtype) -> float:
    """Relative error of storing an fp32 value; the interpreter truncates to bf16 where a GPU rounds."""
    return {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}[dtype]


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """``|actual - expected| <= bound``, element by element, in float64; NaN fails."""
    error = (actual.double() - expected.double()).abs()
    worst = (error - bound).max() if error.numel() else torch.tensor(0.0)
    assert (error <= bound).all(), f"an element exceeds its error bound by {float(worst):.3g}"
