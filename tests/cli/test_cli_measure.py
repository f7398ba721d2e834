"""The measurements: bytes that autograd keeps, the peak of memory, the median of the step times."""

import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgnn import memory
from qgnn.cli.measure import PeakMemory, SavedBytes, StepTimer
from qgnn.memory import MIB

CPU = torch.device("cpu")


def saved_bytes(function: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> float:
    saved = SavedBytes(inputs)
    with saved.count():
        out = function()
    out.sum().backward()  # what was packed has to unpack
    return saved.mib * MIB


def test_saved_bytes_counts_a_storage_once() -> None:
    x = torch.rand(100, 10, requires_grad=True)
    y = torch.rand(100, 10)
    assert saved_bytes(lambda: x * y, x, y) == 4000, "x is not needed for the gradient of x"
    assert saved_bytes(lambda: x * y + x * y.view(1000).view(100, 10), x, y) == 4000, "two views of one storage"
    z = torch.rand(100, 10, requires_grad=True)
    assert saved_bytes(lambda: x * z, x, z) == 8000
    assert saved_bytes(lambda: x * z, z) == 4000
    assert saved_bytes(lambda: x * y) == 0, "what was alive before does not count unless it is named"


def test_saved_bytes_counts_the_whole_storage_of_a_view() -> None:
    x = torch.rand(10, requires_grad=True)
    assert saved_bytes(lambda: x * torch.rand(1000)[:10]) == 4000, "a view keeps all of it alive"


def test_saved_bytes_counts_intermediates_and_dtypes() -> None:
    x = torch.rand(64, requires_grad=True)
    assert saved_bytes(lambda: x.exp()) == 256
    assert saved_bytes(lambda: x.exp().exp().exp()) == 3 * 256, "a freed address must not hide a later tensor"
    assert saved_bytes(lambda: x[torch.arange(8)]) == 64, "the index counts with its eight bytes"


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_saved_bytes_counts_sparse_tensors(layout: torch.layout) -> None:
    A = torch.eye(16).to_sparse(layout=layout)
    x = torch.rand(16, 4, requires_grad=True)
    assert saved_bytes(lambda: torch.sparse.mm(A, x), A) >= 16 * 4
    assert saved_bytes(lambda: torch.sparse.mm(A, x)) == 0


@pytest.mark.skipif(platform.system() != "Linux", reason="the resident high-water mark is read from Linux's /proc")
def test_peak_memory_sees_a_spike_and_forgets_it() -> None:
    peak = PeakMemory(CPU)
    try:
        PeakMemory.CLEAR.write_text("5")
    except OSError:
        peak.start()
        assert peak.mib is None
        return
    peak.start()
    before = peak.mib
    assert before is not None
    torch.ones(64 * MIB // 4).sum()
    assert peak.mib - before == pytest.approx(64, abs=16)
    peak.start()
    assert peak.mib - before < 32


def test_step_timer_leaves_out_the_first_steps() -> None:
    timer = StepTimer(CPU)
    for seconds in (0.05, 0.05, 0.05, 0.0, 0.0):
        with timer.step():
            time.sleep(seconds)
    assert timer.median_ms < 20


def test_step_timer_of_a_short_run_uses_the_last_step() -> None:
    timer = StepTimer(CPU)
    for seconds in (0.1, 0.02):
        with timer.step():
            time.sleep(seconds)
    assert 20 <= timer.median_ms < 90


def test_peak_memory_survives_a_system_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "clear_refs").touch()
    monkeypatch.setattr(PeakMemory, "CLEAR", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    peak = PeakMemory(CPU)
    peak.start()
    assert peak.mib is None


def test_saved_bytes_excludes_nothing_that_is_dead() -> None:
    """Whoever looks for tensors finds one in a cycle, until a collection gives its memory to the next one."""
    x = torch.randn(300, 100)
    gc.collect()
    gc.disable()
    try:
        cycle = [x + 1]
        cycle.append(cycle)
        del cycle
        counter = SavedBytes()
        gc.collect()
        with counter.count():
            kept = x.requires_grad_().exp()
    finally:
        gc.enable()
    assert counter.mib == kept.nbytes / MIB
