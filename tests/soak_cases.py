"""Random cases of layers, functions, models, formats and operators for ``tests/soak.py``.

A case is a function of a :class:`Draw`, and so of a seed; it raises where something is not as it should be.
"""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex

import qgnn
from layer_cases import Ball, assert_equal_pass, conv_bounds, dense_adjacency, linear_bounds, passes
from layers import LAYERS, Layer, learned
from model_cases import MODELS, K, N
from op_arguments import OPERATORS, arguments_of
from qgnn import Graph, QConfig, QTensor, formats, functional
from qgnn.config import COMPONENTS
from qgnn.formats.names import NAMES
from qgnn.nn import Epilogue
from soak_oracle import assert_same, watched

_T = TypeVar("_T")

WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 130)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")
HOUSE_ERROR = re.compile(r"'.+' (expects .+|.+ \(got .+\).*)")


class Draw(random.Random):
    """Choices of one case; torch's generator begins with the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)

    def any_of(self, choices: Sequence[_T]) -> _T:
        return choices[self.randrange(len(choices))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def size(self, most: int) -> int:
        """From 0 on, small ones as often as large ones."""
        return min(most, int(2 ** (self.random() * (most + 1).bit_length())) - 1)


def draw_edges(draw: Draw, num_sources: int, num_targets: int) -> Tensor:
    """Edges of one of the kinds that break kernels, or of several, in any order."""
    parts = [torch.empty(2, 0, dtype=torch.int64)]
    if num_sources and num_targets:
        for _ in range(draw.randrange(4)):
            E = draw.size(600)
            source, target = torch.randint(num_sources, (E,)), torch.randint(num_targets, (E,))
            kind = draw.any_of(("uniform", "power_law", "hub", "broadcast", "copies", "loops"))
            if kind == "power_law":
                source, target = (torch.rand(2, E).pow(3) * torch.tensor([[num_sources], [num_targets]])).long()
            elif kind == "hub":
                target = target[:1].expand(E)
            elif kind == "broadcast":
                source = source[:1].expand(E)
            elif kind == "copies":
                source, target = source[:1].expand(E), target[:1].expand(E)
            elif kind == "loops":
                source = target = torch.arange(min(num_sources, num_targets))
            parts.append(torch.stack([source, target]))
    edges = torch.cat(parts, dim=1)
    if draw.chance(0.7):
        edges = edges[:, torch.randperm(edges.shape[1])]
    return edges


def draw_graph(draw: Draw, *, square: bool = True) -> tuple[Tensor, int, int]:
    """``(edge_index, num_sources, num_targets)``."""
    num_sources = draw.size(300)
    num_targets = num_sources if square else draw.size(300)
    return draw_edges(draw, num_sources, num_targets), num_sources, num_targets


def draw_form(draw: Draw, edges: Tensor, num_sources: int, num_targets: int) -> Any:
    """The same edges in another form, in the same order."""
    form = draw.any_of(("coo", "coo", "strided", "EdgeIndex", "Graph"))
    if form == "strided":
        return torch.stack([edges, edges + 1], dim=2)[:, :, 0]
    if form == "EdgeIndex":
        return EdgeIndex(edges, sparse_size=(num_sources, num_targets))
    return Graph.from_edge_index(edges, (num_sources, num_targets)) if form == "Graph" else edges


def draw_config(draw: Draw) -> QConfig | None:
    """Full precision, integers of every width, other formats, or formats by component."""
    options: dict[str, Any] = {
        "granularity": draw.any_of(("row", "row", "tensor")),
        "rounding": draw.any_of(("stochastic", "nearest")),
        "save": draw.any_of(("int8", "int8", "fp32")),
    }
    kind = draw.any_of(("none", "int", "int", "int", "packed", "format", "components"))
    if kind == "none":
        return None
    if kind == "int":
        return QConfig(bits=draw.randint(2, 8), **options)
    if kind == "packed":
        return QConfig(**options | {"save": draw_blocks(draw)})
    if kind == "format":
        return QConfig(fmt=draw.any_of(NAMES), **options)
    chosen = draw.sample(COMPONENTS, draw.randint(1, len(COMPONENTS)))
    return QConfig(components={name: draw.any_of((None, *NAMES)) for name in chosen}, **options)


def by_row(config: QConfig | None) -> QConfig | None:
    """The same for attention, whose heads have a scale each."""
    return config and replace(config, granularity="row")


def draw_blocks(draw: Draw) -> formats.Blocks:
    bits = draw.any_of((1, 2, 4, 8))
    sizes = (None, 8, 24, 128, 1000, 4096)
    return formats.Blocks(
        bits=bits,
        block_size=draw.any_of(sizes),
        projection=draw.any_of((None, None, 2, 3, 8)),
        bins=draw.any_of(("uniform", "optimal")) if bits in (2, 4) else "uniform",
        metadata_dtype=draw.any_of((torch.float32, torch.bfloat16, torch.float16)),
    )


def draw_values(draw: Draw, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian rows of different sizes, some of them 0, dense or sparse; of half types of one size."""
    x = torch.randn(shape)
    if dtype in (torch.float32, torch.float64) and x.dim() > 1 and draw.chance(0.5):
        x = x * 10.0 ** torch.randint(-3, 3, (shape[0], *[1] * (len(shape) - 1)))
    if draw.chance(0.3):
        x = x * (torch.rand(shape) < 0.1)
    return x.to(dtype)


