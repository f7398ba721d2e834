"""Codes of a few bits, for the tests of what packs them."""

import torch
from torch import Tensor


def codes_of(bits: int, num_rows: int, num_codes: int) -> Tensor:
    """Random ones of all values that so many bits have, in the type that they are packed from."""
    dtype = torch.int8 if bits <= 8 else torch.int16
    return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (num_rows, num_codes), dtype=dtype)
