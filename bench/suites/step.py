"""What the suites ``layer`` and ``train`` share: a training step, and how torch's own sparse products make one."""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from qgnn.formats import Format

from ..harness import Work
from .inputs import Setting, require_bf16, sparse_sum

# Bounds on the output and on every gradient of one step. Int8 products and aggregations, forward and backward, add up
# about six roundings of 0.013 each (see TOLERANCE in inputs.py). ReLUs make more of them: a normal value with an error
# of 0.02, from its product and its aggregation, has the wrong sign with a probability of 0.02 / pi, and then a whole
# element of a gradient is wrong, of which half are zeros: sqrt(2 * 0.02 / pi) = 0.11 of its norm; with roundings 0.12
# to 0.14. In bf16 the error of a value is 0.005, which makes 0.06. Large graphs average it.
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-1, "bf16": 1e-1, "int8": 1.5e-1}

LARGE = 100_000  # nodes
LEARNING_RATE = 1e-5  # Adam's work does not depend on it, and the weights stay what they are over any number of steps

Network = Callable[..., Tensor]
Context = Callable[[], Any]


def tolerance_of(fmt: Format) -> float:
    """The same bound for a format, from its relative error of normal values: six roundings, and the ReLU that flips."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    error = float((fmt.quantize(x) - x).norm() / x.norm())
    return TOLERANCE["fp32"] + math.sqrt(6) * error + math.sqrt(2 * math.sqrt(2) * error / math.pi)


def training_step(
    make: Callable[[bool], torch.nn.Module],
    forward: Callable[[Network, Tensor | None], tuple[Tensor, Tensor]],
    x: Tensor | None = None,
    grad: Tensor | None = None,
    compiled: bool = False,
    without: Collection[str] = (),
) -> Work:
    """Forward, backward and Adam.

    Args:
        make: Makes the module with its first parameters; its argument tells whether the gate is to look at it.
        forward: What the gate looks at, and what ``backward`` starts from, of the module and ``x``.
        x: An input that needs a gradient, as another layer's output does.
        grad: The gradient that the result receives; ``None`` for a loss.
        compiled: Whether the module goes through torch.compile.
        without: Parameters whose gradient is zero but for rounding, so that there is nothing to compare.
    """

    def compile_(module: torch.nn.Module) -> Network:
        return torch.compile(module) if compiled else module

    def backward(module: torch.nn.Module, network: Network) -> Tensor:
        module.zero_grad()
        if x is not None:
            x.grad = None
        out, root = forward(network, x)
        root.backward(None if grad is None else grad.to(root.dtype))
        return out

    module = make(False)
    network = compile_(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        backward(module, network)
        optimizer.step()

    checked: list[tuple[torch.nn.Module, Network]] = []  # one, made late: compiling takes a while

    def check() -> list[Tensor]:
        if not checked:
            other = make(True)
            checked.append((other, compile_(other)))
        out = backward(*checked[0])
        return [out.detach(), *gradients_of(checked[0][0], x, without)]

    def kept() -> object:
        """For counting: the input of a layer is another's output and counts, a data set's features do not."""
        return forward(network, None if x is None else x.detach().clone().requires_grad_())

    return Work(step, check, kept)


def gradients_of(module: torch.nn.Module, x: Tensor | None, without: Collection[str] = ()) -> list[Tensor]:
    """Those of the parameters, by name, and that of the input."""
    leaves = [leaf for name, leaf in sorted(module.named_parameters()) if name not in without]
    grads = [leaf.grad for leaf in (*leaves, *([] if x is None else [x]))]
    return [grad.clone() for grad in grads if grad is not None]


def autocast_bf16(setting: Setting) -> Context:
    """The context of a forward pass in bf16.

    Raises:
        UnavailableError: If bf16 products are emulated here.
    """
    require_bf16(setting)
    return partial(torch.autocast, setting.device.type, torch.bfloat16)


class _BothWays(torch.autograd.Function):
    """A x with the transpose for the backward pass prepared, where torch.sparse.mm would transpose in every step."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return sparse_sum(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, sparse_sum(ctx.transposed, grad)


Pair = tuple[Tensor, Tensor]


class PreparedGCNConv(GCNConv):
    """The fastest that torch's own sparse product allows: GCNConv on a prepared pair of CSR matrices."""

    def forward(self, x: Tensor, edges: Pair) -> Tensor:
        out = _BothWays.apply(*edges, self.lin(x))
        return out + self.bias.to(out.dtype)


class PreparedSAGEConv(SAGEConv):
    """SAGEConv on such a pair, whose values are those of a mean."""

    def forward(self, x: Tensor, edges: Pair) -> Tensor:
        return self.lin_l(_BothWays.apply(*edges, x)) + self.lin_r(x)


class PreparedGINConv(GINConv):
    """GINConv on such a pair; its epsilon is zero."""

    def forward(self, x: Tensor, edges: Pair) -> Tensor:
        return self.nn(_BothWays.apply(*edges, x) + x)
