"""``qgnn::incidence_sum``: registration, kernels and trace; its values are tested where the API is."""

import pytest
import torch
from torch import Tensor

import qgnn
from dense import CASES, graph_of
from op_checks import opcheck
from qgnn import ops, rng
from qgnn.ops._backends import torch_backend, triton_backend
from qgnn.ops.spmm_incidence import _incidence_sum, incidence_sum_backward

SIDES = pytest.mark.parametrize("side", ["target", "source"])
BITS = pytest.mark.parametrize("bits", [0, 8])


def operands(name: str, side: str, F: int = 7) -> tuple[Tensor, ...]:
    graph = graph_of(name)
    return torch.randn(graph.num_edges, F), *graph.incidence(side)


@SIDES
@BITS
def test_incidence_sum_opcheck(side: str, bits: int) -> None:
    edge_x, *structure = operands("tall", side)
    seed = rng.make_seed(1) if bits else None
    opcheck(ops.incidence_sum, (edge_x.requires_grad_(), *structure, seed, bits, "row"), compiled=True)
    opcheck(incidence_sum_backward, (torch.randn(structure[0].numel() - 1, 7), structure[2]))


@pytest.mark.parametrize("name", CASES)
@SIDES
def test_incidence_sum_on_the_kernels(name: str, side: str, device: str) -> None:
    """Small integers: sums are exact in any order, hence equal."""
    edge_x, *structure = operands(name, side)
    edge_x = edge_x.mul(4).round()
    results = []
    for backend, place in ((torch_backend(), "cpu"), (triton_backend(), device)):
        moved = [t.to(place) for t in (edge_x, *structure)]
        results.append(_incidence_sum(backend, *moved, None, 0, "row").cpu())
    assert torch.equal(*results)


def test_incidence_sum_shows_in_a_trace() -> None:
    edge_x, *structure = operands("random", "target")
    with qgnn.trace() as t:
        ops.incidence_sum(edge_x.requires_grad_(), *structure, rng.make_seed(1), 8, "row").sum().backward()
    assert t.ops["incidence_sum.forward"]["format"] == "int8"
    assert t.ops["incidence_sum.backward"]["format"] == "float32"
    assert t.ops["quantize.forward"]["calls"] == 1


def test_incidence_sum_second_order_gradient_is_refused() -> None:
    edge_x, *structure = operands("random", "target")
    out = ops.incidence_sum(edge_x.requires_grad_(), *structure, None, 0, "row")
    upstream = torch.ones_like(out, requires_grad=True)
    (grad,) = torch.autograd.grad(out, edge_x, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        grad.sum().backward()
