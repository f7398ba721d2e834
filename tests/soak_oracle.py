"""Every call of a native kernel held to its definition, whoever makes it: a layer, a function, an operator.

``watched()`` stands in front of the primitives of the CPU. Codes, scales, bits and exact products have to be those of
``qgnn.reference`` in every bit; sums of floats lie within the error bound of fp32 around what the reference computes in
float64 (each bound is that of the primitive's own tests); no operand changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import cpu_attention_cases as attention_cases
from block_cases import error_bound
from kernel_cases import UNIT, assert_within
from qgnn import reference
from qgnn.activation import Activation
from qgnn.ops import _backends
from qgnn.reference.activation import activate
from qgnn.reference.blocks import projection_signs, row_signs
from softmax_cases import edge_scores, exact_attention_backward, exact_backward, exact_softmax, softmax_bound

Options = dict[str, Any]
EXACT = {
    *("quantize", "quantize_dequantize", "quantize_shared", "matmul", "matmul_requantize", "quantize_matmul"),
    *("quantize_matmul_requantize", "matmul_shared", "spmm_extremum", "spmm_extremum_dx", "activation"),
    *("adjacency_filter", "adjacency_merge", "codes_pack", "codes_unpack"),
}


def doubled(value: Any) -> Any:
    """The same in float64, where it is floating point."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _copied(value: Any) -> Any:
    if isinstance(value, Activation):
        return value._replace(mask=_copied(value.mask))
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(values: Any) -> list[Tensor]:
    flat = [value.mask if isinstance(value, Activation) else value for value in values]
    return [value for value in flat if isinstance(value, Tensor)]


def assert_same(actual: Any, expected: Any) -> None:
    """Equal types, shapes and values; a NaN equals a NaN."""
    if isinstance(expected, tuple):
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
    elif expected is None:
        assert actual is None
    else:
        assert actual.dtype == expected.dtype, f"{actual.dtype} in place of {expected.dtype}"
        assert actual.shape == expected.shape, f"{list(actual.shape)} in place of {list(expected.shape)}"
        differ = (actual != expected) & ~((actual != actual) & (expected != expected))
        assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} elements differ from the reference"


