"""The smallest widths that keep an error below a threshold, for tensors and for the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from qgnn.formats import Blocks, Format, Int
from qgnn.metrics.errors import check_form, error_x, kind_of
from qgnn.nn._layer import Quantized, given_rows

WIDTHS = range(2, 9)
THRESHOLD = 0.3

_INT = Int()

Family = Format | Callable[[int], Format]
Bits = dict[str, dict[str, int | None]]


def select_bits(
    x: Tensor,
    threshold: float = THRESHOLD,
    fmt: Family = _INT,
    *,
    dim: int | None = -1,
    form: str = "elementwise",
    widths: Iterable[int] = WIDTHS,
    seed: int | None = None,
) -> int | None:
    """The smallest width with which :func:`error_x` of ``x`` is at most ``threshold``: the rule of `"Tango: Rethinking
    Quantization for Graph Neural Network Training on GPUs" <https://arxiv.org/abs/2308.00890>`_.

    Args:
        x: Values.
        threshold: The largest error allowed. (default: 0.3, as in the paper)
        fmt: The format, whose own width does not matter, or a function of the width that makes it. (default:
            symmetric integers)
        dim: Along which dimension values share a scale; ``None``: all of the tensor.
        form: That of :func:`error_x`.
        widths: Widths to choose from. (default: 2 to 8)
        seed: A seed for stochastic rounding; ``None`` rounds to nearest.

    Returns:
        The width, or ``None`` if none is enough: leave such values in full precision.

    Raises:
        TypeError: If ``x`` is no floating-point tensor, ``fmt`` makes no format, or ``threshold`` is no number.
        ValueError: If ``form`` is unknown, ``threshold`` negative, or the format does not have one of the widths.

    Example:
        >>> qgnn.metrics.select_bits(torch.randn(1000, 64), dim=None)
        5
    """
    check_form("select_bits", form)
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"'select_bits' expects 'threshold' to be a number (got {threshold!r})")
    if not threshold >= 0:
        raise ValueError(
            f"'select_bits' expects 'threshold' of at least 0, the largest error allowed (got {threshold})"
        )
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"'select_bits' expects 'x' to be a floating-point tensor (got {kind_of(x)})")
    x = x.detach()
    if dim is None or x.dim() == 0:
        x, dim = x.reshape(-1), -1
    for bits in sorted(set(widths)):
        if error_x(x, _in_width("select_bits", fmt, bits).quantize(x, dim, seed), form) <= threshold:
            return bits
    return None


def select_bits_per_layer(
    model: nn.Module,
    batches: Iterable[Any],
    threshold: float = THRESHOLD,
    fmt: Family | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_batches: int = 4,
    form: str = "elementwise",
    widths: Iterable[int] = WIDTHS,
    seed: int | None = None,
) -> Bits:
    """:func:`select_bits` for what the quantized layers of a model read, from the first batches.

    A copy of the model runs in full precision, in the mode that the model is in: the model, its gradients and torch's
    random numbers stay as they are. Of each layer that runs, these components are measured:

    - ``"features"`` or ``"activations"``: its input, where that needs no gradient or does;
    - ``"weights"``: the matrices that it multiplies with;
    - ``"output_gradient"``: the gradient of its result, if there is a ``loss``.

    The width of a component is enough for all tensors of all batches. Values share a scale as they do in the layer:
    along rows, or all of a tensor if its config has ``granularity="tensor"``.

    Args:
        model: A model with layers of :mod:`qgnn.nn`.
        batches: What the model is called with, of which the first ``num_batches`` are used.
        threshold: The largest error allowed. (default: 0.3)
        fmt: As in :func:`select_bits`; ``None``: the formats of each layer's own config. Components in full precision
            are then left out.
        forward: ``forward(model, batch)`` calls the model; ``None``: ``model(batch.x, batch.edge_index)``.
        loss: ``loss(out, batch)`` makes the loss of what ``forward`` returns.
        num_batches: Number of batches.
        form: As in :func:`select_bits`.
        widths: As in :func:`select_bits`.
        seed: As in :func:`select_bits`.

    Returns:
        ``{layer name: {component: width or None}}``, which :func:`apply_bits` takes.

    Raises:
        ValueError: If the model has no quantized layer, or there are no batches.

    Example:
        >>> loss = lambda out, data: F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        >>> bits = qgnn.metrics.select_bits_per_layer(model, [data], loss=loss)
        >>> qgnn.metrics.apply_bits(model, bits)
    """
    layers = dict(_quantized_layers("select_bits_per_layer", model))
    select = partial(select_bits, threshold=threshold, form=form, widths=tuple(widths), seed=seed)
    found: Bits = {}

    def measure(name: str, component: str, dim: int, x: Tensor) -> None:
        config = layers[name].config
        assert config is not None
        family = config.format_of(component) if fmt is None else fmt
        if family is None or not x.numel():
            return
        bits = select(x, fmt=family, dim=None if config.granularity == "tensor" else dim)
        widest = found.setdefault(name, {})
        before = widest.get(component, 0)
        widest[component] = None if bits is None or before is None else max(bits, before)

    def on_call(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        rows = given_rows(args, kwargs)
        for x in rows if isinstance(rows, (tuple, list)) else (rows,):
            if isinstance(x, Tensor) and x.is_floating_point():
                measure(name, "activations" if x.requires_grad else "features", -1, x)
        if name not in weighed:
            weighed.add(name)
            for weight, dim in _weights(layer):
                measure(name, "weights", dim, weight)
        out = result[0] if isinstance(result, tuple) else result
        if loss is not None and out.requires_grad:
            out.register_hook(partial(measure, name, "output_gradient", -1))

    weighed: set[str] = set()
    copied = deepcopy(getattr(model, "_orig_mod", model))
    for name, layer in _quantized_layers("select_bits_per_layer", copied):
        layer.config = None
        layer.register_forward_hook(partial(on_call, name), with_kwargs=True)  # type: ignore[attr-defined]
    num_run = 0
    cuda = {p.device for p in copied.parameters() if p.is_cuda}
    # Compiled parts would compile the hooks, or fail at them.
    with torch.random.fork_rng(cuda), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        for batch in islice(batches, num_batches):
            num_run += 1
            out = copied(batch.x, batch.edge_index) if forward is None else forward(copied, batch)
            if loss is not None:
                # Not backward(), which would add to gradients of leaves outside of the copy.
                parameters = [p for p in copied.parameters() if p.requires_grad]
                torch.autograd.grad(loss(out, batch), parameters, allow_unused=True)
    if not num_run:
        raise ValueError("'select_bits_per_layer' expects at least one batch (got none)")
    return found


def apply_bits(model: nn.Module, bits: Mapping[str, Mapping[str, int | None]], fmt: Family | None = None) -> None:
    """Give components of a model's layers the widths of :func:`select_bits_per_layer`, in place.

    Args:
        model: The model.
        bits: ``{layer name: {component: width}}``, with ``None`` for full precision. What is not named stays as it is.
        fmt: The format, as in :func:`select_bits`; ``None``: that which the component has in the layer's config.

    Raises:
        ValueError: If there is no such quantized layer, a component is in full precision and ``fmt`` is ``None``, or a
            layer that keeps packed blocks would have more than one format.

    Example:
        >>> qgnn.metrics.apply_bits(model, {"conv1": {"weights": 4, "output_gradient": None}})
    """
    layers = dict(_quantized_layers("apply_bits", model))
    configs = {}
    for name, widths in bits.items():
        config = layers[name].config if name in layers else None
        if config is None:
            raise ValueError(f"'apply_bits' expects names of quantized layers, {list(layers)} (got {name!r})")
        formats = dict(config.components)
        for component, width in widths.items():
            family = config.format_of(component) if fmt is None else fmt
            if family is None and width is not None:
                raise ValueError(
                    f"'apply_bits' expects 'fmt' for '{component}' of '{name}', which is in full precision (got None)"
                )
            formats[component] = None if family is None or width is None else _in_width("apply_bits", family, width)
        mixed = replace(config, save="int8", components=formats)
        if isinstance(config.save, Blocks) and not mixed.is_integer:
            raise ValueError(
                f"'apply_bits' expects one width of all operands for '{name}', which keeps packed blocks (got "
                f"{mixed.name!r}); give it save='int8' first: 'layer.config = dataclasses.replace(layer.config, "
                f'save="int8")\''
            )
        configs[name] = replace(mixed, save=config.save)
    for name, config in configs.items():
        layers[name].config = config


def _quantized_layers(owner: str, model: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """The quantized layers by name, that of a compiled model's own module."""
    model = getattr(model, "_orig_mod", model)
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, Quantized) and m.config is not None]
    if not found:
        raise ValueError(
            f"'{owner}' expects a model with quantized layers (got a {type(model).__name__} without any); convert it "
            f"with 'qgnn.quantize_(model, qgnn.QConfig())' first"
        )
    yield from found


def _weights(layer: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The matrices that a layer multiplies rows with, each with the dimension over which the product sums."""
    dense = (nn.Linear, Linear)
    if not isinstance(layer, dense):
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith(("weight", "root")) and parameter.dim() >= 2:
                yield parameter, -2
    parts = [layer, *(child for name, child in layer.named_children() if name != "nn")]
    for part in parts:
        for linear in part if isinstance(part, nn.ModuleList) else (part,):
            if isinstance(linear, dense):
                yield linear.weight, -1


def _in_width(owner: str, fmt: Family, bits: int) -> Format:
    made = fmt.with_bits(bits) if isinstance(fmt, Format) else fmt(bits) if callable(fmt) else fmt
    if not isinstance(made, Format):
        raise TypeError(f"'{owner}' expects 'fmt' to be a format, or to make one of a width (got {made!r})")
    return made
