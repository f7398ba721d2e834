"""Dense float64 algebra that sparse and quantized results are compared with, and bounds of fp32 sums."""

from collections.abc import Iterator

import torch
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from qgnn import Graph, rng
from statistics_checks import EPS

WIDTHS = (1, 7, 32, 33, 130)


def graph_cases() -> Iterator[tuple[str, Tensor, int, int]]:
    """``(name, edge_index, num_sources, num_targets)`` of every graph that hurts."""
    for name, (edge_index, num_nodes) in GRAPHS.items():
        yield name, edge_index, num_nodes, num_nodes
    for name, (edge_index, num_sources, num_targets) in RECTANGULAR.items():
        yield name, edge_index, num_sources, num_targets


CASES = {name: (edge_index, sources, targets) for name, edge_index, sources, targets in graph_cases()}


def graph_of(name: str) -> Graph:
    edge_index, num_sources, num_targets = CASES[name]
    return Graph.from_edge_index(edge_index, (num_sources, num_targets))


def adjacency(edge_index: Tensor, num_sources: int, num_targets: int, weight: Tensor | None = None) -> Tensor:
    """float64 ``[num_targets, num_sources]``; copies of an edge add up."""
    value = torch.ones(edge_index.shape[1]) if weight is None else weight
    matrix = torch.zeros(num_targets, num_sources, dtype=torch.float64)
    return matrix.index_put((edge_index[1].long(), edge_index[0].long()), value.double(), accumulate=True)


def adjacency_of(graph: Graph, csr_weight: Tensor | None = None) -> Tensor:
    return adjacency(graph.edge_index(), graph.num_sources, graph.num_targets, csr_weight)


def degree_of(graph: Graph) -> Tensor:
    """In-degrees, float64 column."""
    return graph.csr.indptr.diff().double()[:, None]


def random_codes(num_rows: int, num_columns: int) -> Tensor:
    return torch.randint(-127, 128, (num_rows, num_columns), dtype=torch.int8)


def random_scale(num_rows: int) -> Tensor:
    """Scales over six orders of magnitude."""
    return torch.rand(num_rows).mul(6).sub(3).exp()


def seed_of(seed: int | None) -> Tensor | None:
    return None if seed is None else rng.make_seed(seed)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Each element of ``actual`` lies within ``bound`` of the float64 ``expected``; half types may round once more."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    if dtype in (torch.float16, torch.bfloat16):
        bound = bound + torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).smallest_normal
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"error {error.max()} where {bound.flatten()[(error - bound).argmax()]} is allowed"


def sum_bound(terms: Tensor, magnitude: Tensor, roundings: int, eps: float = EPS) -> Tensor:
    """Largest error of a sum of ``terms`` addends of which each has seen ``roundings`` roundings, whatever the order.

    ``(n + r) eps sum|a|``, with 1 % for higher orders: the standard bound of floating-point summation.
    """
    return 1.01 * (terms + roundings) * eps * magnitude
