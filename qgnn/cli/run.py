"""One run: a model trained from one seed, evaluated and measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qgnn import functional
from qgnn.cli.measure import PeakMemory, SavedBytes, StepTimer
from qgnn.cli.model import make_model, parameter_groups
from qgnn.cli.recipe import Recipe
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import Features, Forward, Step, Task
from qgnn.config import QConfig
from qgnn.memory import MIB
from qgnn.qtensor import QTensor
from qgnn.rng import rounding_from, splitmix64
from qgnn.trace import trace


class Run(NamedTuple):
    """What a run measured.

    Args:
        test_acc: Test accuracy (micro-F1 for multi-label sets) at the best validation epoch, 0 to 1.
        final_loss: Training loss of the last epoch: before its step, or the mean before each of several.
        best_epoch: The epoch of ``test_acc``, counted from 1.
        epoch_ms: Median time of an epoch's steps: forward, backward and optimizer, and the sampling of batches.
        mean_bits: Mean over the epochs of the width that a schedule set; ``None`` without a schedule.
        widths: The width of each epoch; empty without a schedule.
        saved_mib: What autograd keeps between forward and backward: the inputs of layers and what lies between them,
            without parameters and the graph; with a schedule, in the width behind the last epoch. Like all below,
            ``None`` or empty if the run was not measured.
        original_mib: The same without compression.
        features_mib: The features among both, as the first layer keeps them: no compression touches them.
        peak_mib: The largest amount of memory in use during training, if it can be had.
        ops: Which of qgnn's primitives ran in one training step, how often, in which format and on which backend.
    """

    test_acc: float
    final_loss: float
    best_epoch: int
    epoch_ms: float
    mean_bits: float | None = None
    widths: tuple[int, ...] = ()
    saved_mib: float | None = None
    original_mib: float | None = None
    features_mib: float | None = None
    peak_mib: float | None = None
    ops: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - a NamedTuple default, never written to


def train_run(
    task: Task,
    recipe: Recipe,
    scheme: Scheme,
    seed: int,
    device: torch.device,
    model_name: str = "gcn",
    on_epoch: Callable[[], None] = lambda: None,
    *,
    measure: bool = True,
) -> Run:
    """Train a model and measure it. On a CPU the same arguments give the same model, bit for bit.

    Args:
        task: What to learn, on ``device``, from :func:`qgnn.cli.task.make_task`.
        recipe: Hyperparameters.
        scheme: What is quantized, compressed and scheduled.
        seed: Seed of torch's global generator: initialization, dropout and stochastic rounding follow from it.
        device: Where to train.
        model_name: What to train.
        on_epoch: Called after each epoch.
        measure: Whether to measure memory and trace ops, for which more steps run after training, so that they disturb
            neither time nor peak.
    """
    torch.manual_seed(seed)
    peak = PeakMemory(device)
    if measure:
        peak.start()
    task = task.with_own_edges()
    in_channels = task.features[0].shape[1]
    kind = (task.by_graph, task.same_edges)
    model = make_model(model_name, in_channels, task.num_outputs, recipe, scheme, *kind).to(device)
    optimizer = torch.optim.Adam(parameter_groups(model, recipe.weight_decay), lr=recipe.lr)
    inputs = [model_input(x, recipe, scheme) for x in task.features]
    epoch_steps, forward = task.steps(inputs[0], recipe), forward_of(model, scheme, device)
    timer, compressed = StepTimer(device), scheme.compression.context(seed)
    schedule = scheme.make_schedule(model, compressed, recipe.epochs)
    best_val_acc, best_epoch, test_acc, loss = -1.0, 0, 0.0, math.nan
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        losses, size = [], 0
        with timer.step():
            for step in epoch_steps():
                optimizer.zero_grad()
                with compressed:
                    step_loss = step.loss(forward)
                    step_loss.backward()
                optimizer.step()
                losses.append(step_loss.detach() * step.size)
                size += step.size
        epoch_loss = torch.stack(losses).sum() / size
        if epoch % recipe.eval_every == 0 or epoch == recipe.epochs:
            loss = float(epoch_loss)
            val_acc, test_acc_now = evaluate(model, forward, task, inputs)
            if val_acc > best_val_acc:
                best_val_acc, best_epoch, test_acc = val_acc, epoch, test_acc_now
        if schedule is not None:
            schedule.step(loss=epoch_loss)
        on_epoch()
    run = Run(test_acc, loss, best_epoch, timer.median_ms)
    if schedule is not None:
        run = run._replace(mean_bits=schedule.mean_bits, widths=tuple(schedule.history[: recipe.epochs]))
        if scheme.config is None:  # of a model, the layers know it
            scheme = scheme.with_compression(scheme.compression.with_bits(schedule.current_bits))
    if not measure:
        return run
    run = run._replace(peak_mib=peak.mib)  # before the steps that measure the rest
    step = next(epoch_steps())
    saved_mib, original_mib, features_mib, ops = inspect_step(model, step, scheme, device)
    return run._replace(saved_mib=saved_mib, original_mib=original_mib, features_mib=features_mib, ops=ops)


def paired_run(task: Task, recipe: Recipe, scheme: Scheme, seed: int, device: torch.device, model_name: str) -> Run:
    """:func:`train_run`, not measured, and with rounding from a generator of its own: runs of one seed that differ in
    their number formats alone drop the same entries, as does :data:`qgnn.cli.scheme.UNQUANTIZED`. Attention of GAT is
    an exception: what drops it goes by whether it is quantized."""
    generator = torch.Generator(device).manual_seed(splitmix64(seed))
    with rounding_from(generator):
        return train_run(task, recipe, scheme, seed, device, model_name, measure=False)


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


def inspect_step(
    model: nn.Module, step: Step, scheme: Scheme, device: torch.device
) -> tuple[float, float, float, dict[str, dict[str, Any]]]:
    """More training steps, without the optimizer: the MiB kept for backward, those without compression, those of the
    features among both, and the ops that run.

    The input of the first layer counts, as codes or as it is: its weight gradient needs it. What else exists between
    steps does not: parameters, labels, the graph and what was prepared from it. The report of a compression counts the
    same without that input.
    """
    model.train()
    x, forward = step.features, forward_of(model, scheme, device)
    with trace(error=False) as record, scheme.compression.context() as report:
        model.zero_grad()
        step.loss(forward).backward()
    ops = {name: {column: op[column] for column in ("calls", "format", "backend")} for name, op in record.ops.items()}
    layer: Any
    for layer in model.modules():  # its last step: codes of int8 again
        if isinstance(config := getattr(layer, "config", None), QConfig):
            layer.config = replace(config, save="int8")
    saved = SavedBytes([x.storage, x.scales] if isinstance(x, QTensor) else [x])
    with saved.count():
        step.loss(forward)
    original_mib, features_mib = saved.mib, saved.inputs_mib
    saved_mib = original_mib if report is None else features_mib + report.saved_bytes / MIB
    return saved_mib, original_mib, features_mib, ops


@torch.no_grad()
def evaluate(model: nn.Module, forward: Forward, task: Task, inputs: Sequence[Features]) -> tuple[float, float]:
    """Score of the model on what is there to validate and to test."""
    model.eval()
    return task.evaluate(forward, inputs)
