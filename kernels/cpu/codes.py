"""Codes of 1 to 16 bits in bytes and back, in C.

Numerics: integers alone. Eight codes of up to 8 bits are a 64-bit word, whose lanes are pushed together in three steps;
those of wider ones are two words. Each code is read and each byte written once.

Oracle: qgnn.reference.codes_pack, codes_unpack
"""

import torch
from qgnn.kernels.cpu.library import launch
from torch import Tensor


def codes_pack(codes: Tensor, *, bits: int) -> Tensor:
    """Bytes ``[R, ceil(C * bits / 8)]`` of codes ``[R, C]``: int8 or uint8 up to 8 bits, int16 above."""
    R, C = codes.shape
    stored = torch.empty((R, -(-C * bits // 8)), dtype=torch.uint8)
    launch("qgnn_codes_pack", stored, codes.contiguous(), R, C, bits)
    return stored


def codes_unpack(stored: Tensor, *, bits: int, num_codes: int, signed: bool) -> Tensor:
    """Codes ``[R, num_codes]``: int8 or uint8 up to 8 bits, above int16, or int32 without a sign."""
    R = stored.shape[0]
    narrow, wide = (torch.int8, torch.int16) if signed else (torch.uint8, torch.int32)
    codes = torch.empty((R, num_codes), dtype=narrow if bits <= 8 else wide)
    launch("qgnn_codes_unpack", codes, stored.contiguous(), R, num_codes, bits, int(signed))
    return codes
