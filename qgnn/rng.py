"""Seeds, and the counter-based random bits that stochastic rounding uses.

No generator state is kept anywhere: the random bits of an element are a hash of its position and a 64-bit seed, so the
Triton kernels, the C code and this module produce the same bits and can be compared with ``torch.equal``.

Two neighboring columns share one 32-bit hash. For element ``(row, col)`` of a matrix with ``F`` columns::

    P    = max(2, next power of two of F)
    pair = row * (P / 2) + (col >> 1)                  64 bits, split into lo and hi
    k0   = seed.lo + hi * 0x9E3779B9
    k1   = seed.hi ^ (hi * 0x85EBCA6B)
    h    = lo * 0x9E3779B9 + k0;  h ^= h >> 16;  h *= 0x7FEB352D
    h   ^= (h >> 15) ^ k1;        h *= 0x846CA68B;  h ^= h >> 16

The low 16 bits serve the even column, the high 16 bits the odd one. All of it is arithmetic modulo 2**32; int32 tensors
wrap in the same way, which keeps this twin at 32 bits an element.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

_U64 = (1 << 64) - 1
_STREAM_STEP = 0x5BF0363585EBCA6B

if sys.byteorder != "little":  # random_bits16 reads the two halves of a hash in memory order
    raise ImportError("qgnn needs a little-endian machine")


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of the low ``bits`` bits of ``value``."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_WEYL = _signed(0x9E3779B9, 32)
_HIGH = _signed(0x85EBCA6B, 32)
_MIX_1 = _signed(0x7FEB352D, 32)
_MIX_2 = _signed(0x846CA68B, 32)


def splitmix64(value: int) -> int:
    """Whiten a 64-bit integer (one step of SplitMix64). Unsigned in, unsigned out.

    Consecutive raw seeds give visibly correlated hashes; whitened ones do not.
    """
    z = (value + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def derive_seed(*numbers: int) -> int:
    """The seed of what these integers name, unsigned and of 64 bits: independent ones for different integers."""
    seed = 0
    for number in numbers:
        seed = splitmix64(seed ^ splitmix64(number & _U64))
    return seed


def stream_key(stream: int) -> int:
    """The signed 64-bit key that is XORed into a seed to get its independent stream number ``stream``."""
    return _signed(stream * _STREAM_STEP, 64)


def make_seed(
    seed: int | Tensor | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The seed of one op call as an int64 tensor of shape ``[1]`` on ``device``.

    Args:
        seed: An int is whitened by :func:`splitmix64`. ``None`` draws from torch's default generator of the device, so
            that ``torch.manual_seed`` governs everything. A tensor is taken as it is (no synchronization, capturable in
            a CUDA graph) and should hold well-mixed bits, as another call of this function returns.
        device: Where the seed is needed.
        generator: What ``None`` draws from in place of the default generator.

    Raises:
        TypeError: If ``seed`` is neither an int, an int64 tensor with one element, nor ``None``.
    """
    if seed is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"'seed' expects an int64 tensor with one element (got {seed.dtype} of shape {tuple(seed.shape)}); "
                f"make one with 'qgnn.rng.make_seed(number, device)'"
            )
        return seed.reshape(1).to(device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"'seed' expects an int, an int64 tensor or None (got {type(seed).__name__})")
    # Filled on the device: a copy from the host would wait for it.
    return torch.full((1,), _signed(splitmix64(seed & _U64), 64), dtype=torch.int64, device=device)


_rounding_generator: torch.Generator | None = None


@contextlib.contextmanager
def rounding_from(generator: torch.Generator) -> Iterator[None]:
    """Within the block, seeds of rounding that nobody gave come from ``generator``, not from torch's default one.

    Everything else that is random, dropout above all, is then the same whatever is rounded: runs in several formats
    differ by their formats alone. :func:`qgnn.compress_activations` has a generator of its own. Eager code only: within
    the block compiled functions that round raise, since they cannot take a generator.

    Args:
        generator: Of the device that is computed on.

    Raises:
        TypeError: If it is no :class:`torch.Generator`.

    Example:
        >>> with qgnn.rng.rounding_from(torch.Generator().manual_seed(1)):
        ...     train(model)
    """
    global _rounding_generator
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"'rounding_from' expects a torch.Generator (got {type(generator).__name__})")
    before, _rounding_generator = _rounding_generator, generator
    try:
        yield
    finally:
        _rounding_generator = before


def make_rounding_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """:func:`make_seed` for stochastic rounding, which :func:`rounding_from` rules."""
    return make_seed(seed, device, _rounding_generator)


def _xor_shift(h: Tensor, shift: int) -> Tensor:
    """``h ^= h >> shift`` in place, with the logical shift that int32 tensors lack."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _finalize(h: Tensor, k1: Tensor) -> Tensor:
    """The mixing rounds after the Weyl step, in place on an int32 tensor."""
    _xor_shift(h, 16).mul_(_MIX_1)
    _xor_shift(h, 15).bitwise_xor_(k1).mul_(_MIX_2)
    return _xor_shift(h, 16)


def _keys(high: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """``(k0, k1)`` of the high counter words, int32."""
    k0 = high * _WEYL + seed.to(torch.int32)
    k1 = (high * _HIGH).bitwise_xor_((seed >> 32).to(torch.int32))
    return k0, k1


def counter_hash(pair: Tensor, seed: Tensor) -> Tensor:
    """The 32-bit hash of 64-bit counters.

    Args:
        pair: Counters, int64, any shape.
        seed: The effective seed, int64 ``[1]`` (stream key already applied).

    Shapes:
        - **output:** int32, the shape of ``pair``; read it modulo 2**32.
    """
    k0, k1 = _keys((pair >> 32).to(torch.int32), seed)
    return _finalize(pair.to(torch.int32) * _WEYL + k0, k1)


def random_bits16(first_row: int, num_rows: int, num_columns: int, seed: Tensor) -> Tensor:
    """The 16 random bits of each element of rows ``first_row, first_row + 1, ...`` of a matrix.

    Args:
        first_row: Index of the first row within the whole matrix.
        num_rows: Number of rows ``R``.
        num_columns: Width ``F`` of the matrix.
        seed: The effective seed, int64 ``[1]``.

    Shapes:
        - **output:** int32 ``[R, F]``, values from 0 to 65535.
    """
    if num_rows == 0 or num_columns == 0:
        return torch.empty((num_rows, num_columns), dtype=torch.int32, device=seed.device)
    pairs_per_row = max(2, 1 << (num_columns - 1).bit_length()) // 2
    base = torch.arange(first_row, first_row + num_rows, device=seed.device) * pairs_per_row
    column = torch.arange((num_columns + 1) // 2, dtype=torch.int32, device=seed.device)
    # pairs_per_row is a power of two above the column index, so the column never carries into the high word.
    k0, k1 = _keys((base >> 32).to(torch.int32), seed)
    h = (base.to(torch.int32) * _WEYL + k0)[:, None] + (column * _WEYL)[None, :]
    return _finalize(h, k1[:, None]).view(torch.uint16).to(torch.int32)[:, :num_columns]
