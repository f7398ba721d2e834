"""What each process of the tests of data parallel training does: processes import it by name."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphs import GRAPHS
from qgnn import QConfig
from qgnn.nn import Epilogue, QGATConv, QGCNConv, QSAGEConv

K, M, RANKS = 8, 4, 2
SECONDS = 180


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        relu = Epilogue("relu", dropout=0.1)
        self.convs = nn.ModuleList(
            [QGCNConv(K, 16, epilogue=relu), QSAGEConv(16, 16, epilogue=relu), QGATConv(16, M, heads=2, concat=False)]
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    edge_index, num_nodes = GRAPHS[("random", "power_law")[rank]]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_nodes, K, generator=generator)
    return x, edge_index, (x[:, :M]).argmax(1)


def leave() -> None:
    """End this process when all are done. Gloo's own way out can wait for a process that is gone."""
    torch.distributed.barrier()
    os._exit(0)


def join(rank: int, folder: str, ranks: int = RANKS) -> None:
    """Meet the other processes."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group(
        "gloo", rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )


def run(function: Callable[[int, str], None], folder: str, ranks: int = RANKS) -> None:
    """``function`` in all processes, or an error after some minutes."""
    processes = mp.spawn(function, (folder,), nprocs=ranks, join=False)
    end = time.monotonic() + SECONDS
    while not processes.join(timeout=5):
        if time.monotonic() > end:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"{ranks} processes did not end within {SECONDS} seconds")


def train(rank: int, folder: str) -> None:
    join(rank, folder)
    torch.manual_seed(1)
    model = DistributedDataParallel(Model())
    torch.manual_seed(100 + rank)  # so that the noise of rounding differs between the ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, edge_index, y = batch(rank)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edge_index), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [p.grad for p in model.parameters()]
    torch.save((losses, list(model.module.state_dict().values()), gradients), f"{folder}/{rank}.pt")
    leave()


def nearest() -> Model:
    torch.manual_seed(1)
    model = Model()
    for conv in model.convs:
        conv.configure(QConfig(rounding="nearest"))
    return model


def gradients_alone(rank: int, model: nn.Module | None = None) -> list[Tensor]:
    model = nearest() if model is None else model
    x, edge_index, y = batch(rank)
    nn.functional.cross_entropy(model(x, edge_index), y).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def one_step(rank: int, folder: str) -> None:
    join(rank, folder)
    torch.save(gradients_alone(rank, DistributedDataParallel(nearest())), f"{folder}/{rank}.pt")
    leave()
