"""What every test shares: the device, the kernels' interpreter where there is no GPU, deterministic property tests."""

import gc
import os
import weakref
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read with torch: processes that test side by side share the cores

import torch
from hypothesis import HealthCheck, settings

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Read when a kernel is decorated, so it has to be set before the first import of triton or qgnn.kernels.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(min(2, os.cpu_count() or 1))

settings.register_profile(
    "qgnn",
    derandomize=True,
    deadline=None,  # the interpreter's speed varies by orders of magnitude
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("qgnn")


_living_objects = gc.get_objects
_tensors_aside: list[weakref.ref[torch.Tensor]] = []


def _set_aside() -> None:
    """Takes all that lives, which are millions of objects, out of the way of every later collection of garbage and of
    everyone who looks for living tensors; these are still found."""
    gc.collect()
    _tensors_aside.extend(weakref.ref(item) for item in _living_objects() if issubclass(type(item), torch.Tensor))
    gc.freeze()


def pytest_collection_finish() -> None:
    """The tests themselves."""
    _set_aside()
    gc.get_objects = lambda: [*_living_objects(), *(t for ref in _tensors_aside if (t := ref()) is not None)]


@pytest.fixture(scope="module", autouse=True)
def _module_set_aside() -> Iterator[None]:
    """What a module leaves behind, in caches of compilers for the most part."""
    yield
    _set_aside()


def pytest_unconfigure() -> None:
    """What is frozen would count as leaked at the end."""
    gc.get_objects = _living_objects
    gc.unfreeze()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU if there is one, else the CPU (Triton's interpreter)."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same global random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _sequential_as_it_was() -> Iterator[None]:
    """PyG's Sequential writes the code of its newest instance to the class, where those find it that it made none for:
    those of a module that cannot be imported by its name, as tests are."""
    from torch_geometric.nn import Sequential  # imports triton

    forward = Sequential.forward
    yield
    Sequential.forward = forward


@pytest.fixture(autouse=True)
def _gigabytes_returned() -> Iterator[None]:
    """Processes share a GPU, and torch keeps what a test has freed: offsets beyond 32 bits take gigabytes each."""
    yield
    if HAS_CUDA and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
