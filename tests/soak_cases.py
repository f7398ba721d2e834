"""Random cases of layers, functions, models, formats and operators for ``tests/soak.py``.

A case is a function of a :class:`Draw`, and so of a seed; it raises where something is not as it should be.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import qgnn
from layer_cases import assert_equal_pass, passes
from layers import LAYERS, Layer, learned
from model_cases import MODELS, K, N
from op_arguments import OPERATORS, arguments_of
from qgnn import QConfig, QTensor, formats, functional
from qgnn.formats.names import NAMES
from qgnn.nn import Epilogue
from soak_draw import (
    DTYPES,
    WIDTHS,
    Draw,
    assert_finite,
    by_row,
    draw_blocks,
    draw_config,
    draw_form,
    draw_graph,
    draw_values,
    repeated,
)
from soak_functions import function
from soak_oracle import assert_same, watched

ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")
HOUSE_ERROR = re.compile(r"'.+' (expects .+|.+ \(got .+\).*)")


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
        c = functional.compress(x, **options, seed=draw.rounding_seed())
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
    seed = draw.any_of((None, draw.rounding_seed()))
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
