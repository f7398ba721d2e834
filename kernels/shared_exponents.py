"""What every backend's product of blocks with shared exponents requires of its operands."""

from torch import Tensor

MAX_BLOCK_SIZE = 128  # 128 * 128 * 128 = 2**21: the dot product of a block is exact in fp32
MAX_FRACTION_BITS = 22  # 2**(0 - 127 - 22) is the smallest number of fp32


def check_shared(
    x_q: Tensor, x_exponent: Tensor, w_q: Tensor, w_exponent: Tensor, block_size: int, fraction_bits: int
) -> None:
    """Raise if exponents do not belong to the codes: kernels find them by address.

    Raises:
        ValueError: If a size does not fit, or a number is beyond what the kernels compute exactly.
    """
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"'matmul_shared' expects a 'block_size' from 1 to {MAX_BLOCK_SIZE} (got {block_size}); use 'matmul' for "
            f"rows with one scale each"
        )
    if not 0 <= fraction_bits <= MAX_FRACTION_BITS:
        raise ValueError(
            f"'matmul_shared' expects 'fraction_bits' from 0 to {MAX_FRACTION_BITS} (got {fraction_bits}); give "
            f"the sum of both formats'"
        )
    K = x_q.shape[1]
    if w_q.shape[1] != K:
        raise ValueError(f"'matmul_shared' expects 'w_q' with {K} columns, as 'x_q' has (got {w_q.shape[1]})")
    num_blocks = -(-K // block_size)
    for name, codes, exponent in (("x", x_q, x_exponent), ("w", w_q, w_exponent)):
        expected = (codes.shape[0], num_blocks)
        if tuple(exponent.shape) != expected:
            raise ValueError(
                f"'matmul_shared' expects '{name}_exponent' of shape {expected}, an exponent for every {block_size} "
                f"columns of '{name}_q' (got {tuple(exponent.shape)})"
            )
