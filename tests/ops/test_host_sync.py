"""No operator waits for the device: it neither reads a value of a tensor nor asks for a size that depends on values.

On a CPU the operators run over the Triton kernels in the interpreter, and what torch is asked for outside of them is
looked at; on a GPU torch itself raises where it would wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from op_arguments import OPERATORS, arguments_of
from qgnn.ops import _backends
from qgnn.ops._checks import Signature

aten = torch.ops.aten
# The first reads a value; the sizes of the other results are values.
WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}


class WaitingError(Exception):
    """What an operator on a GPU would wait for."""


class NoWait(TorchDispatchMode):
    """Raises where a CUDA tensor in the place of an argument would make the host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        sized = (kwargs or {}).get("output_size") is not None
        if by_mask or (func in WAITS and not sized):
            raise WaitingError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_wait(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    run, launching = InterpretedFunction.run, []

    def unwatched(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        launching.append(self)
        try:
            with _disable_current_modes():
                return run(self, *args, **kwargs)
        finally:
            launching.pop()

    def refuse(method: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            if launching:  # the interpreter itself copies to the host
                return method(*args, **kwargs)
            raise WaitingError(f"Tensor.{method.__name__}")

        return refusing

    with monkeypatch.context() as patch, NoWait():
        patch.setattr(InterpretedFunction, "run", unwatched)
        patch.setattr(_backends, "cpu_backend", _backends.triton_backend)
        patch.setattr(Signature, "check_values", lambda *_: None)  # on a GPU a kernel looks at the values
        for name in ("cpu", "numpy", "tolist"):  # no operation that a mode could see, where a tensor is on the CPU
            patch.setattr(Tensor, name, refuse(getattr(Tensor, name)))
        yield


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_do_not_wait(name: str, granularity: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments_of(name).items()}
    if "granularity" in arguments:
        arguments["granularity"] = granularity
    overload = getattr(torch.ops.qgnn, name).default
    values = [arguments[argument.name] for argument in overload._schema.arguments]
    overload(*values)  # compiles kernels
    # Of new tensors, nothing is remembered: their values are looked at again, and plans are made.
    values = [value.clone() if isinstance(value, Tensor) else value for value in values]
    with no_wait(device, monkeypatch):
        # A mode that looks at an operator does not see into it: on a CPU the call goes past it.
        overload(*values) if device == "cuda" else overload.redispatch(DispatchKeySet(DispatchKey.CPU), *values)


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.max().item(),
        lambda t: bool((t > 0).any()),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.unique(),
        lambda t: torch.repeat_interleave(t.long()),
        lambda t: t.cpu(),
    ],
)
def test_waiting_would_be_seen(wait: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WaitingError), no_wait("cpu", monkeypatch):
        wait(torch.arange(3.0))
