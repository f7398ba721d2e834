import pytest
import torch
from qgnn.kernels import tuning

WIDTHS = [1, 2, 7, 16, 33, 128, 130, 256, 257, 602, 1024, 1025, 4096]


def test_configurations_depend_on_buckets_of_sizes_only() -> None:
    assert tuning.quantize(65) == tuning.quantize(128)
    assert tuning.matmul(65, 33) == tuning.matmul(128, 64)
    assert tuning.spmm_rows(65, 8) == tuning.spmm_rows(128, 13)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_tiles_are_powers_of_two_that_the_hardware_takes(arch: int) -> None:
    for width in WIDTHS:
        for other in WIDTHS:
            products = [
                tuning.matmul(width, other),
                tuning.matmul_requantize(width, min(other, tuning.REQUANTIZE_MAX_OUTPUTS)),
                tuning.matmul_dw(width, other, arch),
            ]
            gathers = [tuning.spmm_rows(width, other), tuning.sddmm(width, other), tuning.spmm_extremum(width, other)]
            hubs = [tuning.spmm_hubs(width, False), tuning.spmm_extremum_hubs(width)]
            for config in (*products, *gathers, *hubs, tuning.quantize(width)):
                tiles = [size for name, size in config.items() if name.startswith(("BLOCK", "ROWS"))]
                assert all(size & (size - 1) == 0 for size in tiles)
                assert config["num_warps"] in (1, 2, 4, 8)
            assert all(config["BLOCK_M"] >= 16 and config["BLOCK_K"] >= 16 for config in products)


def test_requantizing_kernels_hold_whole_rows() -> None:
    for width in WIDTHS:
        if width <= tuning.REQUANTIZE_MAX_OUTPUTS:
            assert tuning.matmul_requantize(64, width)["BLOCK_M"] >= width
        if width <= tuning.SPMM_REQUANTIZE_MAX_COLUMNS:
            assert tuning.spmm_rows(width, 9)["BLOCK_F"] >= width
            assert tuning.spmm_hubs(width, True)["BLOCK_F"] >= width
            on_tensor_cores, block_f = tuning.spmm_strategy(width, torch.int8, whole_rows=True)
            assert block_f >= width * on_tensor_cores


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 511, 512, 4097, 169_343, 100_000_000])
@pytest.mark.parametrize("num_tiles", [1, 3, 264, 1000])
def test_splits_cover_all_rows_without_empty_ones(num_rows: int, num_tiles: int) -> None:
    splits, rows = tuning.dw_splits(num_rows, num_tiles, 64)
    assert rows % 64 == 0
    assert (splits - 1) * rows < num_rows <= splits * rows
    assert splits * num_tiles <= max(264, num_tiles)


def test_cpu_tensors_get_the_configuration_of_one_architecture() -> None:
    assert tuning.architecture(torch.device("cpu")) == 90


@pytest.mark.parametrize(
    ("width", "heads", "block_f"),
    [
        *[(31, 1, 0), (32, 1, 32), (33, 1, 64), (100, 1, 128), (256, 1, 256), (300, 1, 128), (512, 1, 256)],
        *[(64, 2, 32), (256, 2, 128), (1024, 2, 256), (96, 2, 0), (192, 2, 32), (40, 5, 0), (32, 2, 0), (602, 1, 128)],
    ],
)
def test_codes_of_32_columns_a_head_are_summed_on_tensor_cores(width: int, heads: int, block_f: int) -> None:
    strategy = tuning.spmm_strategy(width, torch.int8, heads=heads, code_bytes=100, l2_bytes=1000)
    assert strategy == (block_f > 0, block_f)
    assert not tuning.spmm_strategy(width, torch.float32, heads=heads).on_tensor_cores


def test_codes_beyond_half_of_the_cache_are_summed_in_slices_of_128_columns() -> None:
    for code_bytes, block_f in [(500, 256), (501, 128)]:
        assert tuning.spmm_strategy(256, torch.int8, code_bytes=code_bytes, l2_bytes=1000).block_f == block_f
    assert tuning.spmm_strategy(256, torch.int8, whole_rows=True, code_bytes=501, l2_bytes=1000).block_f == 256


def test_a_slice_of_a_head_divides_it() -> None:
    for width in range(32, 600, 32):
        assert width % tuning.spmm_strategy(3 * width, torch.int8, heads=3, l2_bytes=1000).block_f == 0


def test_masks_are_made_of_whole_bytes() -> None:
    assert all(tuning.spmm_rows(width, 3, has_mask=True)["BLOCK_F"] % 8 == 0 for width in WIDTHS)
