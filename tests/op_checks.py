"""Checks that every operator goes through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dense import assert_within
from qgnn import Graph, ops
from qgnn.formats import _format
from statistics_checks import z_limit

NO_EPILOGUE = (False, 0, None, False)
PLAIN = (*NO_EPILOGUE, None)  # an operator's last arguments: no ReLU, no dropout, codes without origin
PLAIN_PRODUCT = (*NO_EPILOGUE, *ops.Packed(), None)  # the same of products: nothing is packed

traces_formats = pytest.mark.skipif(not _format.TRACES_FORMATS, reason="a compiler that cannot trace formats")

BASIC = ("test_schema", "test_faketensor", "test_autograd_registration")


def opcheck(op: Any, args: tuple[Any, ...], *, compiled: bool = False) -> None:
    """Schema, fake and autograd registration; with ``compiled`` also the ahead-of-time traced forward and backward."""
    utilities = (*BASIC, "test_aot_dispatch_dynamic") if compiled else BASIC
    torch.library.opcheck(op, args, test_utils=utilities)


def spmm_structure(graph: Graph) -> tuple[Tensor, ...]:
    return graph.csr.indptr, graph.csr.index, graph.csc.indptr, graph.csc.index, graph.csc.order


def gradients(
    run: Callable[..., Tensor], inputs: dict[str, Tensor], upstream: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of ``run(**inputs)`` and the gradient of each floating-point input."""
    leaves = {k: v.detach().clone().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    out = run(**leaves)
    wanted = [k for k, v in leaves.items() if v.requires_grad]
    upstream = torch.ones_like(out) if upstream is None else upstream
    return out.detach(), dict(zip(wanted, torch.autograd.grad(out, [leaves[k] for k in wanted], upstream), strict=True))


def assert_unbiased(draw: Callable[[int], dict[str, Tensor]], exact: dict[str, Tensor], num_draws: int = 120) -> None:
    """The mean over seeds of each result lies within the sampling error of its exact value.

    The limit is that of as many normal scores as there are values. A rounding may be off by 2**-15 of a step: 2**-14 of
    the largest value covers that for sums of some hundred terms.
    """
    draws = [draw(seed) for seed in range(num_draws)]
    limit = z_limit(sum(value.numel() for value in exact.values()))
    for name, expected in exact.items():
        samples = torch.stack([d[name].double() for d in draws])
        allowed = limit * samples.std(0) / num_draws**0.5 + 2.0**-14 * expected.abs().max()
        assert_within(samples.mean(0), expected, allowed, torch.float64)
        assert samples.std(0).max() > 0, f"{name} does not depend on the seed"


def assert_inputs_unchanged(run: Callable[..., Tensor], inputs: dict[str, Tensor]) -> None:
    """Forward and backward leave values and versions of their inputs, and of the upstream gradient, alone."""
    before = {name: (t.detach().clone(), t._version) for name, t in inputs.items()}
    out = run(**inputs)
    upstream = torch.randn_like(out)
    kept = upstream.clone()
    out.backward(upstream)
    assert torch.equal(upstream, kept)
    assert upstream._version == 0
    for name, t in inputs.items():
        assert torch.equal(t, before[name][0]), name
        assert t._version == before[name][1], name


def saved_tensors(run: Callable[[], Tensor]) -> list[Tensor]:
    """What autograd keeps for the backward pass."""
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return kept


def shares_memory(t: Tensor, others: list[Tensor]) -> bool:
    pointer = t.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == pointer for other in others if other.numel())
