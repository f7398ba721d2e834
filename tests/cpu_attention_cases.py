"""Operands of attention of all kinds, results in float64, and bounds of the errors of fp32 results."""

import math
from typing import Any, NamedTuple

import torch
from qgnn.kernels.cpu import attention as kernels
from torch import Tensor
from torch.nn.functional import leaky_relu

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import UNIT, assert_within, csr
from qgnn import reference
from qgnn.activation import Activation, dropout_threshold
from qgnn.reference._attention import dropped

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
KINDS = ("attention", "attention_gatv2", "attention_dot")
SLOPE = 0.2
DROPOUT = Activation(False, dropout_threshold(0.3), torch.tensor([0x1234567890]), 4, None)
GRAD = {"grad_bits": 8, "seed": torch.tensor([-77]), "stream": 2}


class Graph(NamedTuple):
    indptr: Tensor
    index: Tensor
    indptr_t: Tensor
    index_t: Tensor
    order_t: Tensor
    sources: int

    @property
    def targets(self) -> int:
        return self.indptr.numel() - 1


def graph_of(edge_index: Tensor, sources: int, targets: int, dtype: torch.dtype = torch.int32) -> Graph:
    indptr, index = csr(edge_index, targets, "cpu", dtype)
    row = torch.repeat_interleave(indptr.diff().long())
    indptr_t, index_t = csr(torch.stack([row, index.long()]), sources, "cpu", dtype)
    return Graph(indptr, index, indptr_t, index_t, torch.argsort(index.long(), stable=True).to(dtype), sources)


def named_graph(name: str, dtype: torch.dtype = torch.int32) -> Graph:
    return graph_of(*ALL_GRAPHS[name], dtype)


class Operands(NamedTuple):
    """What both passes take, and the same in float64, without scales."""

    args: tuple[Tensor, ...]
    options: dict[str, Any]
    exact_args: tuple[Tensor, ...]
    exact_options: dict[str, Any]
    heads: int

    def but(self, **options: Any) -> "Operands":
        return self._replace(options=self.options | options, exact_options=self.exact_options | options)


ROWS = {
    "attention": {"x": "x_scale"},
    "attention_gatv2": {"x_target": "target_scale", "x_source": "source_scale"},
    "attention_dot": {"query": "query_scale", "key": "key_scale", "value": "value_scale"},
}


def operands(
    kind: str, g: Graph, H: int, D: int, *, codes: bool = False, edges: bool = False, dropout: bool = False
) -> Operands:
    args: list[Tensor] = []
    exact_args: list[Tensor] = []
    options: dict[str, Any] = {}
    exact_options: dict[str, Any] = {}
    if kind == "attention":
        args = [torch.randn(g.targets, H), torch.randn(g.sources, H)]
        exact_args = [t.double() for t in args]
    for name, scale_name in ROWS[kind].items():
        num_rows = g.targets if name in ("x_target", "query") else g.sources
        if codes:
            x, scale = torch.randint(-127, 128, (num_rows, H * D), dtype=torch.int8), torch.rand(num_rows, H) / 64
            args.append(x)
            options[scale_name] = scale
            exact_args.append((x.double().view(num_rows, H, D) * scale.double()[:, :, None]).view(num_rows, H * D))
        else:
            args.append(torch.randn(num_rows, H * D))
            exact_args.append(args[-1].double())
    if kind == "attention_gatv2":
        args.append(torch.randn(H, D) / math.sqrt(D))
        exact_args.append(args[-1].double())
    if edges:
        name, width = ("edge_score", H) if kind == "attention" else ("edge_x", H * D)
        options[name] = torch.randn(g.index.numel(), width)
        exact_options[name] = options[name].double()
    made = Operands(tuple(args), options, tuple(exact_args), exact_options, H)
    if kind != "attention_dot":
        made = made.but(negative_slope=SLOPE)
    return made.but(dropout=DROPOUT) if dropout else made


def forward(kind: str, g: Graph, o: Operands, library: Any = kernels) -> tuple[Tensor, Tensor]:
    args, options = (o.args, o.options) if library is kernels else (o.exact_args, o.exact_options)
    heads = {"heads": o.heads} if kind == "attention_dot" else {}
    return getattr(library, kind)(*g[:2], *args, **options, **heads)


def backward(
    kind: str, g: Graph, o: Operands, lse: Tensor, grad: Tensor, library: Any = kernels, **options: Any
) -> tuple[Tensor, ...]:
    args, own = (o.args, o.options) if library is kernels else (o.exact_args, o.exact_options)
    return getattr(library, f"{kind}_backward")(*g[:5], *args, lse, grad, **own, **options)


