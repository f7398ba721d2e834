"""What a run costs: time, the bytes that autograd keeps, the peak of memory."""

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from qgnn.memory import MIB, peak_bytes

# Epochs at the start of a run that prepare the graph, compile kernels and warm caches; their time does not count.
WARMUP_EPOCHS = 3


def device_is_lost() -> bool:
    """Whether CUDA serves no call of this process any more, as after an access out of bounds."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class StepTimer:
    """Wall time of training steps, with the GPU's work included.

    Args:
        device: Where the steps run.

    Attributes:
        times_ms: Of each step so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times_ms: list[float] = []

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time the block."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.times_ms.append((time.perf_counter() - start) * 1e3)

    @property
    def median_ms(self) -> float:
        """Median over the steps without the first few; of a short run, over its last step at least."""
        return median(self.times_ms[min(WARMUP_EPOCHS, len(self.times_ms) - 1) :])


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor; a sparse one has several."""
    if tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield from storages_of(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield part.untyped_storage()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield part.untyped_storage()


class SavedBytes:
    """Counts what autograd keeps for the backward pass: each storage once, whatever number of tensors view it.

    What was alive before (parameters, the data set, a prepared graph) exists between steps as well and does not count.

    Args:
        inputs: Tensors that count if they are kept, although they were alive before: the input of the first layer.
    """

    def __init__(self, inputs: Iterable[Tensor] = ()) -> None:
        self._excluded: set[int] = set()
        gc.collect()  # the memory of what is dead already may be given out again while counting
        for item in gc.get_objects():
            if type(item) in (Tensor, torch.nn.Parameter):
                with contextlib.suppress(RuntimeError):  # what a compiler left behind has no memory
                    self._excluded |= {storage.data_ptr() for storage in storages_of(item)}
        self._inputs = {storage.data_ptr() for tensor in inputs for storage in storages_of(tensor)}
        self._excluded -= self._inputs
        # Holding the storages keeps an address from being given out a second time while counting.
        self._saved: dict[int, torch.UntypedStorage] = {}

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Count what the block, a forward pass, saves."""

        def pack(tensor: Tensor) -> Tensor:
            for storage in storages_of(tensor):
                if storage.nbytes() and storage.data_ptr() not in self._excluded:
                    self._saved[storage.data_ptr()] = storage
            return tensor.detach()  # the tensor itself would keep its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @property
    def mib(self) -> float:
        """MiB kept."""
        return sum(storage.nbytes() for storage in self._saved.values()) / MIB

    @property
    def inputs_mib(self) -> float:
        """MiB kept that are those of the inputs."""
        return sum(s.nbytes() for pointer, s in self._saved.items() if pointer in self._inputs) / MIB


class PeakMemory:
    """The largest amount of memory in use since :meth:`start`.

    On CUDA what torch's allocator handed out; on a CPU under Linux the resident size of the whole process, libraries
    and data set included. Elsewhere, and where the system does not let a process reset the mark, it is unknown.

    Args:
        device: Where the run takes place.
    """

    CLEAR = Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._was_reset = False
        self._before: float | None = 0.0

    def start(self) -> None:
        """Release what earlier runs left, and set the mark back."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            self.CLEAR.write_text("5")  # 5: set the high-water mark to the present size
            self._was_reset = True

    @property
    def mib(self) -> float | None:
        """MiB at the peak, or ``None`` if that cannot be had."""
        if self._before is None or (self._device.type != "cuda" and not self._was_reset):
            return None
        peak = peak_bytes(self._device)
        return None if peak is None else max(peak / MIB, self._before)

    def go_on_from(self, mib: float | None) -> None:
        """Count what was measured before as part of this: MiB at an earlier peak, or ``None`` if that is unknown."""
        self._before = mib
