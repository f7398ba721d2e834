"""Graph attention without its dense products: scores, softmax and sum, forward and backward.

Every provider gets the rows that the layers' dense products would have made, and returns the same output and gradients;
the layers of PyG have the identity in place of these products. What ``step`` times are both passes, without an
optimizer; ours round rows and gradient within it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import softmax

import qgnn
from qgnn import functional

from ..harness import Case, Provider, Work
from .inputs import OURS, Setting, csr_int32, graph, graph_name, package, randn, require_bf16, sparse_sum
from .pieces import Given, pieces

# As in inputs.py, each rounding costs 0.013, and what is left of terms that cancel has several. Of GATv2's leaky ReLU a
# normal value with an error of 0.02 has the wrong slope with a probability of 0.02 / pi, and the gradient that passes
# one slope only is then wrong by a whole element of two: sqrt(2 * 0.02 / pi) = 0.11 of its norm. In bf16: 0.06.
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-1, "int8": 1.5e-1}

SLOPE = 0.2


class Problem:
    """Rows by head of the nodes of a graph, and what attends to them: a layer of the kind gat, gatv2 or transformer."""

    def __init__(self, kind: str, like: str, heads: int, width: int, setting: Setting) -> None:
        data = graph(like, setting)
        self.name = f"{graph_name(like, setting)}/{kind}/{heads}x{width}"
        self.kind, self.heads, self.width, self.setting = kind, heads, width, setting
        self.num_nodes, self.edge_index = int(data.num_nodes), data.edge_index
        self.rows = {"gat": ("x",), "gatv2": ("x_source", "x_target"), "transformer": ("query", "key", "value")}[kind]
        made = partial(randn, setting=setting)
        self.operands = {name: made(self.num_nodes, heads * width, seed=seed) for seed, name in enumerate(self.rows)}
        vectors = {"gat": ("att_source", "att_target"), "gatv2": ("att",), "transformer": ()}[kind]
        for seed, name in enumerate(vectors, 5):
            self.operands[name] = made(heads, width, seed=seed) / width**0.5  # scores of deviation 1
        self.grad = made(self.num_nodes, heads * width, seed=9)

    def work(
        self, make: Callable[[dict[str, Tensor]], Callable[[], Tensor]], dtype: torch.dtype = torch.float32
    ) -> Work:
        leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in self.operands.items()}
        forward = make(leaves)
        grad = self.grad.to(dtype)

        def step() -> list[Tensor]:
            out = forward()
            return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))]

        return Work(step, step, forward)

    def by_head(self, rows: Tensor) -> Tensor:
        return rows.view(self.num_nodes, self.heads, self.width)

    def ours(self, config: qgnn.QConfig | None, dtype: torch.dtype = torch.float32) -> Work:
        prepared = qgnn.Graph.from_edge_index(self.edge_index, self.num_nodes)

        def make(t: dict[str, Tensor]) -> Callable[[], Tensor]:
            def run() -> Tensor:
                rows: dict[str, Any] = {name: self.by_head(x) if name in self.rows else x for name, x in t.items()}
                if self.kind == "gat":
                    source, target = ((rows["x"] * rows[att]).sum(2) for att in ("att_source", "att_target"))
                    return functional.attention(prepared, rows["x"], source, target, config=config).flatten(1)
                function: Any = functional.attention_gatv2 if self.kind == "gatv2" else functional.attention_dot
                return function(prepared, **rows, config=config).flatten(1)

            return run

        return self.work(make, dtype)

    def pyg(self, edges: Tensor | None = None, compiled: bool = False, dtype: torch.dtype = torch.float32) -> Work:
        """PyG's layer, on the edges as the data set has them if no others are given."""
        edge_index = self.edge_index if edges is None else edges
        if dtype == torch.bfloat16:
            require_bf16(self.setting)
        size = (self.heads * self.width, self.width)

        def make(t: dict[str, Tensor]) -> Callable[[], Tensor]:
            x = next(iter(t.values()))
            conv: torch.nn.Module
            if self.kind == "gat":
                conv = GATConv(*size, heads=self.heads, add_self_loops=False, bias=False)
                conv.lin = torch.nn.Identity()
                vectors = {"att_src": t["att_source"], "att_dst": t["att_target"]}
            elif self.kind == "gatv2":
                conv = GATv2Conv(*size, heads=self.heads, add_self_loops=False, bias=False)
                conv.lin_l, conv.lin_r = Given(t["x_source"]), Given(t["x_target"])
                vectors = {"att": t["att"]}
            else:
                conv = TransformerConv(*size, heads=self.heads, root_weight=False, bias=False)
                conv.lin_query, conv.lin_key, conv.lin_value = (Given(t[name]) for name in ("query", "key", "value"))
                vectors = {}
            for name, vector in vectors.items():
                delattr(conv, name)
                setattr(conv, name, vector[None])
            run = torch.compile(conv) if compiled else conv
            return lambda: run(x, edge_index)

        return self.work(make, dtype)

    def sparse(self) -> Work:
        """The fastest that torch's own sparse products allow: scores edge by edge, then a product a head."""
        source, target = self.edge_index
        order = torch.argsort(target * self.num_nodes + source)
        source, target = source[order], target[order]
        back = torch.argsort(source, stable=True)
        value = torch.ones(len(source), device=source.device)
        shape = (self.num_nodes, self.num_nodes)
        pattern = csr_int32(torch.sparse_coo_tensor(torch.stack([target, source]), value, shape))
        pattern_t = csr_int32(torch.sparse_coo_tensor(torch.stack([source[back], target[back]]), value, shape))

        def attend(score: Tensor, value: Tensor) -> Tensor:
            weight = softmax(score, target, num_nodes=self.num_nodes)
            rows = self.by_head(value).unbind(1)
            heads = [
                _WeightedSum.apply(pattern, pattern_t, back, weight[:, h], x.contiguous()) for h, x in enumerate(rows)
            ]
            return torch.stack(heads, dim=1).flatten(1)

        def make(t: dict[str, Tensor]) -> Callable[[], Tensor]:
            def gat() -> Tensor:
                rows = self.by_head(t["x"])
                scores = [(rows * t[att]).sum(2) for att in ("att_source", "att_target")]
                score = scores[0].index_select(0, source) + scores[1].index_select(0, target)
                return attend(leaky_relu(score, SLOPE), t["x"])

            def transformer() -> Tensor:
                query, key = self.by_head(t["query"]).unbind(1), self.by_head(t["key"]).unbind(1)
                scores = [
                    _SampledProduct.apply(pattern, pattern_t, back, q.contiguous(), k.contiguous())
                    for q, k in zip(query, key, strict=True)
                ]
                return attend(torch.stack(scores, dim=1) / self.width**0.5, t["value"])

            return gat if self.kind == "gat" else transformer

        return self.work(make)

    def dgl(self) -> Work:
        dgl = package("dgl")
        prepared = dgl.graph(tuple(self.edge_index), num_nodes=self.num_nodes)

        def make(t: dict[str, Tensor]) -> Callable[[], Tensor]:
            def run() -> Tensor:
                if self.kind == "gat":
                    value = self.by_head(t["x"])
                    scores = [(value * t[att]).sum(2, keepdim=True) for att in ("att_source", "att_target")]
                    score = leaky_relu(dgl.ops.u_add_v(prepared, *scores), SLOPE)
                else:
                    query, key, value = (self.by_head(t[name]) for name in ("query", "key", "value"))
                    score = dgl.ops.u_dot_v(prepared, key, query) / self.width**0.5
                return dgl.ops.u_mul_e_sum(prepared, value, dgl.ops.edge_softmax(prepared, score)).flatten(1)

            return run

        return self.work(make)

    def pyg_sorted(self) -> Work:
        """On edges in the order of their targets, whose rows PyG then adds up where they lie."""
        return self.pyg(self.edge_index[:, torch.argsort(self.edge_index[1], stable=True)])

    def exact(self) -> Sequence[Tensor]:
        """PyG's layer in float64, piece by piece: each has the output of its targets, 0 for the others, and its part of
        every gradient."""
        total: list[Tensor] = []
        for _, edges in pieces(self.edge_index, self.num_nodes, self.heads * self.width):
            made = self.pyg(edges, dtype=torch.float64).run()
            results: list[Tensor] = made  # type: ignore[assignment]
            total = [a + b for a, b in zip(total, results, strict=True)] if total else results
        return total

    def num_bytes(self) -> int:
        """Operands, result and gradient read or written once in each pass."""
        tensors = [*self.operands.values(), self.grad]
        return 2 * (4 * (self.num_nodes + 1 + self.edge_index.shape[1]) + sum(t.nbytes for t in tensors))

    def providers(self) -> Iterator[Provider]:
        for precision, config in OURS.items():
            yield Provider(f"qgnn {precision}", partial(self.ours, config), TOLERANCE[precision])
        if self.setting.is_cuda:
            bf16_in = partial(self.ours, OURS["int8"], torch.bfloat16)
            yield Provider("qgnn bf16-in int8", bf16_in, TOLERANCE["int8"])
        yield Provider("pyg coo fp32", self.pyg, TOLERANCE["fp32"])
        yield Provider("pyg coo sorted fp32", self.pyg_sorted, TOLERANCE["fp32"])
        yield Provider("pyg coo bf16", partial(self.pyg, dtype=torch.bfloat16), TOLERANCE["bf16"])
        if self.setting.is_cuda:  # compilation takes minutes on a CPU, to no gain in sums over edges
            yield Provider("pyg coo torch.compile fp32", partial(self.pyg, compiled=True), TOLERANCE["fp32"])
        if self.kind != "gatv2":  # whose scores are no products
            yield Provider("torch.sparse csr fp32", self.sparse, TOLERANCE["fp32"])
            yield Provider("dgl fp32", self.dgl, TOLERANCE["fp32"])


