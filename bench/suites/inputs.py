"""Inputs that suites share, and the bounds that their results are held to."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import qgnn
from qgnn import QConfig
from qgnn.data import DatasetError
from qgnn.ops._backends import STREAM_PROJECTION
from qgnn.reference.blocks import projection_signs, row_signs
from qgnn.rng import make_seed

from ..harness import UnavailableError, Work

# Bounds of the gate on ||result - reference|| / ||reference||. On normal data a row's absmax is 3 to 4 deviations, so a
# step is about 0.03 of one, and stochastic rounding (step / sqrt(6) rms) costs 0.013 an operand: 0.018 for a product of
# two, more where the result is quantized again. A wrong scale, transpose or dropped row lands far above 0.05.
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 2e-2, "int8": 5e-2}

INT8 = QConfig(bits=8)
OURS: dict[str, QConfig | None] = {"int8": INT8, "fp32": None}


T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Where a suite runs, and whether on tiny shapes."""

    device: torch.device
    quick: bool = False
    root: Path | None = None  # of real data sets
    prefixes: tuple[str, ...] = ("",)  # of the names of the cases that are wanted

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def scale(self) -> float:
        return 0.005 if self.quick else 1.0

    def shapes(self, *shapes: T) -> tuple[T, ...]:
        """The shapes to measure: the first alone if it has to be quick."""
        return shapes[:1] if self.quick else shapes

    def wants(self, dataset: str) -> bool:
        """Whether a case of the data set may be wanted. Quick ones are of a synthetic graph, whatever its name is."""
        path = f"{dataset}/"
        return self.quick or any(path.startswith(prefix) or prefix.startswith(path) for prefix in self.prefixes)


@cache
def graph(like: str, setting: Setting) -> Data:
    """A synthetic graph of a data set's shape on the suite's device."""
    return qgnn.data.synthetic(like=like, scale=setting.scale, seed=0).to(setting.device)


def graph_name(like: str, setting: Setting) -> str:
    """How a case's name begins: ``arxiv/synthetic``, and the scale if it is not 1."""
    return f"{like}/synthetic" + (f"/x{setting.scale:g}" if setting.scale != 1 else "")


def num_rows(setting: Setting) -> int:
    """Rows of a dense operand: the nodes of ogbn-arxiv."""
    return round(169_343 * setting.scale)


def randn(*size: int, setting: Setting, seed: int) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(seed)
    return torch.randn(*size, generator=generator, device=setting.device)


def projected(x: Tensor, ratio: int) -> Tensor:
    """The random projection of a matrix whose blocks are packed: so many columns of it to one."""
    seed, columns = make_seed(0, x.device), x.shape[1] // ratio
    own = row_signs(0, x.shape[0], x.shape[1], seed, STREAM_PROJECTION)
    return (x * own) @ projection_signs(x.shape[1], columns, seed, STREAM_PROJECTION) * columns**-0.5


def csr_int32(matrix: Tensor) -> Tensor:
    """CSR with int32 indices, as ours are. Not for torch's gradient of more than 46,340 rows and columns: it numbers
    places of the transposed matrix in int32 (2.13), and the gradient is wrong."""
    csr = matrix.to_sparse_csr()
    indices = csr.crow_indices().int(), csr.col_indices().int()
    return torch.sparse_csr_tensor(*indices, csr.values(), size=csr.shape)


def adjacency_coo(edge_index: Tensor, value: Tensor, num_nodes: int) -> Tensor:
    """The matrix that sums the sources' rows: rows = targets."""
    source, target = edge_index
    return torch.sparse_coo_tensor(torch.stack([target, source]), value, (num_nodes, num_nodes))


def adjacency(edge_index: Tensor, value: Tensor, num_nodes: int) -> Tensor:
    """The same in CSR."""
    return csr_int32(adjacency_coo(edge_index, value, num_nodes))


def adjacency_int64(edge_index: Tensor, value: Tensor, num_nodes: int) -> Tensor:
    """The same with indices as PyG makes them: for layers that gather rows by them, and for means, whose gradient by
    int32 indices torch gets wrong (see :func:`csr_int32`)."""
    return adjacency_coo(edge_index, value, num_nodes).to_sparse_csr()


def gcn_adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> Tensor:
    """The same with self-loops and GCN's normalization."""
    edge_index, weight = gcn_norm(edge_index, None, num_nodes)
    return adjacency(edge_index, weight.to(dtype), num_nodes)


def sparse_sum(matrix: Tensor, x: Tensor) -> Tensor:
    """torch's fastest product of a CSR matrix: on a CPU its own kernel, which the reduction selects, and not MKL's."""
    return torch.sparse.mm(matrix, x) if x.is_cuda else torch.sparse.mm(matrix, x, "sum")


def package(name: str) -> ModuleType:
    """An optional package."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} cannot be imported ({error})") from error


@contextmanager
def from_root() -> Iterator[None]:
    """A data set whose files are not there is not available."""
    try:
        yield
    except DatasetError as error:
        raise UnavailableError(f"{error}; --root names the folder of the data sets") from error


def available(suite: str, datasets: Sequence[str], setting: Setting, load: Callable[[str], object]) -> Iterator[str]:
    """Those wanted that can be loaded; of each other one it says why not."""
    for dataset in filter(setting.wants, datasets):
        try:
            load(dataset)
        except UnavailableError as reason:
            print(f"{suite}: {dataset}: not available: {reason}", file=sys.stderr, flush=True)
        else:
            yield dataset


def require_bf16(setting: Setting) -> None:
    """Raise where bf16 products are emulated: tens of times slower than fp32, which no one would choose."""
    if not setting.is_cuda and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        raise UnavailableError("this CPU multiplies bf16 in software only (no AVX512_BF16, no AMX)")


def tf32(setup: Callable[[], Work]) -> Callable[[], Work]:
    """The same work with torch's fp32 products on TF32 tensor cores."""

    def in_tf32(function: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            try:
                return function()
            finally:
                torch.set_float32_matmul_precision(before)

        return run

    def setup_in_tf32() -> Work:
        work = setup()
        return replace(work, run=in_tf32(work.run), check=None if work.check is None else in_tf32(work.check))

    return setup_in_tf32


def gradients(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """The backward pass of ``forward`` alone: its graph is built here and kept."""
    out = forward()
    return lambda: torch.autograd.grad(out, inputs, grad.to(out.dtype), retain_graph=True)
