"""Results of the edges of a CSR graph from the two rows at their ends, in C.

Numerics: dot products of codes are exact integers, which round once on their way to fp32 and once a scale; those of
floats are 8 partial sums in fp32, added in pairs. Half types are converted to fp32 rows first. An edge is computed by
one thread: the number of threads changes nothing.

Oracle: qgnn.reference.sddmm
"""

import torch
from qgnn.kernels.cpu.library import empty_floats, launch, rows_of
from torch import Tensor


def _scale_operands(scale: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Scales ([1], [N] or [N, H]) with their strides by row and by head."""
    if scale is None:
        return None, 0, 0
    scale = scale.detach().float().contiguous()
    if scale.numel() == 1:
        return scale, 0, 0
    return (scale, 1, 0) if scale.dim() == 1 else (scale, scale.shape[1], 1)


def sddmm(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    *,
    op: str = "dot",
    heads: int = 1,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
) -> Tensor:
    """Dot products ``[E]`` or ``[E, H]``, or sums ``[E, F]``, in fp32; parameters as of the reference."""
    if (x_target.dtype == torch.int8) != (x_source.dtype == torch.int8):
        raise TypeError(
            f"'sddmm' expects both operands in int8 or both in a floating-point type (got {x_target.dtype} and "
            f"{x_source.dtype})"
        )
    N, F = x_target.shape
    E = index.numel()
    is_dot = op == "dot"
    out = empty_floats(E, heads if is_dot else F)
    if out.numel():
        dtype = torch.int8 if x_target.dtype == torch.int8 else torch.float32
        target, source = rows_of(x_target, dtype), rows_of(x_source, dtype)
        indptr, index = indptr.contiguous(), index.to(indptr.dtype).contiguous()
        strides = (t.stride(0) * t.element_size() for t in (target, source))
        launch(
            "qgnn_sddmm",
            *(out, indptr, index, target, source),
            *_scale_operands(target_scale),
            *_scale_operands(source_scale),
            *(N, heads, F // heads, *strides),
            *(index.dtype == torch.int64, dtype == torch.int8, is_dot),
        )
    return out.squeeze(1) if is_dot and heads == 1 else out