def _sums(index: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """Rows of values [E, ...], added by index and flattened."""
    return values.new_zeros(num_rows, math.prod(values.shape[1:])).index_add(0, index, values.flatten(1))


def bounds(kind: str, g: Graph, o: Operands, lse: Tensor, grad: Tensor) -> list[Tensor]:
    """Errors that fp32 may make, of results and gradients: a relative one of each term, times the sum of the absolute
    values of the terms.

    A score is a sum of D products of up to three factors, of absolute values ``size``, hence off by (D + 4) UNIT size;
    so is L, and by a rounding for each edge of its row; p is off by both and by that of the exponential. The rest are
    sums over the edges of a row, of products of p, up to six other factors and a sum over D columns, and D, itself a
    sum.
    """
    slope = o.options.get("negative_slope", SLOPE)
    H, row, index = o.heads, torch.repeat_interleave(g.indptr.diff().long()), g.index.long()
    E, N, S = index.numel(), g.targets, g.sources
    D = grad.shape[1] // H

    def by_head(x: Tensor) -> Tensor:
        return x.view(x.shape[0], H, D)

    edge = by_head(o.exact_options.get("edge_x", torch.zeros(E, H * D, dtype=torch.float64)))
    if kind == "attention":
        target, source, x = o.exact_args
        other = o.exact_options.get("edge_score", torch.zeros(E, H, dtype=torch.float64))
        score, size = target[row] + source[index] + other, target[row].abs() + source[index].abs() + other.abs()
        score, value = leaky_relu(score, slope), by_head(x)[index].abs()
    elif kind == "attention_gatv2":
        (target, source), att = (by_head(x) for x in o.exact_args[:2]), o.exact_args[2]
        hidden = target[row].abs() + source[index].abs() + edge.abs()
        score = (leaky_relu(target[row] + source[index] + edge, slope) * att).sum(2)
        size, value = (hidden * att.abs()).sum(2), source[index].abs()
    else:
        query, key, values = (by_head(x) for x in o.exact_args)
        score = (query[row] * (key[index] + edge)).sum(2) / math.sqrt(D)
        keys, queries, value = key[index].abs() + edge.abs(), query[row].abs(), values[index].abs() + edge.abs()
        size = (queries * keys).sum(2) / math.sqrt(D)
    degree = int(g.indptr.diff().max()) + int(g.indptr_t.diff().max()) if E else 0
    largest = float(size.max()) if E else 0.0
    error_of_p = (2 * (D + 4) * largest + degree + 3) * UNIT
    error = 1.01 * (2 * error_of_p + (2 * degree + D + 10) * UNIT)

    p = (score - lse[row]).exp()
    w = dropped(p, o.options.get("dropout"))
    grads = by_head(grad.abs())
    grads = (grads + grads.amax(2, keepdim=True) / 64)[row] if E else grads[row]  # rounding adds a step at most
    products = w * (grads * value).sum(2)
    ds = products + p * _sums(row, products, N)[row]
    w, ds_rows = w[:, :, None], ds[:, :, None]
    made = [_sums(row, w * value, N), 1 + lse.abs() + largest]
    if kind == "attention":
        made += [_sums(row, ds, N), _sums(index, ds, S), _sums(index, w * grads, S), ds]
    elif kind == "attention_gatv2":
        dh = ds_rows * att.abs()
        made += [_sums(row, dh, N), _sums(index, dh + w * grads, S), (ds_rows * hidden).sum(0), dh.flatten(1)]
    else:
        ds_rows = ds_rows / math.sqrt(D)
        made += [_sums(row, ds_rows * keys, N), _sums(index, ds_rows * queries, S), _sums(index, w * grads, S)]
        made += [(ds_rows * queries + w * grads).flatten(1)]
    return [error * values + 2.0**-126 for values in made]


def assert_attention(kind: str, g: Graph, o: Operands, **rounding: Any) -> list[tuple[Tensor, Tensor]]:
    """Both passes within their bounds; returns all results with those in float64."""
    grad = torch.randn(g.targets, o.args[1].shape[1] if kind != "attention" else o.args[2].shape[1])
    rounding = {"needs_dedge": True} | rounding
    out, lse = forward(kind, g, o)
    exact_out, exact_lse = forward(kind, g, o, reference)
    # Codes are those of the fp32 gradient: in float64, ``quantize`` rounds the same values.
    exact = backward(kind, g, o, exact_lse, grad.double(), reference, **rounding)
    pairs = list(
        zip((out, lse, *backward(kind, g, o, lse, grad, **rounding)), (exact_out, exact_lse, *exact), strict=True)
    )
    for (actual, expected), bound in zip(pairs, bounds(kind, g, o, exact_lse, grad.double()), strict=True):
        assert actual.dtype == torch.float32
        assert actual.shape == expected.shape
        assert_within(actual, expected, bound)
    return pairs
