"""What the tests of layers share: one pass with every gradient, error bounds of quantized arithmetic, bytes kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgnn import QConfig

# A code misses its value by at most this many steps. Beyond the 1/2 (nearest) or 1 (stochastic) of the rounding itself:
# inv is 2^-22 below 1/scale, steps are cut at 2^-16, and x * inv rounds twice, which is 2^-15.4 of a step at code 127.
STEPS = {"nearest": 0.5 + 1e-4, "stochastic": 1.0 + 1e-4}

UNIT_ROUNDOFF = 2.0**-24  # of fp32


def passes(
    module: nn.Module, x: Tensor, *args: Any, extra: tuple[Tensor, ...] = (), seed: int = 7
) -> dict[str, Tensor]:
    """Output and all gradients of one pass: ``out``, ``x``, each parameter by name, and ``extra0``, ... .

    The upstream gradient depends on ``seed`` and the output's shape alone.
    """
    x = x.detach().clone().requires_grad_()
    out = module(x, *args)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    inputs = {"x": x, **dict(module.named_parameters()), **{f"extra{i}": t for i, t in enumerate(extra)}}
    # Zeros for what a layer does not use: without edges, or without its root.
    grads = torch.autograd.grad(out, list(inputs.values()), upstream, materialize_grads=True)
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}}


def assert_same_pass(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rel: float = 1e-5, differences: tuple[str, ...] = ()
) -> None:
    """Equal keys, types and shapes, and values within ``rel`` of each tensor's largest magnitude.

    Gradients of edge weights are differences of products as large as the other gradients, and may cancel to nothing, as
    those of normalized self-loops do: they are held to the largest magnitude of the whole pass. So are the gradients of
    the parameters ``differences``.
    """
    assert actual.keys() == expected.keys()
    scales = {name: value.double().abs().amax().item() if value.numel() else 0.0 for name, value in expected.items()}
    for name, value in expected.items():
        scale = max(scales.values()) if name.startswith("dextra") or name[1:] in differences else scales[name]
        torch.testing.assert_close(
            actual[name], value, rtol=rel, atol=rel * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal_pass(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit the same results."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the error over that of the expected values."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def dense_adjacency(edge_index: Tensor, num_sources: int, num_targets: int, weight: Tensor | None = None) -> Tensor:
    """float64 ``[num_targets, num_sources]``: the sum of the weights of the edges between each pair."""
    value = torch.ones(edge_index.shape[1], dtype=torch.float64) if weight is None else weight.detach().double()
    out = torch.zeros(num_targets, num_sources, dtype=torch.float64)
    return out.index_put((edge_index[1], edge_index[0]), value, accumulate=True)


def gcn_matrix(edge_index: Tensor, num_nodes: int, weight: Tensor | None = None) -> Tensor:
    """The matrix that a graph convolution aggregates with, dense in float64, for graphs without self-loops."""
    adjacency = dense_adjacency(edge_index, num_nodes, num_nodes, weight) + torch.eye(num_nodes, dtype=torch.float64)
    factor = adjacency.sum(1).rsqrt()
    return factor[:, None] * adjacency * factor[None, :]


@dataclass(frozen=True)
class Ball:
    """Values with a bound of their error, element by element: interval arithmetic for quantized products.

    ``value`` is the exact real result in float64; whatever a layer computes instead lies within ``radius`` of it.
    """

    value: Tensor
    radius: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Ball:
        value = value.detach().double()
        return cls(value, torch.zeros_like(value))

    @property
    def largest(self) -> Tensor:
        return self.value.abs() + self.radius

    @property
    def mT(self) -> Ball:  # noqa: N802
        return Ball(self.value.mT, self.radius.mT)

    def quantized(self, config: QConfig, granularity: str | None = None) -> Ball:
        """After rounding to codes with a scale a row or one for all."""
        per_row = (granularity or config.granularity) == "row"
        absmax = self.largest.amax(1, keepdim=True) if per_row else self.largest.amax()
        step = absmax / (2 ** (config.bits - 1) - 1)
        return Ball(self.value, self.radius + STEPS[config.rounding] * step)

    def __matmul__(self, other: Ball) -> Ball:
        exact = self.value @ other.value
        from_errors = self.largest @ other.largest - self.value.abs() @ other.value.abs()
        # fp32 sums of K products and a few factors: at most one rounding each
        from_sums = (self.value.shape[1] + 8) * UNIT_ROUNDOFF * (self.largest @ other.largest)
        return Ball(exact, from_errors + from_sums)

    def contains(self, actual: Tensor) -> bool:
        return bool(((actual.double() - self.value).abs() <= self.radius + 1e-30).all())


def linear_bounds(x: Tensor, weight: Tensor, upstream: Tensor, config: QConfig) -> dict[str, Ball]:
    """Bounds of ``y = x w^T`` and its gradients with quantized operands."""
    x_ball, w_ball, g_ball = Ball.exact(x), Ball.exact(weight), Ball.exact(upstream).quantized(config)
    x_codes = x_ball.quantized(config)
    return {
        "out": x_codes @ w_ball.quantized(config, "row").mT,
        "dx": g_ball @ w_ball.mT.quantized(config, "row").mT,
        "dweight": g_ball.mT @ (x_codes if config.save == "int8" else x_ball),
    }


def conv_bounds(matrix: Tensor, x: Tensor, weight: Tensor, upstream: Tensor, config: QConfig) -> dict[str, Ball]:
    """Bounds of ``out = A (x w^T)`` and its gradients, with codes again between the two products."""
    x_ball, w_ball, aggregate = Ball.exact(x), Ball.exact(weight), Ball.exact(matrix)
    x_codes = x_ball.quantized(config)
    hidden = (x_codes @ w_ball.quantized(config, "row").mT).quantized(config)
    grad_hidden = (aggregate.mT @ Ball.exact(upstream).quantized(config)).quantized(config)
    return {
        "out": aggregate @ hidden,
        "dx": grad_hidden @ w_ball.mT.quantized(config, "row").mT,
        "dlin.weight": grad_hidden.mT @ (x_codes if config.save == "int8" else x_ball),
    }


def assert_unbiased(draw: Callable[[], dict[str, Tensor]], exact: dict[str, Tensor], draws: int) -> None:
    """The mean of ``draws`` results lies within 5 standard errors of the exact ones, element by element.

    2^-14 of the largest magnitude is allowed for what rounding leaves on purpose: steps are cut at 2^-16, once in each
    of up to three roundings, and for fp32 sums.
    """
    samples: dict[str, list[Tensor]] = {name: [] for name in exact}
    for _ in range(draws):
        for name, value in draw().items():
            if name in samples:
                samples[name].append(value.double())
    for name, values in samples.items():
        stacked = torch.stack(values)
        error = (stacked.mean(0) - exact[name].double()).abs()
        allowed = 5 * stacked.std(0) / draws**0.5 + 2**-14 * exact[name].double().abs().amax()
        assert bool((error <= allowed).all()), f"{name}: {(error / allowed).max():.2f} of what is allowed"
        assert bool((stacked.std(0) > 0).any()), f"{name} does not vary: nothing was drawn"


def kept_bytes(run: Callable[[], Any], ignore: tuple[Tensor, ...] = ()) -> int:
    """Bytes that autograd keeps of ``run()``, each storage counted once, without those of ``ignore``."""
    known = {t.untyped_storage().data_ptr() for t in ignore}
    storages: dict[int, torch.UntypedStorage] = {}  # holding them keeps addresses from being used again

    def pack(t: Tensor) -> Tensor:
        dense = (t.crow_indices(), t.col_indices(), t.values()) if t.layout == torch.sparse_csr else (t,)
        for part in dense:
            storage = part.untyped_storage()
            if storage.data_ptr() not in known:
                storages[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in storages.values())
