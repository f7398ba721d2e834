"""Rows in messages: the codes of the primitives, in as many bytes as are promised, and back."""

import pytest
import torch

from qgnn import reference
from qgnn.distributed._messages import RowFormat
from qgnn.ops._backends import STREAM_PACKED
from qgnn.rng import make_seed

WIDTHS = (1, 7, 32, 33, 130, 256, 300)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_messages_bring_rows_back_within_a_step(bits: int, width: int) -> None:
    x = torch.randn(5, width) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 5.0])[:, None]
    row_format = RowFormat(bits, 128)
    message = row_format.encode(x, make_seed(1))
    assert message.dtype == torch.uint8
    assert message.shape == (5, row_format.num_bytes(width, torch.float32))
    decoded = row_format.decode(message, width, torch.float32)
    levels = 127 if bits == 8 else 2**bits - 1
    span = x.abs().amax(1) if bits == 8 else x.amax(1) - x.amin(1)
    step = (span + 2.0**-7 * x.abs().amax(1)) / levels * (1 + 2.0**-6)  # offsets and steps of blocks are bf16
    assert ((decoded - x).abs() <= step[:, None] * (1 + 1e-5)).all()
    assert torch.equal(decoded[3], torch.zeros(width))
    assert row_format.encode(x[:0], None).shape == (0, message.shape[1])
    assert row_format.decode(message[:0], width, torch.float32).shape == (0, width)


def test_blocks_are_those_of_the_reference() -> None:
    """300 values in blocks of at most 128: three of 100, one behind the other."""
    x, seed = torch.randn(4, 300), make_seed(3)
    packed, low, step = reference.blocks_pack(
        x, bits=4, block_size=100, metadata_dtype=torch.bfloat16, seed=seed, stream=STREAM_PACKED
    )
    message = RowFormat(4, 128).encode(x, seed)
    assert torch.equal(message[:, :150], packed.view(4, 150))
    assert torch.equal(message[:, 150:156].contiguous().view(torch.bfloat16), low.view(4, 3))
    assert torch.equal(message[:, 156:].contiguous().view(torch.bfloat16), step.view(4, 3))


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_what_fills_bytes_widens_no_block(bits: int) -> None:
    """One value of 100 is a block of equal ones; zeros behind it would make it one from 0 to 100."""
    x = torch.full((2, 1), 100.0)
    row_format = RowFormat(bits, 256)
    decoded = row_format.decode(row_format.encode(x, make_seed(0)), 1, torch.float32)
    assert torch.equal(decoded, x)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (1, 1), (5, 1), (1, 5)])
def test_rows_as_they_are_may_be_few_and_narrow(shape: tuple[int, int]) -> None:
    x = torch.randn(shape[0] + 4, 3 * shape[1] + 4)[::2, ::3][: shape[0], : shape[1]]
    row_format = RowFormat(None, 256)
    message = row_format.encode(x, None)
    assert message.shape == (shape[0], 4 * shape[1])
    assert torch.equal(row_format.decode(message, shape[1], torch.float32), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [None, 8, 2])
def test_rows_keep_their_type(dtype: torch.dtype, bits: int | None) -> None:
    x = torch.randn(3, 40).to(dtype)
    row_format = RowFormat(bits, 256)
    message = row_format.encode(x.t().contiguous().t(), None)  # by columns
    assert message.shape == (3, row_format.num_bytes(40, dtype))
    decoded = row_format.decode(message, 40, dtype)
    assert decoded.dtype == dtype
    if bits is None:
        assert torch.equal(decoded, x)
    else:
        assert (decoded - x).abs().max() < (1 if bits == 2 else 0.02) * x.abs().max()


def test_a_value_that_is_not_finite_spoils_its_row_alone() -> None:
    for bits in (8, 4, 2):
        x = torch.randn(3, 64)
        x[1, 5] = torch.inf
        row_format = RowFormat(bits, 256)
        decoded = row_format.decode(row_format.encode(x, make_seed(0)), 64, torch.float32)
        assert not decoded[1].isfinite().all()
        assert decoded[[0, 2]].isfinite().all()