def assert_finite(results: dict[str, Tensor]) -> None:
    for name, value in results.items():
        assert value.isfinite().all(), f"{name} is not finite"


def repeated(run: Callable[[], dict[str, Tensor]], seed: int) -> dict[str, Tensor]:
    """The results of a run whose kernels are watched; once more, unwatched, they are the same in every bit."""
    torch.manual_seed(seed)
    with watched():
        results = run()
    torch.manual_seed(seed)
    assert_equal_pass(run(), results)
    return results


# --- layers


def layer(draw: Draw) -> None:
    """A layer on a graph: watched kernels, finite results of the right types, the same bits again, an eval mode without
    chance, inputs as they were; in float64 PyG's results."""
    name, config, dtype = draw.any_of(tuple(LAYERS)), draw_config(draw), draw.any_of(DTYPES)
    spec, (columns, rows) = LAYERS[name], (draw.any_of(WIDTHS), draw.any_of(WIDTHS[3:]))
    config = by_row(config) if spec.name in ATTENTION else config
    edges, num_nodes, _ = draw_graph(draw)
    if spec.fails_on and not num_nodes:
        num_nodes = 1
    ours = spec.ours(config, columns, rows).to(dtype)
    if draw.chance(0.5):
        ours.configure(config, Epilogue(draw.any_of((None, "relu", "leaky_relu", "elu")), draw.any_of((0, 0.3, 1))))
    x, args = draw_values(draw, num_nodes, columns, dtype=dtype), _converted(spec, edges, num_nodes, dtype)
    form = draw_form(draw, edges, num_nodes, num_nodes)
    tensors = [x, edges, *(t for t in args if isinstance(t, Tensor)), *ours.parameters()]
    before = [(t.detach().clone(), t._version) for t in tensors]

    results = repeated(lambda: passes(ours, x, form, *args, extra=learned(args)), draw.randrange(2**31))
    assert {t.dtype for t in results.values()} <= {dtype, *(t.dtype for t in learned(args))}
    assert_finite(results)
    for t, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(t.detach(), value)
        assert t._version == version, "an input was written to"
    ours.eval()
    assert torch.equal(*(ours(x, form, *args) for _ in range(2)))
    if dtype == torch.float64:
        _equals_pyg(spec, ours, (x, edges, args), columns, rows)


