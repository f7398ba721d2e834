"""Layers and models in recorded steps: what a recording does is what they do eagerly."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from capture import record
from graphs import GRAPHS
from qgnn import Graph, QConfig, functional
from qgnn.nn import QGCNConv
from qgnn.rng import make_seed

K, M = 20, 8


def edges(device: str) -> tuple[Tensor, int]:
    edge_index, num_nodes = GRAPHS["power_law"]
    return edge_index.to(device), num_nodes


@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
def test_a_recorded_layer_does_what_it_does_eagerly(config: QConfig | None, device: str) -> None:
    edge_index, num_nodes = edges(device)
    graph = Graph.from_edge_index(edge_index, num_nodes, torch.rand(edge_index.shape[1], device=device))

    def step(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        out = functional.graph_linear(graph, *leaves, config=config, seed=seed).relu()
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    def draw(seed: int) -> tuple[Tensor, ...]:
        shapes = ((num_nodes, K), (M, K), (M,), (num_nodes, M))
        return (*(torch.randn(shape, device=device) for shape in shapes), make_seed(seed, device))

    inputs = draw(1)
    replay = record(step, inputs)
    for seed in (1, 2):  # other values and another seed, in the same memory
        for old, new in zip(inputs, draw(seed), strict=True):
            old.copy_(new)
        for result, expected in zip(replay(), step(*inputs), strict=True):
            # On a GPU torch's products of fp32 may differ by their choice of algorithm; ours do not.
            if device == "cuda" and config is None:
                assert torch.allclose(result, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
            else:
                assert torch.equal(result, expected)


def test_a_recorded_model_draws_new_random_bits_in_every_run(device: str) -> None:
    edge_index, num_nodes = edges(device)

    class Model(nn.Module):
        def __init__(self, config: QConfig | None) -> None:
            super().__init__()
            self.first = QGCNConv(K, M, cached=True, config=config)
            self.last = QGCNConv(M, 4, cached=True, config=config)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x, edge_index).relu(), edge_index)

    model, exact = Model(QConfig()).to(device), Model(None).to(device)
    exact.load_state_dict(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    y = torch.arange(num_nodes, device=device) % 4

    def step(x: Tensor, *parameters: Tensor, of: nn.Module = model) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in parameters]
        out = functional_call(of, dict(zip(names, leaves, strict=True)), (x,))
        loss = nn.functional.cross_entropy(out, y)
        return (out.detach(), *torch.autograd.grad(loss, leaves))

    inputs = (torch.randn(num_nodes, K, device=device), *(p.detach().clone() for p in model.parameters()))
    replay = record(step, inputs)
    first, second, expected = replay(), replay(), step(*inputs, of=exact)
    for a, b in zip(first, second, strict=True):
        assert not torch.equal(a, b) or a.numel() == 4  # the last bias's gradient may round to the same sums
    for out, *_ in (first, second):
        # Two layers, each of three operands rounded at 0.013 of their norms (a row's absmax is 3 to 4 deviations).
        assert (out - expected[0]).norm() <= 0.08 * expected[0].norm()


def test_a_step_that_reads_a_value_cannot_be_recorded() -> None:
    """On the CPU wherever tests run: on a GPU a broken capture would be every later test's."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (x * float(x.abs().max()),)

    with pytest.raises((AssertionError, GuardOnDataDependentSymNode)):
        record(step, (torch.randn(4),))
