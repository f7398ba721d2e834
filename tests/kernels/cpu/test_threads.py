"""Threads of Python that call kernels at once, and processes forked while they do."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from qgnn.kernels.cpu import library
from torch import Tensor

import qgnn


def _training(seed: int) -> list[Tensor]:
    """Results and gradients of several kernels, on work for several threads."""
    torch.set_num_threads(2)  # of OpenMP, which has a pool for each thread of Python
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(900, (2, 6000), generator=generator)
    x, weight = (torch.randn(n, 40, generator=generator).requires_grad_() for n in (900, 24))
    options = {"config": qgnn.QConfig(), "seed": seed}
    hidden = qgnn.functional.graph_linear(edges, x, weight, activation="relu", dropout=0.25, **options)
    heads = hidden.view(900, 3, 8)
    out = qgnn.functional.attention(edges, heads, heads[:, :, 0], heads[:, :, 1], **options)
    largest = qgnn.functional.spmm(edges, x, reduce="max", **options)
    kept = qgnn.functional.compress(largest, bits=2, seed=seed)
    grads = torch.autograd.grad(out.square().sum() + largest.sum(), [x, weight])
    return [out.detach(), kept.packed, qgnn.functional.decompress(kept), *grads]


def test_threads_that_work_at_once_get_what_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From their first call on, of which each has its own arguments to describe."""
    expected = [_training(seed) for seed in range(4)]
    monkeypatch.setattr(library, "_functions", {})
    start = Barrier(4)

    def work(seed: int) -> list[list[Tensor]]:
        start.wait(timeout=60)
        return [_training(seed) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for results, alone in zip(pool.map(work, range(4)), expected, strict=True):
            assert all(torch.equal(a, b) for found in results for a, b in zip(found, alone, strict=True))


FORKS_FROM_A_THREAD = """
import json, os, signal, threading, torch, qgnn

torch.set_num_threads(2)
x = torch.randn(3000, 64)
expected = qgnn.functional.quantize(x, qgnn.QConfig(), seed=1).codes.numpy().tobytes()
ended = threading.Event()

def work():
    while not ended.is_set():
        qgnn.functional.quantize(x, qgnn.QConfig(), seed=2)

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range(6):  # while others are within a kernel
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        codes = qgnn.functional.quantize(x, qgnn.QConfig(), seed=1).codes
        os._exit(0 if codes.numpy().tobytes() == expected else 1)  # torch's own loops would wait for lost threads
    children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
ended.set()
for thread in threads:
    thread.join()
print(json.dumps(statuses))
"""


def test_processes_forked_while_threads_work() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS_FROM_A_THREAD]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout) == [0] * 6
