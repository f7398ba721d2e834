"""Self-loops and symmetric normalization: PyG's results, and finite gradients where PyG's are not."""

import itertools

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm
from torch_geometric.utils import add_remaining_self_loops

from graphs import GRAPHS
from layer_cases import dense_adjacency
from qgnn import Graph
from qgnn.nn.gcn_norm import GCNStructure, gcn_norm

RULES = ("move", "drop", "add")


def add_self_loops(
    edge_index: Tensor, weight: Tensor, num_nodes: int, fill: float, rule: str, fixed_shape: bool = False
) -> tuple[Tensor, Tensor]:
    """Edges and weights with self-loops of weight ``fill`` (1 or 2), before normalization."""
    structure = GCNStructure(edge_index, num_nodes, fixed_shape=fixed_shape)
    structure.rule = rule  # the kind of edges decides otherwise
    graph = structure.weighted(weight, weight.dtype, improved=fill == 2.0, normalize=False)
    return graph.edge_index(), graph.weight


def normalize(edge_index: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """Normalized weights in the order of the given edges."""
    graph = Graph.from_edge_index(edge_index, num_nodes)
    normalized = gcn_norm(graph, graph.to_csr_order(weight))
    return normalized.index_select(0, graph.csr.order.long().argsort())


def canonical(edge_index: Tensor, weight: Tensor) -> list[tuple[int, int, float]]:
    return sorted(zip(*edge_index.tolist(), weight.tolist(), strict=True))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("fill", [1.0, 2.0])
def test_add_self_loops_equals_pyg(name: str, fill: float) -> None:
    edge_index, num_nodes = GRAPHS[name]
    loop = edge_index[0] == edge_index[1]
    weight = torch.rand(edge_index.shape[1])
    if loop.any():  # which of several equal self-loops wins is up to chance in PyG; give copies one weight
        weight[loop] = 0.25 + edge_index[0, loop] / 512
    expected = add_remaining_self_loops(edge_index, weight, fill, num_nodes)
    assert canonical(*add_self_loops(edge_index, weight, num_nodes, fill, "move")) == canonical(*expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fixed_shape", [False, True])
def test_add_self_loops_gives_the_matrix_it_promises(rule: str, fixed_shape: bool) -> None:
    for name in ("self_loops", "only_loops", "random", "empty", "no_nodes"):
        edge_index, num_nodes = GRAPHS[name]
        edge_index = torch.unique(edge_index, dim=1)
        weight = torch.rand(edge_index.shape[1], dtype=torch.float64)
        given = dense_adjacency(edge_index, num_nodes, num_nodes, weight)
        has_loop = dense_adjacency(edge_index, num_nodes, num_nodes).diagonal() > 0
        diagonal = {
            "move": torch.where(has_loop, given.diagonal(), 2.0),
            "drop": torch.full((num_nodes,), 2.0, dtype=torch.float64),
            "add": given.diagonal() + 2.0,
        }[rule]
        expected = given.clone()
        expected.diagonal().copy_(diagonal)
        edges, weights = add_self_loops(edge_index, weight, num_nodes, 2.0, rule, fixed_shape)
        torch.testing.assert_close(dense_adjacency(edges, num_nodes, num_nodes, weights), expected)
        if fixed_shape:
            assert edges.shape[1] == edge_index.shape[1] + num_nodes


def test_add_self_loops_leaves_its_inputs_alone() -> None:
    edge_index, num_nodes = GRAPHS["self_loops"]
    weight = torch.rand(edge_index.shape[1])
    before = edge_index.clone(), weight.clone()
    for rule, fixed_shape in itertools.product(RULES, (False, True)):
        add_self_loops(edge_index, weight, num_nodes, 1.0, rule, fixed_shape)
    assert torch.equal(edge_index, before[0])
    assert torch.equal(weight, before[1])


def test_add_self_loops_is_differentiable() -> None:
    edge_index, num_nodes = GRAPHS["self_loops"]
    edge_index = torch.unique(edge_index, dim=1)  # of equal self-loops only the last one counts
    weight = torch.rand(edge_index.shape[1], dtype=torch.float64, requires_grad=True)
    for rule, fixed_shape in itertools.product(RULES, (False, True)):
        torch.autograd.gradcheck(
            lambda w, rule=rule, fixed=fixed_shape: add_self_loops(edge_index, w, num_nodes, 2.0, rule, fixed)[1],
            weight,
        )


@pytest.mark.parametrize("name", GRAPHS)
def test_gcn_norm_equals_pyg(name: str) -> None:
    edge_index, num_nodes = GRAPHS[name]
    for weight in (torch.ones(edge_index.shape[1]), torch.rand(edge_index.shape[1]) + 0.1):
        _, expected = pyg_gcn_norm(edge_index, weight, num_nodes, add_self_loops=False)
        torch.testing.assert_close(normalize(edge_index, weight, num_nodes), expected)


def test_gcn_norm_is_differentiable() -> None:
    edge_index, num_nodes = GRAPHS["duplicates"]
    weight = (torch.rand(edge_index.shape[1], dtype=torch.float64) + 0.1).requires_grad_()
    torch.autograd.gradcheck(lambda w: normalize(edge_index, w, num_nodes), weight)


def test_gcn_norm_does_not_depend_on_the_scale_of_weights() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    weight = torch.rand(edge_index.shape[1]) + 0.1
    torch.testing.assert_close(normalize(edge_index, 64 * weight, num_nodes), normalize(edge_index, weight, num_nodes))


def test_gcn_norm_of_degree_zero_is_zero_with_a_finite_gradient() -> None:
    edge_index = torch.tensor([[0, 1, 2, 1], [1, 2, 0, 0]])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True)  # node 2 has degree 0
    value = normalize(edge_index, weight, 3)
    assert value[1] == value[2] == 0
    value.sum().backward()
    assert weight.grad.isfinite().all()


def test_gcn_norm_of_a_negative_degree_is_nan_for_its_own_edges_only() -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 3, 2, 2]])
    weight = torch.tensor([-2.0, 1.0, 1.0, 1.0, 1.0])  # degree of node 1 is -2
    assert normalize(edge_index, weight, 4).isnan().tolist() == [True, True, False, False, False]
