"""What each process of the tests of int8 gradients does: processes import it by name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data_parallel import Model, batch, join, leave
from qgnn.distributed import Int8State, fp32_hook, int8_hook
from qgnn.distributed.gradients import _exchange

RANKS = 3
SIZES = [1, 2, 3, 100, 5000]
STEPS = 1000


def values_of(rank: int, size: int) -> Tensor:
    """With blocks of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, generator=generator) * 10.0 ** -torch.arange(size).div(1024).floor()


def exchange(rank: int, folder: str) -> None:
    join(rank, folder, RANKS)
    once = {size: _exchange(Int8State(), values_of(rank, size)) for size in SIZES}
    found: dict[str, Any] = {"once": once}
    for feedback in (False, True):
        state, total = Int8State(error_feedback=feedback, block_size=16), torch.zeros(20, dtype=torch.float64)
        for _ in range(STEPS):
            total += _exchange(state, values_of(rank, 20))
            state.step += 1
        found["with_feedback" if feedback else "without_feedback"] = total
        found["bytes"] = state.sent_bytes, state.full_bytes
    poisoned = values_of(rank, 100)
    if rank == 1:
        poisoned[7] = torch.inf
    state = Int8State(block_size=16, error_feedback=True)
    found["poisoned"] = _exchange(state, poisoned)
    found["behind"] = _exchange(state, values_of(rank, 100))
    found["sizes"] = {}
    for size in (1, RANKS * 1024, RANKS * 1024 + 1, 5000):
        state = Int8State()
        _exchange(state, values_of(rank, size))
        found["sizes"][size] = state.sent_bytes, state.full_bytes
    found["three"] = [three_processes(rank, resumed) for resumed in (False, True)]
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


def three_processes(rank: int, resumed: bool) -> tuple[Tensor, list[list[int]]]:
    """The weights behind four steps in fp32, on the way from one model to a new one or not; the buckets of each step.

    Layers are called in another order than they were made in, which is the one of the first step's buckets.
    """
    order: list[list[int]] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        order.append([p.numel() for p in bucket.parameters()])
        return fp32_hook(None, bucket)

    def model() -> DistributedDataParallel:
        torch.manual_seed(1)
        layers = nn.ModuleDict({"last": nn.Linear(50, 3), "first": nn.Linear(20, 50)})
        layers.forward = lambda x: layers["last"](layers["first"](x).relu())
        replica = DistributedDataParallel(layers)
        replica.register_comm_hook(None, hook)
        return replica

    trained = model()
    for step in range(4):
        if resumed and step == 2:
            weights, trained = trained.module.state_dict(), model()
            trained.module.load_state_dict(weights)
        torch.manual_seed(100 * step + rank)
        trained.zero_grad()
        trained(torch.randn(40, 20)).square().mean().backward()
        with torch.no_grad():
            for p in trained.parameters():
                p -= 0.5 * p.grad
    return nn.utils.parameters_to_vector(trained.parameters()).detach(), order


class Training:
    """Steps of one model."""

    def __init__(self, rank: int, state: Int8State | None, bucket_mb: float = 25.0) -> None:
        torch.manual_seed(1)
        self.rank, self.state = rank, state
        self.model = DistributedDataParallel(Model(), bucket_cap_mb=bucket_mb)
        if state is not None:
            self.model.register_comm_hook(state, int8_hook)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def steps(self, first: int, count: int) -> list[float]:
        x, edge_index, y = batch(self.rank)
        losses = []
        for step in range(first, first + count):
            torch.manual_seed(1000 * step + self.rank)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x, edge_index), y)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state.state_dict(),
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        self.model.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.state.load_state_dict(checkpoint["state"])

    @property
    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def train(rank: int, folder: str) -> None:
    join(rank, folder)
    found: dict[str, Any] = {}
    for name, state in (("fp32", None), ("int8", Int8State()), ("feedback", Int8State(error_feedback=True))):
        training = Training(rank, state)
        found[name] = training.steps(0, 60), training.weights
        found[f"{name}_bytes"] = None if state is None else (state.sent_bytes, state.full_bytes)
    cut = Training(rank, Int8State(), bucket_mb=0.0005)
    found["cut"] = cut.steps(0, 5), cut.weights
    whole = Training(rank, Int8State())
    found["whole"] = whole.steps(0, 5), whole.weights

    undisturbed = Training(rank, Int8State(error_feedback=True))
    undisturbed.steps(0, 3)
    torch.save(undisturbed.checkpoint(), f"{folder}/checkpoint{rank}.pt")
    found["undisturbed"] = undisturbed.steps(3, 4), undisturbed.weights
    resumed = Training(rank, Int8State(error_feedback=True))
    resumed.restore(torch.load(f"{folder}/checkpoint{rank}.pt", weights_only=True))
    found["resumed"] = resumed.steps(3, 4), resumed.weights
    for name, each in (("undisturbed", undisturbed), ("resumed", resumed)):
        found[f"{name}_bytes"] = each.state.step, each.state.sent_bytes, each.state.full_bytes
    torch.save(found, f"{folder}/{rank}.pt")
    leave()
