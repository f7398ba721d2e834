"""Random projections in Triton: products within a bound of float64, and blocks equal to those of the projection."""

from typing import Any

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.blocks import blocks_pack, blocks_unpack
from qgnn.kernels.blocks_project import blocks_project, fits_tile
from torch import Tensor

from block_cases import EDGES, assert_same
from kernel_cases import FLOATS, LAYOUTS, UNIT, assert_within, far_columns, quiet, storage_error, surrounded
from qgnn import reference, rng
from qgnn.reference.blocks import projection_signs, row_signs

pytestmark = quiet


def signs_of(projection: int, device: str, number: int = 5) -> dict[str, Any]:
    return {"projection": projection, "projection_seed": rng.make_seed(number, device), "projection_stream": 3}


def matrix_of(num_columns: int, signs: dict[str, Any]) -> Tensor:
    return projection_signs(num_columns, *signs.values()).double() / signs["projection"] ** 0.5


def own_signs(shape: tuple[int, int], signs: dict[str, Any], first_row: int = 0) -> Tensor:
    return row_signs(first_row, *shape, signs["projection_seed"], signs["projection_stream"]).double()


def product_bound(x: Tensor, num_terms: int, projection: int) -> Tensor:
    """Of each of twice as many additions in a tensor core a unit is cut off, not rounded: 2 UNIT; of each fp32 factor
    6 UNIT in its last part; the scale and the product by it: 2 UNIT."""
    return (4 * num_terms + 8) * UNIT * x.double().abs().sum(1, keepdim=True) / projection**0.5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("F", "projection"), [(1, 8), (33, 16), (130, 64), (70, 100), (7, 1)])
def test_projection_is_within_its_bound(device: str, dtype: torch.dtype, F: int, projection: int) -> None:
    x, signs = (torch.randn(70, F, device=device) * 3).to(dtype), signs_of(projection, device)
    exact = (x.double() * own_signs((70, F), signs)) @ matrix_of(F, signs)
    assert_within(blocks_project(x, **signs), exact, product_bound(x, F, projection))


FUSED = [(8, 32), (16, 128), (16, 8), (32, 16), (64, 2048), (16, 1024)]  # columns of the projection, values of a block


