"""A function of each element of a layer's rows, and dropout behind it."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from qgnn import ops
from qgnn.activation import KINDS, dropout_threshold
from qgnn.config import QConfig, check_config
from qgnn.functional._checks import check_device, check_float, check_probability, draw_seed
from qgnn.rng import make_seed


def activation(
    x: Tensor,
    kind: str | None = None,
    dropout: float = 0,  # an integer: torch.compile makes a symbol of a float
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    negative_slope: float = 0.01,
    alpha: float = 1.0,
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""An activation behind a layer, with what stands before and behind it, in one pass over the rows:
    :math:`y = \mathrm{drop}(\mathrm{act}(x + b + r))`.

    :func:`linear`, :func:`spmm` and :func:`graph_linear` apply ReLU and dropout themselves; this is for what has no
    such epilogue, like attention, sums of products, and residuals.

    What is kept for the backward pass is a bit an element of ReLU and leaky ReLU, and of ELU its derivative, in ``x``'s
    type or with ``config`` in one byte. Those of ReLU and ELU know the dropped elements, too; else dropout is drawn
    again, and without an activation only its seed is kept. Gradients are torch's; those of ELU's bytes are unbiased
    with stochastic rounding, as each is rounded to multiples of :math:`\max(1, \alpha) / 255`.

    Args:
        x: Rows.
        kind: ``"relu"``, ``"leaky_relu"``, ``"elu"``, or ``None`` for the identity.
        dropout: Probability that an element is dropped after that, in steps of ``2**-16``. In evaluation, give 0.
        bias: Added to each row.
        residual: Rows to add, of ``x``'s type.
        negative_slope: Of leaky ReLU.
        alpha: Of ELU, at least 0.
        config: A config keeps ELU's derivative as bytes, rounded as it says, whatever its ``bits``, unless it has
            ``save="fp32"`` or formats by component; ``None`` keeps it in ``x``'s type. Nothing else depends on it.
        seed: Seed of dropout and stochastic rounding.

    Shapes:
        - **input:** ``x [..., F]``, ``bias [F]``, ``residual [..., F]``, as ``x`` has
        - **output:** ``[..., F]`` of ``x``'s type; computed in fp32 (float64 for float64 input)

    Raises:
        TypeError: If a tensor holds no floats, ``residual`` has another type than ``x``, or ``config`` is no QConfig.
        ValueError: If shapes or devices disagree, ``kind`` is unknown, ``dropout`` is no probability, or a slope no
            finite number.

    Example:
        >>> y = qgnn.functional.activation(torch.randn(5, 16), "elu", dropout=0.6, bias=torch.zeros(16))
    """
    _check(x, kind, dropout, bias, residual, negative_slope, alpha)
    check_config(config, "activation")
    threshold = dropout_threshold(dropout)
    tensors = [t for t in (x, bias, residual) if t is not None]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    keep_codes = kind == "elu" and keep and config is not None and config.is_integer and config.keeps_codes
    y, *_ = ops.activation(
        _matrix(x),
        bias,
        None if residual is None else _matrix_of_its_own(residual),
        draw_seed(config, seed, x) if keep_codes and config is not None else None,
        make_seed(seed, x.device) if threshold else None,
        "none" if kind is None else kind,
        alpha if kind == "elu" else negative_slope,
        threshold,
        keep,
        keep_codes,
    )
    return y.view(x.shape)


def _matrix(x: Tensor) -> Tensor:
    """Rows as operators take them. Matrices are left alone: of one gradient that two leaves get, autograd makes a copy,
    but not of two views of it."""
    return x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _matrix_of_its_own(residual: Tensor) -> Tensor:
    """The same, with a gradient that is no view of that of the rows: what is selected is no copy, its gradient is."""
    return residual if residual.dim() == 2 else _matrix(residual)[None].select(0, 0)


def _check(
    x: Tensor,
    kind: str | None,
    dropout: float,
    bias: Tensor | None,
    residual: Tensor | None,
    negative_slope: float,
    alpha: float,
) -> None:
    check_float("activation", "x", x)
    if x.dim() == 0:
        raise ValueError("'activation' expects 'x' with at least one dimension (got a scalar)")
    if kind is not None and kind not in KINDS[1:]:
        raise ValueError(f"'activation' expects 'kind' to be one of {KINDS[1:]} or None (got {kind!r})")
    check_probability("activation", "dropout", dropout)
    for name, t, shape in (("bias", bias, x.shape[-1:]), ("residual", residual, x.shape)):
        if t is not None:
            check_float("activation", name, t)
            if t.shape != shape:
                raise ValueError(f"'activation' expects '{name}' of shape {list(shape)} (got {list(t.shape)})")
            check_device("activation", name, t, x.device)
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(
            f"'activation' expects 'residual' in {x.dtype}, as 'x' is (got {residual.dtype}); use "
            f"'residual.to(x.dtype)'"
        )
    infinity = float("inf")
    if not -infinity < negative_slope < infinity:
        raise ValueError(f"'activation' expects 'negative_slope' to be finite (got {negative_slope})")
    if not 0 <= alpha < infinity:
        raise ValueError(f"'activation' expects 'alpha' to be a finite number from 0 on (got {alpha})")
