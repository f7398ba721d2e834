"""Softmax over the edges of each target, H scores an edge: of given scores, and of an attention layer's two halves."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.utils import softmax

import qgnn
from qgnn import functional

from ..harness import Case, Provider, Work
from .inputs import TOLERANCE, Setting, gradients, graph, graph_name, package, randn

SLOPE = 0.2


class Operands:
    """A graph's edges in the data set's order; scores [E, H] of edges, or [N, H] of sources and of targets."""

    def __init__(self, like: str, H: int, from_nodes: bool, setting: Setting) -> None:
        data = graph(like, setting)
        kind = "attention_weights" if from_nodes else "edge_softmax"
        self.name = f"{graph_name(like, setting)}/H{H}/{kind}"
        self.from_nodes, self.num_nodes, self.edge_index = from_nodes, int(data.num_nodes), data.edge_index
        E = self.edge_index.shape[1]
        sizes = (self.num_nodes, self.num_nodes) if from_nodes else (E,)
        self.scores = [randn(rows, H, setting=setting, seed=seed) for seed, rows in enumerate(sizes, 1)]
        self.grad = randn(E, H, setting=setting, seed=3)

    def work(self, pass_: str, weights: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Work:
        if pass_ == "forward":
            scores = [t.to(dtype) for t in self.scores]
            return Work(lambda: weights(*scores))
        scores = [t.to(dtype, copy=True).requires_grad_() for t in self.scores]
        return Work(gradients(lambda: weights(*scores), scores, self.grad))

    def edge_scores(self, *scores: Tensor) -> Tensor:
        """What a layer's edge_update() makes: one score an edge and head."""
        if not self.from_nodes:
            return scores[0]
        (source, target), (score_source, score_target) = self.edge_index, scores
        return leaky_relu(score_source.index_select(0, source) + score_target.index_select(0, target), SLOPE)

    def pyg(self, *scores: Tensor) -> Tensor:
        return softmax(self.edge_scores(*scores), self.edge_index[1], num_nodes=self.num_nodes)

    def torch_scatter(self, pass_: str) -> Work:
        scatter_softmax = package("torch_scatter").composite.scatter_softmax
        return self.work(pass_, lambda *scores: scatter_softmax(self.edge_scores(*scores), self.edge_index[1], dim=0))

    def ours(self, pass_: str) -> Work:
        prepared = qgnn.Graph.from_edge_index(self.edge_index, self.num_nodes)
        if self.from_nodes:
            return self.work(pass_, partial(functional.attention_weights, prepared, negative_slope=SLOPE))
        return self.work(pass_, partial(functional.edge_softmax, prepared))

    def exact(self, pass_: str) -> Sequence[Tensor]:
        result = self.work(pass_, self.pyg, torch.float64).run()
        return [result] if isinstance(result, Tensor) else result  # type: ignore[return-value]

    def num_bytes(self, pass_: str) -> int:
        structure = 4 * (self.num_nodes + 1 + self.edge_index.shape[1])
        operands = sum(t.nbytes for t in self.scores)
        backward = self.grad.nbytes + operands  # gradient and result read, the scores' gradients written
        return structure + self.grad.nbytes + (operands if pass_ == "forward" else backward)


def _providers(operands: Operands, pass_: str) -> Iterator[Provider]:
    tolerance = TOLERANCE["fp32"]
    yield Provider("qgnn fp32", partial(operands.ours, pass_), tolerance)
    yield Provider("pyg coo fp32", partial(operands.work, pass_, operands.pyg), tolerance)
    yield Provider("torch_scatter fp32", partial(operands.torch_scatter, pass_), tolerance)


def cases(setting: Setting) -> Iterator[Case]:
    for from_nodes in (True, False):
        operands = Operands("arxiv", 4, from_nodes, setting)
        for pass_ in ("forward", "backward"):
            providers = list(_providers(operands, pass_))
            exact = partial(operands.exact, pass_)
            yield Case(operands.name, pass_, exact, providers, operands.num_bytes(pass_))
