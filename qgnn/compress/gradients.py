"""GradientAccumulator: the sum of the gradients of micro-batches, in packed codes between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qgnn.compressed_tensor import CompressedTensor
from qgnn.formats import Blocks
from qgnn.functional.blocks import decompress, pack
from qgnn.rng import make_rounding_seed


class GradientAccumulator:
    r"""Accumulates gradients over micro-batches in block-wise codes: 8.5 bits a value in place of fp32's 32.

    Each call of :meth:`accumulate` decodes the sums so far, adds the gradients in fp32, codes the result with
    stochastic rounding and new random numbers, and sets ``p.grad`` to ``None``. The coded sum is that of the gradients
    in the mean: given the codes before, the expectation of the new ones is what was added to,

    .. math:: E[S_t \mid S_{t-1}] = S_{t-1} + g_t .

    Each addition adds a variance of at most :math:`\Delta^2 / 4` to a value, where :math:`\Delta` is the range of its
    block over :math:`2^b - 1`. With 4 bits each error is 17 times as large as with 8, which only gradients stand whose
    micro-batches differ as much.

    Gradients of fewer than ``min_size`` values, of biases and norms, are summed exactly in fp32: codes would save next
    to nothing of the model's memory there, and the error of one value would reach a whole column.

    Random numbers come from torch's generator: ``torch.manual_seed`` governs them.

    Args:
        parameters: Parameters, or their names and them as ``model.named_parameters()`` yields; names are for errors
            and ``state_dict``. Those without a gradient are passed over.
        blocks: Format of the sums, without a projection.
        min_size: Values from which a gradient is coded.

    Raises:
        TypeError: If something in ``parameters`` is no leaf tensor of floats.
        ValueError: If there are no parameters or one occurs twice, or ``blocks`` has a projection.

    Example:
        >>> accumulator = qgnn.compress.GradientAccumulator(model.named_parameters())
        >>> for batch in batches:
        ...     F.cross_entropy(model(batch.x, batch.edge_index), batch.y).backward()
        ...     accumulator.accumulate()
        >>> accumulator.finish(divide_by=len(batches))  # then optimizer.step()
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        blocks: Blocks = Blocks(bits=8, block_size=64),
        min_size: int = 4096,
    ) -> None:
        if not isinstance(blocks, Blocks):
            raise TypeError(f"'GradientAccumulator' expects 'blocks' to be qgnn.formats.Blocks (got {blocks!r})")
        if blocks.projection is not None:
            raise ValueError(
                f"'GradientAccumulator' expects 'blocks' without a projection, whose noise would outweigh the gradient "
                f"(got {blocks}); give projection=None"
            )
        self.blocks, self.min_size = blocks, min_size
        self._parameters: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor | CompressedTensor] = {}
        self.add_parameters(parameters)
        if not self._parameters:
            raise ValueError("'GradientAccumulator' expects 'parameters' (got none)")

    def add_parameters(self, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """More parameters to accumulate the gradients of.

        Args:
            parameters: As the constructor takes them.

        Raises:
            TypeError: If something in ``parameters`` is no leaf tensor of floats.
            ValueError: If a parameter or a name occurs twice.
        """
        for given in parameters:
            name, parameter = given if isinstance(given, tuple) else (str(len(self._parameters)), given)
            if not isinstance(parameter, Tensor) or not parameter.is_leaf or not parameter.is_floating_point():
                raise TypeError(
                    f"'GradientAccumulator' expects 'parameters' to be leaf tensors of a floating-point type (got "
                    f"{_told(parameter)} as '{name}')"
                )
            if name in self._parameters or any(parameter is other for other in self._parameters.values()):
                raise ValueError(f"'GradientAccumulator' expects each parameter once (got '{name}' again)")
            self._parameters[name] = parameter

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(kept.nbytes for kept in self._sums.values())

    def accumulate(self) -> None:
        """Add every ``p.grad`` to its sum and set it to ``None``; after the backward pass of each micro-batch.

        Raises:
            ValueError: If a gradient is sparse, or has another shape or device than those before.
        """
        for name, parameter in self._parameters.items():
            self._take(name, parameter)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within this block the backward pass accumulates each gradient as soon as it is made, so that no two of them
        are there at once; :meth:`accumulate` is not called.

        Example:
            >>> with accumulator.in_backward():
            ...     for batch in batches:
            ...         F.cross_entropy(model(batch.x, batch.edge_index), batch.y).backward()
            >>> accumulator.finish()
        """
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def finish(self, divide_by: float = 1.0) -> None:
        """Set every ``p.grad`` to the sum over the micro-batches, and forget the sums.

        A gradient that is in ``p.grad`` by then is part of the sum: that of the last micro-batch need not be coded.

        Args:
            divide_by: What the sum is divided by: the number of micro-batches, for the mean.

        Raises:
            ValueError: If a gradient is sparse, or has another shape or device than those before.
        """
        for name, parameter in self._parameters.items():  # all of them before the first changes
            self._check(name, parameter.grad)
        for name, parameter in self._parameters.items():
            total = self._sum(name, parameter.grad)
            if total is not None:
                parameter.grad = (total if divide_by == 1.0 else total / divide_by).to(parameter.dtype)
                self._sums.pop(name, None)

    def reset(self) -> None:
        """Forget the sums."""
        self._sums.clear()

    @torch.no_grad()
    def _take(self, name: str, parameter: Tensor) -> None:
        self._check(name, parameter.grad)
        if parameter.grad is None:
            return
        total = self._sum(name, parameter.grad)
        assert total is not None
        parameter.grad = None
        coded = total.numel() >= self.min_size
        self._sums[name] = pack(total.float(), self.blocks, make_rounding_seed(None, total.device)) if coded else total

    def _sum(self, name: str, grad: Tensor | None) -> Tensor | None:
        """The sum with a further gradient, in at least fp32: beside a large sum a half type loses small gradients."""
        kept = self._sums.get(name)
        if kept is None:
            return None if grad is None else grad.detach().to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        total = decompress(kept) if isinstance(kept, CompressedTensor) else kept
        return total if grad is None else total.add_(grad)

    def _check(self, name: str, grad: Tensor | None) -> None:
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise ValueError(
                f"'GradientAccumulator' expects dense gradients (got one of layout {grad.layout} of '{name}'); use "
                f"sparse=False in its embedding"
            )
        kept = self._sums.get(name)
        if kept is None:
            return
        device = kept.packed.device if isinstance(kept, CompressedTensor) else kept.device
        if (kept.shape, device) != (grad.shape, grad.device):
            raise ValueError(
                f"'GradientAccumulator' expects a gradient of '{name}' of shape {list(kept.shape)} on {device}, as "
                f"before (got {list(grad.shape)} on {grad.device}); call 'reset' where the model changes"
            )

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint between micro-batches: plain numbers and tensors."""
        sums: dict[str, Any] = {}
        for name, kept in self._sums.items():
            if isinstance(kept, CompressedTensor):
                sums[name] = {"packed": kept.packed, "low": kept.low, "step": kept.step, "shape": list(kept.shape)}
            else:
                sums[name] = {"sum": kept.clone()}  # which the next gradient is added to in place
        return {"blocks": asdict(self.blocks), "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the sums of another accumulator.

        Args:
            state: As :meth:`state_dict` returns it; tensors are copied to the devices of the parameters.

        Raises:
            ValueError: If the format differs, or it has sums of other parameters or shapes.
        """
        if state["blocks"] != asdict(self.blocks):
            raise ValueError(
                f"'GradientAccumulator' expects a state of {self.blocks} (got {Blocks(**state['blocks'])}); make it "
                f"with the same 'blocks'"
            )
        unknown = sorted(set(state["sums"]) - set(self._parameters))
        if unknown:
            raise ValueError(f"'GradientAccumulator' expects sums of its parameters (got {unknown})")
        self._sums = {name: self._loaded(name, kept) for name, kept in state["sums"].items()}

    def _loaded(self, name: str, kept: dict[str, Any]) -> Tensor | CompressedTensor:
        parameter = self._parameters[name]
        shape, device = kept["sum"].shape if "sum" in kept else torch.Size(kept["shape"]), parameter.device
        if shape != parameter.shape:
            raise ValueError(
                f"'GradientAccumulator' expects a sum of '{name}' of shape {list(parameter.shape)} (got "
                f"{list(shape)}); load the state into an accumulator of the same model"
            )
        if "sum" in kept:
            return kept["sum"].to(device, copy=True)
        packed, low, step = (kept[part].to(device, copy=True) for part in ("packed", "low", "step"))
        blocks = replace(self.blocks, block_size=packed.shape[1] * 8 // self.blocks.bits)
        return CompressedTensor(packed, low, step, blocks, shape, torch.float32)

    def __repr__(self) -> str:
        return f"GradientAccumulator({len(self._parameters)} parameters, {self.blocks}, {self.nbytes} bytes)"


def _told(given: object) -> str:
    return f"{given.dtype}, leaf: {given.is_leaf}" if isinstance(given, Tensor) else type(given).__name__
