"""One run: a model trained from one seed, evaluated and measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from qgnn.cli.measure import PeakMemory, SavedBytes
from qgnn.cli.processes import ALONE, Processes
from qgnn.cli.recipe import Recipe
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import Step, Task
from qgnn.cli.training import Training, forward_of
from qgnn.config import QConfig
from qgnn.memory import MIB
from qgnn.qtensor import QTensor
from qgnn.rng import rounding_from, splitmix64
from qgnn.trace import trace


class Run(NamedTuple):
    """What a run measured.

    Args:
        test_acc: The task's metric on the test set, at the best validation epoch: accuracy, micro-F1 of several labels
            a node, or ROC-AUC, 0 to 1; RMSE, in the data set's own unit.
        final_loss: Training loss of the last epoch: before its step, or the mean before each of several.
        best_epoch: The epoch of ``test_acc``, counted from 1.
        epoch_ms: Median time of an epoch's steps: forward, backward and optimizer, and the sampling of batches.
        losses: Training loss of each epoch.
        sent_bytes: What a process of several sent in a step to average gradients; ``None`` of one on its own.
        full_bytes: What it would have sent in a ring of fp32.
        mean_bits: Mean over the epochs of the width that a schedule set; ``None`` without a schedule.
        widths: The width of each epoch; empty without a schedule.
        saved_mib: What autograd keeps between forward and backward: the inputs of layers and what lies between them,
            without parameters and the graph; with a schedule, in the width behind the last epoch. Like all below,
            ``None`` or empty if the run was not measured.
        original_mib: The same without compression.
        features_mib: The features among both, as the first layer keeps them: no compression touches them.
        peak_mib: The largest amount of memory in use during training, before it was resumed too, if it can be had.
        ops: Which of qgnn's primitives ran in one training step, how often, in which format and on which backend.
    """

    test_acc: float
    final_loss: float
    best_epoch: int
    epoch_ms: float
    losses: tuple[float, ...] = ()
    sent_bytes: int | None = None
    full_bytes: int | None = None
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
    on_epoch: Callable[[Training], None] = lambda _: None,
    *,
    measure: bool = True,
    state: dict[str, Any] | None = None,
    processes: Processes = ALONE,
    gradients: str = "fp32",
) -> Run:
    """Train a model, from its start or from a state, and measure it, the latter in the first process alone.

    Args:
        task: What to learn, on ``device``, from :func:`qgnn.cli.task.make_task`.
        recipe: Hyperparameters.
        scheme: As all of these, that of a :class:`Training`.
        seed: See there.
        device: See there.
        model_name: See there.
        on_epoch: Called after each epoch, with the training.
        measure: Whether to measure memory and trace ops, for which more steps run after training, so that they disturb
            neither time nor peak.
        state: What :meth:`Training.state_dict` gave after an epoch, to go on from.
        processes: See there.
        gradients: See there.
    """
    peak = PeakMemory(device)
    if measure:
        peak.start()
    training = Training(task, recipe, scheme, seed, device, model_name, processes, gradients, peak if measure else None)
    if state is not None:
        training.load_state_dict(state)
    while training.epoch < recipe.epochs:
        training.run_epoch()
        on_epoch(training)
    losses = tuple(float(loss) for loss in training.losses)
    sent_bytes, full_bytes = training.step_bytes
    run = Run(training.test_acc, losses[-1], training.best_epoch, training.timer.median_ms, losses)
    run = run._replace(sent_bytes=sent_bytes, full_bytes=full_bytes)
    if (schedule := training.schedule) is not None:
        run = run._replace(mean_bits=schedule.mean_bits, widths=training.widths)
        if scheme.config is None:  # of a model, the layers know it
            scheme = scheme.with_compression(scheme.compression.with_bits(schedule.current_bits))
    if not measure or not processes.is_first:
        return run
    run = run._replace(peak_mib=peak.mib)  # before the steps that measure the rest
    step = next(training.steps_of(training.epoch))
    saved_mib, original_mib, features_mib, ops = inspect_step(training.model, step, scheme, device)
    return run._replace(saved_mib=saved_mib, original_mib=original_mib, features_mib=features_mib, ops=ops)


def paired_run(task: Task, recipe: Recipe, scheme: Scheme, seed: int, device: torch.device, model_name: str) -> Run:
    """:func:`train_run`, not measured, and with rounding from a generator of its own: runs of one seed that differ in
    their number formats alone drop the same entries, as does :data:`qgnn.cli.scheme.UNQUANTIZED`. Attention of GAT is
    an exception: what drops it goes by whether it is quantized."""
    generator = torch.Generator(device).manual_seed(splitmix64(seed))
    with rounding_from(generator):
        return train_run(task, recipe, scheme, seed, device, model_name, measure=False)


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
