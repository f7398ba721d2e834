"""What the launchers of attention share: buffers, arguments by name, and the two launches of a kernel."""

from typing import Any

import torch
import triton
from qgnn.kernels import tuning
from qgnn.kernels.memory import empty_codes
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan
from torch import Tensor


def head_values(x: Tensor) -> Tensor:
    """Values a head, as kernels read them: rows any distance apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def rows_arguments(name: str, x: Tensor | None) -> dict[str, Any]:
    """Pointer and strides of a matrix of rows, which may be missing."""
    strides = (0, 0) if x is None else x.stride()
    return {f"{name}_ptr": x, f"stride_{name}_n": strides[0], f"stride_{name}_f": strides[1]}


def empty_out(num_rows: int, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The result of a forward pass over rows ``x``."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.empty((num_rows, x.shape[1]), dtype=dtype, device=x.device)


def empty_slots(plan: Plan, heads: int, width: int, *, tiles: int, vectors: int, device: torch.device) -> Tensor:
    """The slots of a plan: ``[slots, tiles * H * D + vectors * H]``, rounded up to whole memory vectors."""
    size = heads * (tiles * width + vectors)
    return torch.empty((plan.num_slots, triton.cdiv(size, 4) * 4), dtype=torch.float32, device=device)


def gathered_rows(grad: Tensor, bits: int) -> Tensor:
    """What sources gather of the gradient: room for its codes, or itself."""
    return empty_codes(*grad.shape, grad.device) if bits else grad


def grad_arguments(grad: Tensor, grad_q: Tensor, bits: int, seed: Tensor | None, stream: int) -> dict[str, Any]:
    """The keyword arguments of a kernel that rounds the gradient."""
    return {
        "grad_q_ptr": grad_q if bits else None,
        "seed_ptr": seed,
        "stride_qn": grad_q.stride(0) if bits else 0,
        "stream": stream,
        "QMAX": (1 << (bits - 1)) - 1 if bits else 0,
        "STOCHASTIC": seed is not None,
        **rows_arguments("grad", grad),
    }


def empty_records(num_rows: int, fields: int, heads: int, device: torch.device) -> Tensor:
    """What the sources gather of a target beside its rows: ``fields`` values a head, a field after the other, in whole
    sectors of memory."""
    return torch.empty((num_rows, triton.cdiv(fields * heads, 8) * 8), dtype=torch.float32, device=device)


def check_width(name: str, heads: int, num_columns: int) -> int:
    """Columns of a head."""
    width = num_columns // max(1, heads)
    if width > tuning.ATTENTION_MAX_COLUMNS:
        raise ValueError(
            f"'{name}' expects at most {tuning.ATTENTION_MAX_COLUMNS} columns a head, which a program holds whole "
            f"(got {width}); use more heads of fewer columns"
        )
    return width


def launch_rows(
    kernel: Any, plan: Plan, partial: Tensor, heads: int, width: int, arguments: dict[str, Any], **tile_options: int
) -> None:
    """Run a kernel over the rows of a plan's groups and the chunks of its hubs, then over the hubs."""
    common = {
        "partial_ptr": partial,
        "items_ptr": plan.items,
        "hubs_ptr": plan.hubs,
        "counts_ptr": plan.counts,
        "H": heads,
        "D": width,
        "stride_pn": partial.stride(0),
        "GROUP": GROUP_ROWS,
        **arguments,
    }
    for hubs, programs in ((False, plan.num_programs * GROUP_ROWS), (True, plan.num_hub_programs)):
        if programs:
            config = tuning.attention(heads, width, hubs=hubs, **tile_options)
            kernel[(programs, triton.cdiv(heads, config["BLOCK_H"]))](**common, HUBS=hubs, **config)