def _converted(spec: Layer, edges: Tensor, num_nodes: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments behind the edges: of a half type they stay fp32, as data sets have them."""
    args = spec.args(edges, num_nodes)
    if dtype != torch.float64:
        return args
    return tuple(
        t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in args
    )


def _equals_pyg(
    spec: Layer, ours: nn.Module, inputs: tuple[Tensor, Tensor, tuple[Any, ...]], columns: int, rows: int
) -> None:
    """Without quantization, to float64's rounding of sums of some thousand terms."""
    x, edges, args = inputs
    theirs = spec.theirs(columns, rows).double()
    theirs.load_state_dict(ours.state_dict())
    ours.configure(None)
    expected, actual = (passes(m.eval(), x, edges, *args, extra=learned(args)) for m in (theirs, ours))
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    has_ties = spec.options.get("aggr") in ("max", "min")  # of equal terms PyG takes another one, or all
    for key, value in expected.items():
        assert actual[key].shape == value.shape
        if has_ties and key != "out":
            continue
        assert ((actual[key] - value).abs() <= 1e-10 * largest).all(), f"{key} is not PyG's"


# --- functions


def _passes(function: Callable[..., Tensor], **inputs: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Result and gradients of a function of named tensors."""

    def run() -> dict[str, Tensor]:
        leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
        out = function(**leaves)
        upstream = upstream_of(out)
        grads = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
        return {"out": out.detach(), **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}

    return run


def upstream_of(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


def function(draw: Draw) -> None:
    """A function with any of its options, on operands of any size."""
    run, config, bounds = draw.any_of(FUNCTIONS)(draw, draw_config(draw))
    results = repeated(run, draw.randrange(2**31))
    assert_finite(results)
    if bounds is None or (config is not None and not config.is_integer):
        return
    for name, bound in bounds().items():
        if name in results and results[name].dtype == torch.float32:
            assert bound.contains(results[name]), f"{name} is not within the bounds of quantized operands"


_Run = tuple[Callable[[], dict[str, Tensor]], QConfig | None, Callable[[], dict[str, Ball]] | None]


def _seed(draw: Draw) -> int:
    return draw.randrange(2**64)


def _epilogue(draw: Draw) -> dict[str, Any]:
    if draw.chance(0.6):
        return {}
    return {"activation": draw.any_of((None, "relu")), "dropout": draw.any_of((0, 0.25, 0.9999, 1))}


def _linear(draw: Draw, config: QConfig | None) -> _Run:
    n, k, m = draw.size(200), draw.any_of(WIDTHS), draw.any_of(WIDTHS)
    dtype = draw.any_of(DTYPES)
    x, weight = draw_values(draw, n, k, dtype=dtype), draw_values(draw, m, k, dtype=dtype)
    epilogue, seed = _epilogue(draw), _seed(draw)
    bias = {"bias": torch.randn(m).to(dtype)} if draw.chance(0.5) else {}
    run = _passes(
        lambda x, weight, bias=None: functional.linear(x, weight, bias, config=config, seed=seed, **epilogue),
        **{"x": x, "weight": weight, **bias},
    )
    if config is None or epilogue or bias or not n:
        return run, config, None
    return run, config, lambda: _of_rows(config, linear_bounds(x, weight, upstream_of(x @ weight.t()), config))


def _of_rows(config: QConfig, bounds: dict[str, Ball]) -> dict[str, Ball]:
    """Bounds by the names here; of packed rows the gradient of a weight has none."""
    named = {name.replace("lin.", ""): bound for name, bound in bounds.items()}
    return named if isinstance(config.save, str) else {name: named[name] for name in ("out", "dx")}


def _aggregation(draw: Draw, config: QConfig | None, *, product: bool) -> _Run:
    edges, S, T = draw_graph(draw, square=draw.chance(0.5))
    k, m = draw.any_of(WIDTHS), draw.any_of(WIDTHS)
    x, weight = draw_values(draw, S, k), draw_values(draw, m, k)
    heads = draw.any_of([h for h in (1, 2, 3, 8) if (m if product else k) % h == 0])
    edge_weight = torch.rand(edges.shape[1], *([heads] if heads > 1 else [])) if draw.chance(0.5) else None
    reduce = draw.any_of(("sum", "mean") if product else ("sum", "mean", "max", "min"))
    epilogue = _epilogue(draw) if reduce in ("sum", "mean") else {}
    seed, graph = _seed(draw), Graph.from_edge_index(edges, (S, T))
    options = {"reduce": reduce, "config": config, "seed": seed, **epilogue}
    if heads > 1 and reduce in ("max", "min"):
        edge_weight = None
    learn = {"edge_weight": edge_weight} if edge_weight is not None and draw.chance(0.5) else {}
    constant = {} if learn else {"edge_weight": edge_weight}
    if product:
        run = _passes(
            lambda **t: functional.graph_linear(graph, **t, **constant, **options), x=x, weight=weight, **learn
        )
    else:
        run = _passes(lambda **t: functional.spmm(graph, **t, **constant, **options), x=x, **learn)
    if config is None or epilogue or heads > 1 or reduce in ("max", "min") or not (S and T):
        return run, config, None
    matrix = dense_adjacency(edges, S, T, edge_weight)
    if reduce == "mean":
        matrix = matrix / torch.bincount(edges[1], minlength=T).clamp_min(1)[:, None]

    def bounds() -> dict[str, Ball]:
        if product:
            return _of_rows(config, conv_bounds(matrix, x, weight, upstream_of(torch.empty(T, m)), config))
        aggregate, upstream = Ball.exact(matrix), Ball.exact(upstream_of(torch.empty(T, k)))
        return {
            "out": aggregate @ Ball.exact(x).quantized(config),
            "dx": aggregate.mT @ upstream.quantized(config),
        }

    return run, config, bounds


def _spmm(draw: Draw, config: QConfig | None) -> _Run:
    return _aggregation(draw, config, product=False)


def _graph_linear(draw: Draw, config: QConfig | None) -> _Run:
    return _aggregation(draw, config, product=True)


def _incidence_sum(draw: Draw, config: QConfig | None) -> _Run:
    edges, S, T = draw_graph(draw, square=False)
    x, side, seed = (
        draw_values(draw, edges.shape[1], draw.any_of(WIDTHS)),
        draw.any_of(("source", "target")),
        _seed(draw),
    )
    options = {"num_nodes": (S, T), "config": config, "seed": seed}
    return _passes(lambda x: functional.incidence_sum(edges, x, side, **options), x=x), config, None


def _edges_of_heads(draw: Draw) -> tuple[Graph, int, int]:
    edges, S, T = draw_graph(draw, square=False)
    heads = draw.any_of((1, 2, 3, 4, 8))
    return Graph.from_edge_index(edges, (S, T)), heads, draw.any_of(WIDTHS[:11])


def _sddmm(draw: Draw, config: QConfig | None) -> _Run:
    graph, H, D = _edges_of_heads(draw)
    dtype, seed = draw.any_of(DTYPES), _seed(draw)
    source, target = (draw_values(draw, n, H, D, dtype=dtype) for n in (graph.num_sources, graph.num_targets))
    op = draw.any_of(("dot", "dot", "add"))
    options = {"op": op, "config": config if op == "dot" else None, "seed": seed}
    return _passes(lambda s, t: functional.sddmm(graph, s, t, **options), s=source, t=target), config, None


def _edge_softmax(draw: Draw, config: QConfig | None) -> _Run:
    graph, H, _ = _edges_of_heads(draw)
    scores = draw_values(draw, graph.num_edges, H, dtype=draw.any_of(DTYPES))
    return _passes(lambda scores: functional.edge_softmax(graph, scores), scores=scores), config, None


def _attention_weights(draw: Draw, config: QConfig | None) -> _Run:
    graph, H, _ = _edges_of_heads(draw)
    source, target = (torch.randn(n, H) for n in (graph.num_sources, graph.num_targets))
    run = _passes(lambda s, t: functional.attention_weights(graph, s, t), s=source, t=target)
    return run, config, None


def _attention(draw: Draw, config: QConfig | None) -> _Run:
    """Attention of each kind; with features of edges or without, with dropout or without."""
    graph, H, D = _edges_of_heads(draw)
    kind, seed = draw.any_of(("attention", "attention_gatv2", "attention_dot")), _seed(draw)
    if config is not None:  # its weights are never written, and so not rounded
        config = replace(config, granularity="row", components={**config.components, "attention": None})
    dtype = draw.any_of(DTYPES)

    def rows(n: int, *shape: int) -> Tensor:
        return torch.randn(n, *(shape or (H, D))).to(dtype)

    S, T = graph.num_sources, graph.num_targets
    operands = {
        "attention": lambda: {"x": rows(S), "score_source": rows(S, H), "score_target": rows(T, H)},
        "attention_gatv2": lambda: {"x_source": rows(S), "x_target": rows(T), "att": rows(H, D)},
        "attention_dot": lambda: {"query": rows(T), "key": rows(S), "value": rows(S)},
    }[kind]()
    if draw.chance(0.4):
        operands["edge_attr"] = rows(graph.num_edges, 3)
        operands["edge_weight"] = rows(H if kind == "attention" else H * D, 3)
    options = {"dropout": draw.any_of((0, 0, 0.3, 1)), "config": config, "seed": seed}
    if kind != "attention_dot":
        options["negative_slope"] = draw.any_of((0.2, 0.0, 0.01, 1.0))
    return _passes(lambda **t: getattr(functional, kind)(graph, **t, **options), **operands), config, None


def _activation(draw: Draw, config: QConfig | None) -> _Run:
    n, f, dtype, seed = draw.size(200), draw.any_of(WIDTHS), draw.any_of(DTYPES), _seed(draw)
    given = {"x": draw_values(draw, n, f, dtype=dtype)}
    if draw.chance(0.5):
        given["bias"] = torch.randn(f).to(dtype)
    if draw.chance(0.5):
        given["residual"] = torch.randn(n, f).to(dtype)
    kind = draw.any_of((None, "relu", "leaky_relu", "elu"))
    options = {"kind": kind, "dropout": draw.any_of((0, 0.5)), "config": config, "seed": seed}
    options |= {"negative_slope": draw.any_of((0.01, 0.5)), "alpha": draw.any_of((1.0, 0.3, 2.0))}
    return _passes(lambda **t: functional.activation(**t, **options), **given), config, None


FUNCTIONS = (
    *(_linear, _linear, _spmm, _spmm, _graph_linear, _graph_linear, _incidence_sum, _sddmm),
    *(_edge_softmax, _attention_weights, _attention, _attention, _attention, _activation),
)


# --- models, compressed storage, formats


def model(draw: Draw) -> None:
    """A model of PyG's, as it is or quantized, under the compressor, with a trace or without."""
    name = draw.any_of(tuple(MODELS))
    case, config, seed = MODELS[name], draw_config(draw), draw.randrange(2**31)
    module, x = case.build(), torch.randn(N, K)
    if draw.chance(0.6):
        qgnn.quantize_(module, config or QConfig())
    blocks = draw_blocks(draw)
    options: dict[str, Any] = {"bits": blocks.bits, "block_size": blocks.block_size, "projection": blocks.projection}
    options |= {"bins": blocks.bins, "metadata_dtype": blocks.metadata_dtype, "min_size": draw.any_of((1, 256, 1024))}
    options |= {"redraw_dropout": draw.chance(0.3), "seed": draw.randrange(2**31)}
    parameters = dict(module.named_parameters())

    def run(compressed: bool) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        with ExitStack() as stack:
            if compressed:
                stack.enter_context(qgnn.compress_activations(**options))
            trace = stack.enter_context(qgnn.trace()) if draw.chance(0.5) else None
            out = case.run(module, x)
            module.zero_grad()
            out.square().mean().backward()
        assert trace is None or str(trace)
        return {"out": out.detach(), **{f"d{key}": p.grad for key, p in parameters.items() if p.grad is not None}}

    state = copy.deepcopy(module.state_dict())  # running means, which two runs move
    plain = run(False)
    module.load_state_dict(state)
    with watched():
        compressed = run(True)
    assert_finite(compressed)
    if not options["redraw_dropout"]:  # its masks are others than torch's
        assert torch.equal(plain["out"], compressed["out"]), "the compressor changed the forward pass"
    module.load_state_dict(state)
    assert_equal_pass(run(True), compressed)


def compressed(draw: Draw) -> None:
    """Packed blocks of a tensor of any shape: as the reference has them, and the same row by row."""
    shape = [draw.size(40) for _ in range(draw.randint(0, 2))] + [draw.any_of(WIDTHS)]
    blocks, dtype = draw_blocks(draw), draw.any_of(DTYPES)
    if len(shape) < 2:
        blocks = formats.Blocks(blocks.bits, blocks.block_size, None, blocks.bins, blocks.metadata_dtype)
    x = draw_values(draw, *shape, dtype=dtype)
    options = {name: getattr(blocks, name) for name in ("bits", "block_size", "bins", "projection", "metadata_dtype")}
    with watched():
        c = functional.compress(x, **options, seed=_seed(draw))
        whole = functional.decompress(c)
        first = draw.randint(0, shape[0])
        part = functional.decompress(c, slice(first, draw.randint(first, shape[0])))
    assert (whole.shape, whole.dtype) == (x.shape, x.dtype)
    assert whole.isfinite().all()
    expected = whole[first : first + len(part)]
    if c.columns:  # another number of rows is another product, in another order
        torch.testing.assert_close(part, expected)
    else:
        assert_same(part, expected)
    assert c.nbytes == blocks.num_bytes(0) + sum(t.nbytes for t in c.tensors) if blocks.block_size else c.nbytes >= 0


def number_format(draw: Draw) -> None:
    """Codes of any format of rows of any size, whole and in parts."""
    fmt = formats.parse(draw.any_of(NAMES))
    n, f, dtype = draw.size(60), draw.any_of(WIDTHS), draw.any_of(DTYPES)
    x = draw_values(draw, n, f, dtype=dtype)
    seed = draw.any_of((None, _seed(draw)))
    with watched():
        q = fmt.encode(x, seed=seed)
        values = q.dequantize()
        assert_same(fmt.quantize(x, seed=seed), values)
    assert (values.shape, values.dtype) == (x.shape, x.dtype)
    assert values.isfinite().all()
    assert_same(fmt.encode(x, seed=seed).storage, q.storage)
    if not q.has_parts:
        return
    twin: QTensor = pickle.loads(pickle.dumps(q))
    assert_same(twin.dequantize(), values)
    first = draw.randint(0, n)
    rows = slice(first, draw.randint(first, n))
    index = torch.randint(max(1, n), (draw.size(20) if n else 0,))
    assert_same(q.part(rows).dequantize(), values[rows])
    assert_same(q.index_select(0, index).dequantize(), values[index])
    assert_same(torch.stack([row.dequantize() for row in q.unbind()]) if n else values, values)


# --- operators with wrong arguments


def is_house_error(error: BaseException) -> bool:
    """An error that says what was expected and what came, in one line."""
    kinds = (ValueError, TypeError, IndexError, NotImplementedError)
    return isinstance(error, kinds) and "\n" not in str(error) and HOUSE_ERROR.fullmatch(str(error)) is not None


def operator(draw: Draw) -> None:
    """An operator with an argument that is not as it should be: refused, or taken as what it is. Types of Python are
    the dispatcher's to check."""
    name = draw.any_of(OPERATORS)
    arguments = arguments_of(name)
    changed = draw.sample(sorted(arguments), draw.randint(1, 2))
    for key in changed:
        arguments[key] = _spoiled(draw, arguments[key], most=2**62 if key not in _SIZES else 2**20)
    try:
        getattr(torch.ops.qgnn, name)(**arguments)
    except Exception as error:
        if not is_house_error(error):
            shown = {
                key: f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else value
                for key, value in arguments.items()
                if key in changed
            }
            raise AssertionError(f"'{name}' with {shown} raises {type(error).__name__}: {error}") from error


_SIZES = ("num_columns", "num_sources", "num_kept")  # of results, which take the memory that they are asked to take


def _spoiled(draw: Draw, value: Any, most: int) -> Any:
    """Another value that the schema takes."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return min(most, draw.any_of((-1, 0, 1, 3, 9, 65535, 65536, 2**31 - 1, 2**31, 2**62)))
    if isinstance(value, float):
        return draw.any_of((0.0, -1.0, 1e30))
    if isinstance(value, str):
        return draw.any_of(("", "row", "tensor", "relu", "dot", "bogus"))
    if isinstance(value, torch.dtype):
        return draw.any_of((torch.float16, torch.float64, torch.int8, torch.bool))
    if not isinstance(value, Tensor):
        return value
    made = value.clone()
    if made.numel() and not made.is_floating_point() and draw.chance(0.4):
        extremes = torch.iinfo(made.dtype) if made.dtype != torch.bool else None
        made.view(-1)[draw.randrange(made.numel())] = (
            1 if extremes is None else draw.any_of((extremes.min, extremes.max, -1 if extremes.min else 0, 7))
        )
        return made
    return draw.any_of(
        (
            lambda t: t[:-1],
            lambda t: torch.cat([t, t]),
            lambda t: t[:0],
            lambda t: t.unsqueeze(0),
            lambda t: t.t() if t.dim() == 2 else t.reshape(-1, 1),
            lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
            lambda t: t.double(),
            lambda t: t.half(),
            lambda t: t.to(torch.int16),
            lambda t: t.to(torch.bool),
            lambda t: t.to(torch.complex64),
            lambda t: t.to("meta"),
            lambda t: t.reshape(()) if t.numel() == 1 else t.flatten(),
            lambda t: t.flip(0),
        )
    )(made)


KINDS: dict[str, Callable[[Draw], None]] = {
    "layer": layer,
    "function": function,
    "model": model,
    "compressed": compressed,
    "format": number_format,
    "operator": operator,
}