def _with_values(pattern: Tensor, values: Tensor) -> Tensor:
    indices = pattern.crow_indices(), pattern.col_indices()
    return torch.sparse_csr_tensor(*indices, values.contiguous(), size=pattern.shape, check_invariants=False)


def _sampled(pattern: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.sparse.sampled_addmm(pattern, a, b.t(), beta=0.0).values()


class _WeightedSum(torch.autograd.Function):
    """A x with the values of A, both of which have gradients; ``back`` brings values into the transposed order."""

    @staticmethod
    def forward(ctx: Any, pattern: Tensor, pattern_t: Tensor, back: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.patterns = pattern, pattern_t, back
        return sparse_sum(_with_values(pattern, weight), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (weight, x), (pattern, pattern_t, back) = ctx.saved_tensors, ctx.patterns
        grad = grad.contiguous()
        d_x = sparse_sum(_with_values(pattern_t, weight.index_select(0, back)), grad)
        return None, None, None, _sampled(pattern, grad, x), d_x


class _SampledProduct(torch.autograd.Function):
    """Dot products of the rows at the ends of each edge."""

    @staticmethod
    def forward(ctx: Any, pattern: Tensor, pattern_t: Tensor, back: Tensor, target: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(target, source)
        ctx.patterns = pattern, pattern_t, back
        return _sampled(pattern, target, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (target, source), (pattern, pattern_t, back) = ctx.saved_tensors, ctx.patterns
        d_target = sparse_sum(_with_values(pattern, grad), source)
        d_source = sparse_sum(_with_values(pattern_t, grad.index_select(0, back)), target)
        return None, None, None, d_target, d_source


SHAPES = (("gat", 4, 64), ("gatv2", 4, 64), ("transformer", 4, 64), ("gat", 8, 8), ("gat", 1, 256))


def cases(setting: Setting) -> Iterator[Case]:
    # A message an edge takes many seconds on a CPU: three shapes stand for the others there.
    for kind, heads, width in SHAPES if setting.is_cuda else SHAPES[:3]:
        made = Problem(kind, "arxiv", heads, width, setting)
        yield Case(made.name, "step", made.exact, list(made.providers()), made.num_bytes())