@pytest.mark.parametrize(("projection", "block_size"), [*FUSED, (24, 48), (12, 8), (16, 24), (8, 1024)])
@pytest.mark.parametrize("bits", [2, 8])
def test_blocks_are_those_of_the_projection(device: str, projection: int, block_size: int, bits: int) -> None:
    """... that the same backend makes, whether a kernel packs what it makes or another one."""
    config = tuning.blocks_project(33, projection)
    assert fits_tile(config, projection, block_size) == ((projection, block_size) in FUSED)
    x, signs = torch.randn(131, 33, device=device), signs_of(projection, device)
    options = {"bits": bits, "block_size": block_size, "seed": rng.make_seed(2, device), "stream": 1}
    made = blocks_project(x, **signs)
    blocks = blocks_pack(x, **options, **signs)
    assert_same(blocks, blocks_pack(made, **options))
    assert_same(blocks, reference.blocks_pack(made, **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("metadata_dtype", [torch.float32, torch.float16])
def test_every_type_and_given_edges(device: str, dtype: torch.dtype, metadata_dtype: torch.dtype) -> None:
    x, signs = torch.randn(70, 40, device=device).to(dtype), signs_of(16, device)
    options = {"bits": 2, "block_size": 64, "metadata_dtype": metadata_dtype, "edges": EDGES[2].to(device)}
    assert_same(blocks_pack(x, **options, **signs), reference.blocks_pack(blocks_project(x, **signs), **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("F", "projection", "block_size", "bits", "first_row"),
    [(1, 8, 32, 2, 0), (33, 16, 128, 1, 9), (130, 64, 24, 4, 0), (150, 100, 1000, 8, 1 << 31), (7, 1, 8, 1, 3)],
)
def test_unpacking_multiplies_back(
    device: str, dtype: torch.dtype, F: int, projection: int, block_size: int, bits: int, first_row: int
) -> None:
    N, signs = 70, signs_of(projection, device)
    values = torch.randn(N, projection, device=device)
    edges = EDGES[bits].to(device) if bits < 8 else None
    blocks = reference.blocks_pack(values, bits=bits, block_size=block_size, edges=edges)
    values = reference.blocks_unpack(*blocks, bits=bits, size=N * projection, edges=edges).view(N, projection)
    options = {"bits": bits, "size": N * projection, "dtype": dtype, "edges": edges, "num_columns": F, **signs}
    restored = blocks_unpack(*blocks, first_row=first_row, **options)
    exact = values.double() @ matrix_of(F, signs).t() * own_signs((N, F), signs, first_row)
    bound = product_bound(values, projection, projection)
    assert restored.dtype == dtype
    assert_within(restored, exact, bound + storage_error(dtype) * (exact.abs() + bound) + 2.0**-24)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_read_in_place(device: str, layout: str) -> None:
    x, signs = torch.randn(19, 33, device=device), signs_of(16, device)
    assert torch.equal(blocks_project(LAYOUTS[layout](x), **signs), blocks_project(x, **signs))


def test_columns_beyond_32_bit_offsets(device: str) -> None:
    x, signs = torch.randn(2, 5, device=device).half(), signs_of(16, device)
    assert torch.equal(blocks_project(far_columns(x), **signs), blocks_project(x, **signs))


def test_nothing_outside_is_read_and_rows_do_not_mix(device: str) -> None:
    x, signs = torch.randn(67, 33, device=device), signs_of(16, device)
    options = {"bits": 2, "block_size": 16, "seed": rng.make_seed(2, device), **signs}
    clean = blocks_pack(x, **options)
    assert_same(blocks_pack(surrounded(x, float("nan")), **options), clean)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[41, 7] = bad
        packed, low, step = blocks_pack(broken, **options)
        assert low.isnan().nonzero().tolist() == step.isnan().nonzero().tolist() == [[41]]
        others = torch.arange(67, device=device) != 41
        assert_same([packed[others], low[others]], [clean[0][others], clean[1][others]])
        assert not packed[41].any()
        restored = blocks_unpack(packed, low, step, bits=2, size=67 * 16, num_columns=33, **signs)
        assert restored.isnan().all(1).tolist() == (~others).tolist()


def test_rows_that_are_not_there_do_not_widen_the_last_block(device: str) -> None:
    """Rows that are the sum of the columns of signs: their projection is about the root of their length, far from 0."""
    signs = signs_of(8, device)
    x = ((matrix_of(200, signs).sum(1) * 8**0.5) * own_signs((3, 200), signs)).float()
    made = blocks_project(x, **signs)
    assert made.min() > 20
    options = {"bits": 2, "block_size": 64}
    blocks = blocks_pack(x, **options, **signs)
    assert blocks[1] == made.min()
    assert_same(blocks, reference.blocks_pack(made, **options))


def test_empty_matrices(device: str) -> None:
    signs = signs_of(16, device)
    for shape in ((0, 5), (5, 0)):
        x = torch.randn(shape, device=device)
        blocks = blocks_pack(x, bits=2, block_size=16, **signs)
        assert_same(blocks, reference.blocks_pack(x, bits=2, block_size=16, **signs))
        restored = blocks_unpack(*blocks, bits=2, size=shape[0] * 16, num_columns=shape[1], **signs)
        assert restored.shape == shape


def test_seeds_and_streams_change_signs(device: str) -> None:
    x, signs = torch.randn(9, 33, device=device), signs_of(16, device)
    made = blocks_project(x, **signs)
    assert not torch.equal(made, blocks_project(x, **signs_of(16, device, 6)))
    assert not torch.equal(made, blocks_project(x, **signs | {"projection_stream": 4}))
