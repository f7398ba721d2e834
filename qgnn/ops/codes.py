"""``qgnn::codes_pack`` and ``codes_unpack``: codes of 1 to 16 bits in bytes, and back. Codes carry no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.ops._backends import Backend
from qgnn.ops._checks import Signature, may_hold
from qgnn.ops._operator import define
from qgnn.packing import code_dtype, packed_bytes

_BITS = range(1, 17)


def _check_codes(codes: Tensor, bits: int) -> None:
    wanted = (torch.int8, torch.uint8) if bits <= 8 else (torch.int16,)
    if codes.dtype not in wanted:
        raise TypeError(
            f"'qgnn::codes_pack' expects 'codes' of {bits} bits in {' or '.join(map(str, wanted))} (got {codes.dtype})"
        )


def _codes_pack(backend: Backend, codes: Tensor, bits: int) -> Tensor:
    _check_codes(codes, bits)
    return backend.call("codes_pack", "codes.pack", codes, bits=bits, format_name=f"int{bits}")


def _fake_codes_pack(codes: Tensor, bits: int) -> Tensor:
    _check_codes(codes, bits)
    return codes.new_empty((codes.shape[0], packed_bytes(codes.shape[1], bits)), dtype=torch.uint8)


codes_pack = define(
    "codes_pack",
    _codes_pack,
    "(Tensor codes, int bits) -> Tensor",
    _fake_codes_pack,
    Signature({"codes": "R C"}, choices={"bits": _BITS}),
)


def _check_stored(stored: Tensor, bits: int, num_codes: int) -> None:
    if not (may_hold(num_codes >= 0) and may_hold(stored.shape[1] == packed_bytes(num_codes, bits))):
        raise ValueError(
            f"'qgnn::codes_unpack' expects 'stored' to have the ceil(num_codes * bits / 8) bytes of a row (got "
            f"{stored.shape[1]} bytes for {num_codes} codes of {bits} bits)"
        )


def _codes_unpack(backend: Backend, stored: Tensor, bits: int, num_codes: int, signed: bool) -> Tensor:
    _check_stored(stored, bits, num_codes)
    options = {"num_codes": num_codes, "signed": signed, "format_name": f"int{bits}"}
    return backend.call("codes_unpack", "codes.unpack", stored, bits=bits, **options)


def _fake_codes_unpack(stored: Tensor, bits: int, num_codes: int, signed: bool) -> Tensor:
    _check_stored(stored, bits, num_codes)
    return stored.new_empty((stored.shape[0], num_codes), dtype=code_dtype(bits, signed))


codes_unpack = define(
    "codes_unpack",
    _codes_unpack,
    "(Tensor stored, int bits, SymInt num_codes, bool signed) -> Tensor",
    _fake_codes_unpack,
    Signature({"stored": "R B"}, choices={"bits": _BITS}),
)