def _assert_stored(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Within ``bound``, and rounded once more where a result is stored in a half type."""
    info = torch.finfo(actual.dtype)
    stored = expected.abs() * (info.eps if actual.dtype.itemsize == 2 else 0) + info.smallest_normal * info.eps
    assert_within(actual, expected, bound * (1 + info.eps) + stored)


def _spmm(kernel: Callable[..., Any], operands: tuple[Any, ...], options: Options) -> Tensor:
    """The sums before what follows them, within their bound: of ``tests/kernels/cpu/test_spmm.py``."""
    indptr, index, x = operands
    plain = {k: options[k] for k in ("weight", "x_scale", "row_factor", "bias") if options.get(k) is not None}
    out = kernel(indptr, index, x, **plain, out_dtype=torch.float32)
    exact, size = (
        reference.spmm(indptr, index, f(x.double()), **{k: f(t.double()) for k, t in plain.items()})
        for f in (torch.clone, torch.abs)
    )
    roundings = 2 * indptr.diff()[:, None] + 4
    assert_within(out, exact, roundings * 1.01 * UNIT * size + torch.finfo(torch.float32).smallest_normal * 2**-24)
    return out


def check_spmm(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    """Behind the sums a row's activation and its type are exact."""
    out = _spmm(kernel, operands, options)
    x, activation = operands[2], options.get("activation")
    out = out if activation is None else activate(out, activation)
    assert_same(results, out.to(options.get("out_dtype") or (x.dtype if x.is_floating_point() else torch.float32)))


def check_spmm_requantize(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    rounding = {name: options[name] for name in ("bits", "seed", "stream") if name in options}
    spmm = _backends.c_backend()._primitives["spmm"]
    assert_same(results, reference.quantize(_spmm(spmm, operands, options), **rounding))


def check_matmul_dw(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    g_q, g_scale, x_q, x_scale = map(doubled, operands)
    factor = (g_scale * x_scale).expand(g_q.shape[0])[:, None]
    terms = (g_q.double().abs() * factor.abs()).t() @ x_q.double().abs()
    exact = (g_q.double() * factor).t() @ x_q.double()
    assert_within(results, exact, terms * (g_q.shape[0] + 3) * UNIT * 1.01 + 2.0**-149)


def check_sddmm(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    """Dot products of floats are sums; all else is exact."""
    indptr, index, target, source = operands
    if target.dtype == torch.int8 or options.get("op") == "add":
        assert_same(results, reference.sddmm(*operands, **options))
        return
    exact, size = (
        reference.sddmm(indptr, index, *(f(x.double()) for x in (target, source)), **options)
        for f in (torch.clone, torch.abs)
    )
    width = target.shape[1] // options.get("heads", 1)
    assert_within(results, exact, 1.01 * (width + 1) * UNIT * size + 2.0**-149 * width)


def _check_column_sums(sums: Tensor | None, wide: Tensor) -> None:
    if sums is not None:
        bound = wide.shape[0] * UNIT * wide.double().abs().sum(0)
        assert_within(sums, wide.double().sum(0), bound)


def check_quantize_grad(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    expected = reference.quantize_grad(*operands, **options)
    assert_same(results[:2], expected[:2])
    assert (results[2] is None) == (expected[2] is None)
    wide = operands[0].float()
    if options.get("mask") is not None:
        wide, _ = reference.activation_backward(wide, options["mask"], factor=options["factor"])
    _check_column_sums(results[2], wide)


def check_activation_backward(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    expected = reference.activation_backward(*operands, **options)
    assert_same(results[0], expected[0])
    assert (results[1] is None) == (expected[1] is None)
    grad = operands[0].float()
    wide, _ = reference.activation_backward(grad, *operands[1:], **options | {"out_dtype": None})
    _check_column_sums(results[1], wide)


def check_softmax(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    indptr, scores = operands
    _assert_stored(results, exact_softmax(indptr, scores), softmax_bound(indptr, scores.double()))


def check_softmax_backward(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    _assert_stored(results, *exact_backward(*operands))


def check_attention_scores(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    indptr, scores = operands[0], edge_scores(*operands, slope=options["negative_slope"])
    _assert_stored(results, exact_softmax(indptr, scores), softmax_bound(indptr, scores, score_roundings=3))


def check_attention_scores_backward(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    indptr, index, indptr_t, order_t, target, source, out, grad = operands
    slope = options["negative_slope"]
    scores = edge_scores(indptr, index, target, source, slope=slope)
    row = torch.repeat_interleave(indptr.diff().long(), output_size=index.numel())
    if _at_a_kink(target.double()[row], source.double()[index.long()]):
        return
    expected = exact_attention_backward(indptr, scores, out, grad, indptr_t, order_t, slope=slope)
    for actual, (exact, bound) in zip(results, expected, strict=True):
        _assert_stored(actual, exact, bound)


def _attention(kind: str, H: int, rows: tuple[Tensor, ...], options: Options) -> attention_cases.Operands:
    """The operands of a call of H heads, and the same in float64."""
    scales = [options.get(name) for name in attention_cases.ROWS[kind].values()]
    first = 2 if kind == "attention" else 0  # behind the scores
    exact = [x.double() for x in rows]
    for number, scale in enumerate(scales, first):
        if scale is not None:
            x = rows[number]
            values = x.double().view(x.shape[0], H, x.shape[1] // H) * scale.double()[:, :, None]
            exact[number] = values.view(x.shape)
    kept = {k: options[k] for k in ("negative_slope", "dropout", "edge_score", "edge_x") if options.get(k) is not None}
    return attention_cases.Operands(rows, kept, tuple(exact), {k: doubled(v) for k, v in kept.items()}, H)


def check_attention(kind: str, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    """Both results of a forward pass."""
    indptr, index, *rows = operands
    H = options["heads"] if kind == "attention_dot" else results[1].shape[1]
    o = _attention(kind, H, tuple(rows), options)
    row = torch.repeat_interleave(indptr.diff().long(), output_size=index.numel())
    g = attention_cases.graph_of(torch.stack([index.long(), row]), rows[1].shape[0], len(indptr) - 1, indptr.dtype)
    exact = attention_cases.forward(kind, g, o, reference)
    nothing = torch.zeros(results[0].shape, dtype=torch.float64)
    bounds = attention_cases.bounds(kind, g, o, exact[1], nothing)
    for actual, expected, bound in zip(results, exact, bounds[:2], strict=True):
        _assert_stored(actual, expected, bound)


def _at_a_kink(*terms: Tensor) -> bool:
    """Whether fp32 may see another sign of a sum than float64, as the derivative of a LeakyReLU does."""
    size = sum(t.abs() for t in terms)
    return bool(((sum(terms).abs() <= 4 * UNIT * size) & (size > 0)).any())


def check_attention_backward(kind: str, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    """All gradients, for the logarithms that were given."""
    *rows, lse, grad = operands[5:]
    o = _attention(kind, lse.shape[1], tuple(rows), options)
    g = attention_cases.Graph(*operands[:5], rows[1].shape[0])
    row = torch.repeat_interleave(g.indptr.diff().long(), output_size=g.index.numel())
    edge = (o.exact_options[name] for name in ("edge_score", "edge_x") if name in o.exact_options)
    if kind != "attention_dot" and _at_a_kink(o.exact_args[0][row], o.exact_args[1][g.index.long()], *edge):
        return
    rounding = {k: options[k] for k in ("grad_bits", "seed", "stream", "needs_dedge") if k in options}
    expected = attention_cases.backward(kind, g, o, lse.double(), grad.double(), reference, **rounding)
    bounds = attention_cases.bounds(kind, g, o, lse.double(), grad.double())[2:]
    for actual, exact, bound in zip(results, expected, bounds, strict=True):
        assert (actual is None) == (exact is None)
        if actual is not None:
            _assert_stored(actual, exact, bound)


def check_blocks_pack(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    """With a projection each backend adds in an order of its own: values are then held to their distance."""
    expected = reference.blocks_pack(*operands, **options)
    projection = options.get("projection")
    if not projection:
        assert_same(results, expected)
        return
    for actual, wanted in zip(results, expected, strict=True):
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    x, (packed, low, step) = operands[0], results
    if not x.numel() or not x.isfinite().all():
        return
    (N, F), signs = x.shape, (options["projection_seed"], options["projection_stream"])
    own = row_signs(0, N, F, *signs).double()
    exact = (x.double() * own) @ projection_signs(F, projection, *signs).double() * projection**-0.5
    sums = 1.01 * (F + 2) * UNIT * x.double().abs().sum(1, keepdim=True) * projection**-0.5
    bits, edges = options["bits"], options.get("edges")
    values = reference.blocks_unpack(packed, low, step, bits=bits, size=N * projection, edges=edges)
    widest = 1.0 if edges is None else float(edges.diff().max())
    steps = error_bound(low, step, bits, nearest=edges is None and options["seed"] is None) + step.double() * (
        widest - 1
    )
    steps = steps.repeat_interleave(options["block_size"])[: N * projection].view(N, projection)
    assert_within(values.view(N, projection), exact, 1.01 * steps + sums)


def check_blocks_unpack(kernel: Any, operands: tuple[Any, ...], options: Options, results: Any) -> None:
    projection = options.get("projection")
    if not projection:
        assert_same(results, reference.blocks_unpack(*operands, **options))
        return
    plain = {name: options[name] for name in ("bits", "size", "edges") if name in options}
    values = reference.blocks_unpack(*operands, **plain).view(-1, projection).double()
    F, signs = options["num_columns"], (options["projection_seed"], options["projection_stream"])
    own = row_signs(options["first_row"], len(values), F, *signs).double()
    exact = values @ projection_signs(F, projection, *signs).double().t() * projection**-0.5 * own
    assert results.dtype == options["dtype"]
    if exact.isfinite().all() and results.dtype != torch.float64:
        bound = 1.01 * (projection + 2) * UNIT * values.abs().sum(1, keepdim=True) * projection**-0.5
        _assert_stored(results, exact, bound.expand_as(exact))


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def check(
    primitive: str, kernel: Callable[..., Any], operands: tuple[Any, ...], options: Options, results: Any
) -> None:
    """Raise unless ``results`` are what the definition of ``primitive`` gives for these operands."""
    kind = primitive.removesuffix("_backward")
    if kind in attention_cases.KINDS:
        (check_attention if kind == primitive else check_attention_backward)(kind, operands, options, results)
    elif primitive in EXACT:
        assert_same(results, getattr(reference, primitive)(*operands, **options))
    else:
        CHECKS[primitive](kernel, operands, options, results)


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Check each call of a native kernel within; gives the number of calls by primitive."""
    call, calls = _backends.Backend.call, {}

    def checked(self: _backends.Backend, primitive: str, trace_name: str, *operands: Any, **options: Any) -> Any:
        native = self.name == "c" and (self._serves is None or self._serves(primitive, operands, options))
        if not native:
            return call(self, primitive, trace_name, *operands, **options)
        before, given = [_copied(x) for x in operands], {name: _copied(value) for name, value in options.items()}
        results = call(self, primitive, trace_name, *operands, **options)
        calls[primitive] = calls.get(primitive, 0) + 1
        given.pop("format_name", None)
        bits = given.pop("bits", 8)
        if primitive in _backends._TAKES_BITS:
            given["bits"] = bits
        try:
            check(primitive, self._primitives[primitive], tuple(before), given, results)
            assert_same(tuple(_tensors(operands)), tuple(_tensors(before)))
            # What is written to (bits, derivatives) the reference has written to the copies.
            after = {name: value for name, value in options.items() if name in given}
            assert_same(tuple(_tensors(after.values())), tuple(_tensors(given[name] for name in after)))
        except Exception as error:
            shapes = [f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else x for x in operands]
            raise AssertionError(f"{primitive}{shapes}: {type(error).__name__}: {error}") from error
        return results

    _backends.Backend.call = checked
    try:
        yield calls
    finally:
        _backends.Backend.call = call
