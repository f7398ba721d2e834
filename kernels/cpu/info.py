"""How the compiled library was compiled, by its own account."""

import torch
from qgnn.kernels.cpu.library import launch


def info() -> dict[str, bool]:
    """Whether it has OpenMP, and whether it is for this very CPU rather than the architecture's baseline."""
    openmp, native = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    launch("qgnn_info", openmp, native)
    return {"openmp": bool(openmp), "native": bool(native)}
