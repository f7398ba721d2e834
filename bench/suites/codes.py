"""Codes of a few bits in bytes and back, against the same in torch's functions, eager and compiled, and a copy of as
many bytes as the ceiling."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor.exc import InductorError

from qgnn import ops, reference

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import Setting

ROWS, COLUMNS = 20_000, 512
BITS = (3, 4, 7, 11)

Function = Callable[[Tensor], Tensor]


def _work(function: Function, t: Tensor) -> Work:
    return Work(lambda: function(t), lambda: [function(t).double()])


def _compiled(function: Function, t: Tensor) -> Work:
    """Each case by itself: its sizes are no symbols."""
    compiled = torch.compile(function, dynamic=False)
    try:
        compiled(t)
    except InductorError as error:  # before torch 2.12
        raise UnavailableError(f"torch makes no code of it: {str(error).splitlines()[0]}") from error
    return _work(compiled, t)


def _case(name: str, bits: int, t: Tensor, ours: Function, torchs: Function, codes: Tensor, num_bytes: int) -> Case:
    """Providers agree in every bit. The ceiling reads and writes as many bytes, and has nothing to be held to."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=t.device)
    copy = torch.empty_like(source)

    def expected() -> list[Tensor]:
        return [torchs(t).double()]

    providers = [
        Provider(f"qgnn int{bits}", lambda: _work(ours, t), 0.0),
        Provider(f"torch eager int{bits}", lambda: _work(torchs, t), 0.0),
        Provider(f"torch.compile int{bits}", lambda: _compiled(torchs, t), 0.0),
        Provider("ceiling: copy", lambda: Work(lambda: copy.copy_(source), expected), 0.0),
    ]
    return Case("{}x{}/{}/{}".format(*codes.shape, name, bits), "forward", expected, providers, num_bytes)


def cases(setting: Setting) -> Iterator[Case]:
    shape = (round(ROWS * setting.scale), COLUMNS)
    for bits in setting.shapes(*BITS):
        dtype = torch.int8 if bits <= 8 else torch.int16
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=dtype, device=setting.device)
        stored = ops.codes_pack(codes, bits)
        unpack: Any = {"bits": bits, "num_codes": COLUMNS, "signed": True}
        for name, t, ours, torchs in (
            ("pack", codes, partial(ops.codes_pack, bits=bits), partial(reference.codes_pack, bits=bits)),
            ("unpack", stored, partial(ops.codes_unpack, **unpack), partial(reference.codes_unpack, **unpack)),
        ):
            yield _case(name, bits, t, ours, torchs, codes, codes.nbytes + stored.nbytes)
