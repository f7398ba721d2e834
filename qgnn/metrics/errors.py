"""Errors of quantization: what became of values, beside the values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from qgnn.qtensor import QTensor

FORMS = ("elementwise", "norm")
_LARGER_IS_BETTER = ("sqnr", "cosine")


def error_x(x: Tensor, x_hat: Tensor | QTensor, form: str = "elementwise") -> Tensor:
    r"""The relative error of ``x_hat``: Error_X of `"Tango: Rethinking Quantization for Graph Neural Network Training
    on GPUs" <https://arxiv.org/abs/2308.00890>`_, as we read it (the paper gives no formula).

    With ``form="elementwise"`` the mean over the elements that are not zero, with ``"norm"`` a ratio of sums:

    .. math:: \frac{1}{|\{x_i \ne 0\}|} \sum_{x_i \ne 0} \frac{|x_i - \hat x_i|}{|x_i|}, \qquad
        \frac{\sum_i |x_i - \hat x_i|}{\sum_i |x_i|}

    Small values, of which little is left, rule the first and hardly count in the second: at a given width it is several
    times larger. Of zeros alone the error is 0 if they are kept, else infinite.

    Args:
        x: Values.
        x_hat: What became of them.
        form: ``"elementwise"`` or ``"norm"``.

    Shapes:
        - **input:** two tensors of one shape
        - **output:** ``[]``, fp64

    Raises:
        TypeError: If an argument is no real tensor.
        ValueError: If the shapes differ, or ``form`` is unknown.

    Example:
        >>> qgnn.metrics.error_x(x, qgnn.formats.Int(8).quantize(x))
    """
    check_form("error_x", form)
    x, error = _with_error("error_x", x, x_hat)
    size, error = x.abs(), error.abs()
    total = _ratio(error.sum(), size.sum())
    if form == "norm":
        return total
    counts = size != 0  # NaN counts
    ratios = torch.where(counts, error / size, 0.0)
    num_counted = counts.sum()
    return torch.where(num_counted > 0, ratios.sum() / num_counted.clamp_min(1), total)


def sqnr(x: Tensor, x_hat: Tensor | QTensor) -> Tensor:
    r"""The ratio of signal to quantization noise in dB, :math:`10 \log_{10} (\sum x_i^2 / \sum (x_i - \hat x_i)^2)`.

    Infinite where ``x_hat`` is exact. A code bit more gains about 6 dB.

    Args:
        x: Values.
        x_hat: What became of them.

    Shapes:
        - **input:** two tensors of one shape
        - **output:** ``[]``, fp64

    Raises:
        TypeError: If an argument is no real tensor.
        ValueError: If the shapes differ.

    Example:
        >>> qgnn.metrics.sqnr(x, qgnn.formats.Int(8).quantize(x))
    """
    x, error = _with_error("sqnr", x, x_hat)
    # The inverse ratio: noise of zero is an infinite number of dB, whatever the signal.
    return -10 * _ratio(error.square().sum(), x.square().sum()).log10()


def bias(x: Tensor, x_hat: Tensor | QTensor) -> Tensor:
    r"""The mean error in units of the mean magnitude, :math:`\sum_i (\hat x_i - x_i) / \sum_i |x_i|`.

    Positive where ``x_hat`` is too large. Rounding at random has an expected bias of 0.

    Args:
        x: Values.
        x_hat: What became of them.

    Shapes:
        - **input:** two tensors of one shape
        - **output:** ``[]``, fp64

    Raises:
        TypeError: If an argument is no real tensor.
        ValueError: If the shapes differ.

    Example:
        >>> qgnn.metrics.bias(x, qgnn.formats.Int(4).quantize(x, seed=0))
    """
    x, error = _with_error("bias", x, x_hat)
    return _ratio(error.sum(), x.abs().sum())


def cosine(x: Tensor | Iterable[Tensor | None], x_hat: Tensor | QTensor | Iterable[Tensor | None]) -> Tensor:
    r"""The cosine of the angle between two vectors, :math:`\langle x, \hat x \rangle / (\|x\| \|\hat x\|)`.

    Several tensors, such as the gradients of all parameters, count as one long vector. 1 if both vectors are zero, 0 if
    one of them is.

    Args:
        x: A tensor, or several, with ``None`` for zeros, as of a parameter that got no gradient.
        x_hat: As many of the same shapes.

    Shapes:
        - **input:** tensors of any shape, or lists of them
        - **output:** ``[]``, fp64

    Raises:
        TypeError: If an argument holds something else than real tensors.
        ValueError: If numbers or shapes of tensors differ.

    Example:
        >>> exact = [p.grad.clone() for p in model.parameters()]
        >>> qgnn.metrics.cosine(exact, (p.grad for p in quantized.parameters()))
    """
    pairs = _pairs(x, x_hat)
    if not pairs:
        raise ValueError("'cosine' expects at least one tensor (got none)")
    device = pairs[0][0].device
    products = [(a * b, a * a, b * b) for a, b in pairs]
    dot, xx, yy = (torch.stack([p.sum().to(device) for p in terms]).sum() for terms in zip(*products, strict=True))
    length = xx.sqrt() * yy.sqrt()
    same = ((xx == 0) & (yy == 0)).to(length.dtype)
    return torch.where(length == 0, same, dot / length).clamp(-1, 1)


def _with_error(owner: str, x: Tensor, x_hat: Tensor | QTensor) -> tuple[Tensor, Tensor]:
    """``(x, x_hat - x)`` in fp64."""
    first, second = _doubles(owner, "x", x), _doubles(owner, "x_hat", x_hat)
    if first.shape != second.shape:
        raise ValueError(f"'{owner}' expects 'x_hat' of shape {list(first.shape)} (got {list(second.shape)})")
    return first, second - first


def _doubles(owner: str, name: str, x: Any) -> Tensor:
    x = x.dequantize() if isinstance(x, QTensor) else x
    if not isinstance(x, Tensor) or x.is_complex():
        raise TypeError(f"'{owner}' expects '{name}' to be a real tensor (got {kind_of(x)})")
    return x.detach().double()


def _pairs(x: Any, x_hat: Any) -> list[tuple[Tensor, Tensor]]:
    lists = [[t] if isinstance(t, (Tensor, QTensor)) else t for t in (x, x_hat)]
    if not all(isinstance(each, Iterable) for each in lists):
        raise TypeError(f"'cosine' expects tensors, or lists of them (got {kind_of(x)} and {kind_of(x_hat)})")
    pairs, missing = [], object()
    for a, b in zip_longest(*lists, fillvalue=missing):
        if a is missing or b is missing:
            raise ValueError("'cosine' expects as many tensors in 'x_hat' as in 'x' (got others)")
        if a is None and b is None:
            continue
        first = _doubles("cosine", "x", torch.zeros_like(b) if a is None else a)
        second = _doubles("cosine", "x_hat", torch.zeros_like(a) if b is None else b)
        if first.shape != second.shape:
            raise ValueError(f"'cosine' expects 'x_hat' of shape {list(first.shape)} (got {list(second.shape)})")
        pairs.append((first, second))
    return pairs


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``, and 0 for a part of zero."""
    return torch.where(part == 0, 0.0, part / whole)


def check_form(owner: str, form: object) -> None:
    if form in FORMS:
        return
    name, hint = getattr(form, "__name__", form), ""
    if name in _LARGER_IS_BETTER:
        hint = f"; these are errors, of which smaller ones are better: of '{name}' larger ones are"
    raise ValueError(f"'{owner}' expects 'form' to be one of {FORMS} (got {form!r}){hint}")


def kind_of(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
