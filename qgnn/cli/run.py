"""One run: a model trained from one seed, evaluated and measured."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures

from qgnn import functional
from qgnn.cli.compression import NO_COMPRESSION, Compression
from qgnn.cli.measure import PeakMemory, SavedBytes, StepTimer
from qgnn.cli.model import dropped, make_model, parameter_groups
from qgnn.cli.precision import Precision
from qgnn.cli.recipe import Recipe
from qgnn.config import QConfig
from qgnn.memory import MIB
from qgnn.qtensor import QTensor
from qgnn.trace import trace


class Run(NamedTuple):
    """What a run measured.

    Args:
        test_acc: Test accuracy (micro-F1 for multi-label sets) at the best validation epoch, 0 to 1.
        epoch_ms: Median time of a training step: forward, backward and optimizer.
        saved_mib: What autograd keeps between forward and backward: the inputs of layers and what lies between them,
            without parameters and the graph.
        original_mib: The same without compression.
        features_mib: The features among both, as the first layer keeps them: no compression touches them.
        peak_mib: The largest amount of memory in use during training, if it can be had.
        ops: Which of qgnn's primitives ran in one training step, how often, in which format and on which backend.
    """

    test_acc: float
    epoch_ms: float
    saved_mib: float
    original_mib: float
    features_mib: float
    peak_mib: float | None
    ops: dict[str, dict[str, Any]]


def train_run(
    data: Data,
    recipe: Recipe,
    precision: Precision,
    seed: int,
    device: torch.device,
    model_name: str = "gcn",
    on_epoch: Callable[[], None] = lambda: None,
    compression: Compression = NO_COMPRESSION,
) -> Run:
    """Train a model and measure it. On a CPU the same arguments give the same model, bit for bit.

    Args:
        data: The graph, on ``device``, with ``x``, ``edge_index``, ``y`` and the three masks.
        recipe: Hyperparameters.
        precision: What the layers compute in.
        seed: Seed of torch's global generator: initialization, dropout and stochastic rounding follow from it.
        device: Where to train.
        model_name: What to train.
        on_epoch: Called after each epoch.
        compression: How what is kept for the backward pass is compressed.

    Returns:
        The measurements. The traced and counted steps are extra ones after training, so they disturb neither time nor
        peak.
    """
    torch.manual_seed(seed)
    peak = PeakMemory(device)
    peak.start()
    data = copy.copy(data)
    data.edge_index = data.edge_index.clone()  # a prepared graph lives as long as its edges: it ends with the run
    model = make_model(model_name, data.x.shape[1], num_outputs(data.y), recipe, precision, compression).to(device)
    optimizer = torch.optim.Adam(parameter_groups(model, recipe.weight_decay), lr=recipe.lr)
    x = model_input(data.x, recipe, precision)
    timer, compressed = StepTimer(device), compression.context(seed)
    best_val_acc, test_acc = -1.0, 0.0
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        with timer.step():
            optimizer.zero_grad()
            with compressed:
                loss(model, dropped(x, recipe, training=True), data, precision).backward()
            optimizer.step()
        if epoch % recipe.eval_every == 0 or epoch == recipe.epochs:
            val_acc, test_acc_now = evaluate(model, x, data, precision)
            if val_acc > best_val_acc:
                best_val_acc, test_acc = val_acc, test_acc_now
        on_epoch()
    peak_mib = peak.mib
    saved_mib, original_mib, features_mib, ops = inspect_step(model, x, data, recipe, precision, compression)
    return Run(test_acc, timer.median_ms, saved_mib, original_mib, features_mib, peak_mib, ops)


def model_input(x: Tensor, recipe: Recipe, precision: Precision) -> Tensor | QTensor:
    """The features as the first layer takes them: codes where they are constant, so as to be quantized only once.

    The codes take the place of the features in everything that a run keeps.
    """
    if precision.bits is None or recipe.input_dropout:
        return x
    return functional.quantize(x, QConfig(bits=precision.bits, rounding="nearest"))


def inspect_step(
    model: nn.Module, x: Tensor | QTensor, data: Data, recipe: Recipe, precision: Precision, compression: Compression
) -> tuple[float, float, float, dict[str, dict[str, Any]]]:
    """More training steps, without the optimizer: the MiB kept for backward, those without compression, those of the
    features among both, and the ops that run.

    The input of the first layer counts, as codes or as it is: its weight gradient needs it. What else exists between
    steps does not: parameters, labels, the graph and what was prepared from it. The report of a compression counts the
    same without that input.
    """
    model.train()
    with trace(error=False) as record, compression.context() as report:
        model.zero_grad()
        loss(model, dropped(x, recipe, training=True), data, precision).backward()
    ops = {name: {column: op[column] for column in ("calls", "format", "backend")} for name, op in record.ops.items()}
    layer: Any
    for layer in model.modules():  # its last step: codes of int8 again
        if isinstance(config := getattr(layer, "config", None), QConfig):
            layer.config = replace(config, save="int8")
    saved = SavedBytes([x.storage, x.scales] if isinstance(x, QTensor) else [x])
    with saved.count():
        loss(model, dropped(x, recipe, training=True), data, precision)
    original_mib, features_mib = saved.mib, saved.inputs_mib
    saved_mib = original_mib if report is None else features_mib + report.saved_bytes / MIB
    return saved_mib, original_mib, features_mib, ops


def loss(model: nn.Module, x: Tensor | QTensor, data: Data, precision: Precision) -> Tensor:
    """Training loss: cross entropy, or its multi-label form."""
    with autocast(data.x.device, precision):
        out = model(x, data.edge_index)[data.train_mask]
    y = data.y[data.train_mask]
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(out.float(), y.float())
    return F.cross_entropy(out.float(), y)


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor | QTensor, data: Data, precision: Precision) -> tuple[float, float]:
    """Score on the validation and test nodes."""
    model.eval()
    with autocast(data.x.device, precision):
        out = model(x, data.edge_index)
    return score(out, data.y, data.val_mask), score(out, data.y, data.test_mask)


def score(out: Tensor, y: Tensor, mask: Tensor) -> float:
    """Accuracy of the masked nodes, or micro-F1 if a node has several labels; 0 if there are no nodes."""
    if y.dim() == 1:
        return float((out[mask].argmax(dim=1) == y[mask]).double().sum() / max(int(mask.sum()), 1))
    predicted, true = out[mask] > 0, y[mask] > 0
    return float(2 * (predicted & true).sum() / max(int(predicted.sum() + true.sum()), 1))


def num_outputs(y: Tensor) -> int:
    """One logit a class, or one a label."""
    return y.shape[1] if y.dim() == 2 else int(y.max()) + 1


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for ``bf16``, nothing for the others."""
    if precision.name == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def normalize_rows(data: Data) -> Data:
    """A copy with rows of ``x`` that sum to one."""
    return NormalizeFeatures()(data.clone())
