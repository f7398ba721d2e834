"""A model in training: its epochs, and the state between two of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qgnn import functional
from qgnn.cli.checkpoint import random_state, set_random_state
from qgnn.cli.measure import PeakMemory, StepTimer
from qgnn.cli.model import make_model, parameter_groups
from qgnn.cli.processes import ALONE, Processes
from qgnn.cli.recipe import Recipe
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import Features, Forward, Task
from qgnn.compress import compress_activations
from qgnn.config import QConfig
from qgnn.distributed import Int8State, fp32_hook, int8_hook
from qgnn.distributed.gradients import ring_bytes


class Training:
    """A model in training. On a CPU the same arguments give the same model, bit for bit.

    Args:
        task: What to learn, on ``device``.
        recipe: Hyperparameters.
        scheme: What is quantized, compressed and scheduled.
        seed: Seed of torch's global generator: initialization, dropout and stochastic rounding follow from it.
        device: Where to train.
        model_name: What to train.
        processes: Those that train this model.
        gradients: What they send each other: ``fp32``, or ``int8`` codes.
        peak: What measures the memory of this process, if something does.

    Attributes:
        epoch: Epochs so far.
        losses: The training loss of each: before its step, or the mean before each of several.
        best_epoch, test_acc: The epoch of the best validation so far, and the task's metric on the test set behind it,
            in the first process.
        widths: The width that a schedule set for each epoch.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        scheme: Scheme,
        seed: int,
        device: torch.device,
        model_name: str = "gcn",
        processes: Processes = ALONE,
        gradients: str = "fp32",
        peak: PeakMemory | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.task, self.recipe, self.device, self.processes = task.with_own_edges(), recipe, device, processes
        sizes = (task.features[0].shape[1], task.num_outputs)
        self.model = make_model(model_name, *sizes, recipe, scheme, task.by_graph, task.same_edges).to(device)
        groups = parameter_groups(self.model, recipe.weight_decay, recipe.inner_weight_decay)
        self.optimizer = torch.optim.Adam(groups, lr=recipe.lr)
        self.inputs = [model_input(x, recipe, scheme) for x in task.features]
        self.steps_of = self.task.steps(self.inputs[0], recipe, seed)
        self.compressed = scheme.compression.context(processes.own_seed(seed))
        self.schedule = scheme.make_schedule(self.model, self.compressed, recipe.epochs)
        self.timer, self.peak = StepTimer(device), peak
        self.epoch = self.best_epoch = 0
        self.losses: list[Tensor | float] = []
        self.best_val, self.test_acc = 0.0, 0.0
        self.forward = self._train_forward = forward_of(self.model, scheme, device)
        self._int8: Int8State | None = None
        if processes.is_joined:
            replica = DistributedDataParallel(self.model)
            if gradients == "int8":
                self._int8 = Int8State(seed=seed)
                replica.register_comm_hook(self._int8, int8_hook)
            else:
                replica.register_comm_hook(None, fp32_hook)
            self._train_forward = forward_of(replica, scheme, device)
        if processes.size > 1:
            torch.manual_seed(processes.own_seed(seed))

    def run_epoch(self) -> None:
        """Train for an epoch, evaluate where the recipe does, and let the schedule follow the loss of all processes."""
        self.model.train()
        self.epoch += 1
        losses, size = [], 0
        with self.timer.step():
            for step in self.steps_of(self.epoch):
                self.optimizer.zero_grad()
                with self.compressed:
                    loss = step.loss(self._train_forward)
                    (loss if step.share == 1 else loss * step.share).backward()
                self.optimizer.step()
                losses.append(loss.detach() * step.size)
                size += step.size
        self.losses.append(self.processes.mean(torch.stack(losses).sum(), size))
        if self.epoch % self.recipe.eval_every == 0 or self.epoch == self.recipe.epochs:
            self._evaluate()
        if self.schedule is not None:
            self.schedule.step(loss=self.losses[-1])

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Score the model on what is there to validate and to test: the first process for all, which have the same."""
        if not self.processes.is_first:
            return
        self.model.eval()
        val, test = self.task.evaluate(self.forward, self.inputs)
        if not self.best_epoch or self.task.metric.is_better(val, self.best_val):
            self.best_val, self.best_epoch, self.test_acc = val, self.epoch, test

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each epoch so far; none without a schedule."""
        return () if self.schedule is None else tuple(self.schedule.history[: self.epoch])

    @property
    def step_bytes(self) -> tuple[int, int] | tuple[None, None]:
        """What a process sends in a step, and would send in a ring of fp32; ``None`` without a group."""
        if not self.processes.is_joined:
            return None, None
        if self._int8 is not None:
            return self._int8.sent_bytes // self._int8.step, self._int8.full_bytes // self._int8.step
        full = ring_bytes(sum(p.numel() for p in self.model.parameters()), self.processes.size)
        return full, full

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on as this one would, of plain values and tensors; for all processes to call."""
        own = {
            "random": random_state(self.device),
            "compressed": self.compressed.state_dict() if isinstance(self.compressed, compress_activations) else None,
            "int8": None if self._int8 is None else self._int8.state_dict(),
            "peak_mib": None if self.peak is None else self.peak.mib,
        }
        return {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "losses": [float(loss) for loss in self.losses],
            "best": (self.best_val, self.best_epoch, self.test_acc),
            "times_ms": list(self.timer.times_ms),
            "processes": self.processes.gather(own),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict` of a training with the same arguments."""
        self.epoch, self.losses, self.timer.times_ms = state["epoch"], state["losses"], state["times_ms"]
        self.best_val, self.best_epoch, self.test_acc = state["best"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        own = state["processes"][self.processes.rank]
        if isinstance(self.compressed, compress_activations):
            self.compressed.load_state_dict(own["compressed"])
        if self._int8 is not None:
            self._int8.load_state_dict(own["int8"])
        if self.peak is not None:
            self.peak.go_on_from(own["peak_mib"])
        set_random_state(own["random"], self.device)


def forward_of(model: nn.Module, scheme: Scheme, device: torch.device) -> Forward:
    """The model as a task calls it: in the scheme's autocast, its result in fp32."""

    def forward(*arguments: Any) -> Tensor:
        with scheme.autocast(device):
            return model(*arguments).float()

    return forward


def model_input(x: Tensor, recipe: Recipe, scheme: Scheme) -> Features:
    """The features as the first layer takes them: codes where they are constant, so as to be quantized only once.

    The codes take the place of the features in everything that a run keeps.
    """
    config = scheme.config
    if config is None or not config.is_integer or scheme.schedule is not None or recipe.input_dropout:
        return x
    return functional.quantize(x, QConfig(bits=config.bits, rounding="nearest"))
