import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from qgnn.kernels import matmul_shared, quantize_grid, tuning

from grid_cases import INTEGERS
from qgnn import rounding

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
                *filter(None, [tuning.quantize_matmul(width, other), tuning.quantize_matmul_requantize(width, other)]),
            ]
            gathers = [tuning.spmm_rows(width, other), tuning.sddmm(width, other), tuning.spmm_extremum(width, other)]
            hubs = [tuning.spmm_hubs(width, False), tuning.spmm_extremum_hubs(width)]
            rows = [f(width) for f in (tuning.quantize, tuning.quantize_grad, tuning.activation, tuning.codes)]
            by_head = [
                tuning.attention(other, width, hubs=hubs, tiles=tiles) for hubs in (False, True) for tiles in (1, 2)
            ]
            for config in (*products, *gathers, *hubs, *rows, *by_head, tuning.add_partials(width, other)):
                tiles = [size for name, size in config.items() if name.startswith(("BLOCK", "ROWS"))]
                assert all(size & (size - 1) == 0 for size in tiles)
                assert config["num_warps"] in (1, 2, 4, 8)
            assert all(config["BLOCK_M"] >= 16 and config["BLOCK_K"] >= 16 for config in products)


def test_requantizing_kernels_hold_whole_rows() -> None:
    for width in WIDTHS:
        config = tuning.quantize_matmul_requantize(64, width)
        assert config is None or config["BLOCK_M"] >= width
        if width <= tuning.REQUANTIZE_MAX_OUTPUTS:
            assert tuning.matmul_requantize(64, width)["BLOCK_M"] >= width
        if width <= tuning.SPMM_REQUANTIZE_MAX_COLUMNS:
            assert tuning.spmm_rows(width, 9)["BLOCK_F"] >= width
            assert tuning.spmm_hubs(width, True)["BLOCK_F"] >= width
            on_tensor_cores, block_f = tuning.spmm_strategy(width, torch.int8, whole_rows=True)
            assert block_f >= width * on_tensor_cores


def test_fused_products_hold_whole_rows_and_what_every_gpu_has() -> None:
    """Operands in shared memory: 99 KiB is what the smallest of the supported GPUs gives one program."""
    for width in WIDTHS:
        for other in WIDTHS:
            fused = tuning.quantize_matmul(width, other), tuning.quantize_matmul_requantize(width, other)
            assert (fused[0] is not None) == (width <= 512)
            assert (fused[1] is not None) == (width <= 512 and other <= (256 if width <= 256 else 128))
            for config in filter(None, fused):
                assert config["BLOCK_K"] >= width
                assert config["BLOCK_K"] * (config["BLOCK_N"] + config["BLOCK_M"]) <= 99 * 1024


def test_gradients_are_held_in_whole_rows() -> None:
    for width in WIDTHS:
        assert tuning.quantize_grad(width)["BLOCK_F"] >= width
        assert tuning.quantize_grad(width)["BLOCK_F"] % 8 == 0
        assert tuning.activation(width)["BLOCK_F"] % 8 == 0


def test_attention_holds_whole_heads_in_one_warp_if_it_can() -> None:
    for width in WIDTHS:
        for tiles in (1, 2):
            config = tuning.attention(4, width, tiles=tiles)
            elements = config["BLOCK_E"] * config["BLOCK_H"] * config["BLOCK_D"]
            assert config["BLOCK_D"] >= width
            assert tiles * elements <= 1024 * config["num_warps"]
            assert config["num_warps"] == 1 or width > 512


@pytest.mark.parametrize("block_n", [1, 32, 256])
def test_partial_sums_are_few_beside_a_large_gradient(block_n: int) -> None:
    for num_rows in (20_000, 169_343, 2_449_029, 100_000_000):
        programs = -(-num_rows // (tuning.quantize_grad_tiles(num_rows, block_n) * block_n))
        assert 2 * 4 * programs <= 0.03 * num_rows * (2 + 1)  # written and read, beside bf16 and its codes
        assert 64 <= programs <= 1056
    assert tuning.quantize_grad_tiles(1, block_n) == 1


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


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("has_edges", [False, True])
def test_a_thread_holds_all_parts_of_its_bytes(bits: int, itemsize: int, has_edges: bool) -> None:
    """... since the bytes of a tile give each thread a vector of 16 bytes of values; and it holds at most 64 values."""
    parts = 8 // bits
    for block_size in (8, 24, 64, 128, 1000, 1024, 4096, 8192, 8200, 16384, 16392, 65536):
        config = tuning.blocks_pack(block_size, bits, itemsize, has_edges)
        num_bytes, threads = config["BLOCK_B"] * config["BLOCK_R"], 32 * config["num_warps"]
        assert num_bytes & (num_bytes - 1) == 0
        assert num_bytes >= threads * 16 // itemsize
        assert num_bytes * parts <= threads * (64 if parts * 16 // itemsize == 64 else 32)
        longest = 8192 if has_edges else 16384
        assert (config["BLOCK_R"] * parts >= block_size) == (block_size <= longest)
        assert config["num_warps"] <= 16  # at least 128 registers a thread
        config = tuning.blocks_unpack(block_size, bits, itemsize)
        assert config["BLOCK_B"] * config["BLOCK_R"] >= 128 * 16 // itemsize


def test_projections_fit_shared_memory() -> None:
    """A tile of the matrix in each of three stages, and one of signs, in 99 KiB."""
    for width in WIDTHS:
        for projection in (1, 8, 16, 40, 64, 1000):
            config = tuning.blocks_project(width, projection)
            assert 4 * config["BLOCK_K"] * (3 * config["BLOCK_N"] + config["BLOCK_R"]) <= 99 * 1024
            assert config["BLOCK_K"] >= 16
            assert config["BLOCK_R"] >= 8
            config = tuning.blocks_unproject(width, projection)
            assert config["BLOCK_R"] >= 8
            assert config["BLOCK_N"] * config["BLOCK_F"] <= 64 * 128


def test_sizes_of_a_batch_are_no_part_of_a_compiled_kernel() -> None:
    """Each value that is specialized on means another compilation when a sampled batch brings another one. What is left
    belongs to the model: strides within a row, factors, the size of a weight."""
    of_the_model = re.compile(r"stride_\w+|(\w+_)?(factor|slope)|SIZE")
    kernels = 0
    for path in sorted(Path(tuning.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            general = ast.unparse(node.decorator_list[0])
            values = [arg.arg for arg in node.args.args if arg.annotation is None and not arg.arg.endswith("_ptr")]
            special = [name for name in values if repr(name) not in general and not of_the_model.fullmatch(name)]
            assert special == [], f"{path.name}: {node.name} compiles anew for each value of {special}"
            kernels += 1
    assert kernels > 30


class _Recorder:
    """In place of a kernel: what it would be launched with."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self.launches.append(arguments)


def _variants(kernel: str, module: ModuleType, launches: list[dict[str, Any]]) -> int:
    """How many different kernels Triton compiles for these launches: one for each set of constants, of types, and of
    what it looks for in other values, 1 and multiples of 16."""
    (node,) = (node for node in ast.walk(ast.parse(inspect.getsource(module))) if getattr(node, "name", "") == kernel)
    general, _, unaligned = ast.unparse(node.decorator_list[0]).partition("do_not_specialize_on_alignment")
    constants = {arg.arg for arg in node.args.args if arg.annotation is not None}

    def seen(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        if name in constants or not isinstance(value, int):
            return value
        if repr(name) in general:
            return None
        return value == 1, value % 16 == 0 and repr(name) not in unaligned

    return len({tuple((name, seen(name, value)) for name, value in launch.items()) for launch in launches})


@pytest.mark.parametrize("widths", [(1008, 912, 768), (2032, 1792, 1040), (40_960, 40_000, 40_016)], ids=str)
@pytest.mark.parametrize("name", ["msfp12", "fixed8"])
@pytest.mark.parametrize("seed", [None, torch.tensor([3])], ids=["nearest", "stochastic"])
def test_numbers_of_nodes_give_at_most_two_kernels(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], name: str, seed: torch.Tensor | None
) -> None:
    """One for multiples of 16, one for all others. Blocks of the operands of a weight's gradient lie along the nodes of
    a batch; they are read in columns too. Rows of at most 1024 values may be features: one for each power of two."""
    rounding, product = _Recorder(), _Recorder()
    monkeypatch.setattr(quantize_grid, "_quantize_grid_kernel", rounding)
    monkeypatch.setattr(matmul_shared, "_matmul_shared_kernel", product)
    grid = INTEGERS[name]
    kinds: dict[str, list[dict[str, Any]]] = {}
    numbers = [width - less for width in widths for less in (0, 1, 2, 3, 4, 6, 8, 12)]
    for N in numbers:
        for layout, x in {"rows": torch.zeros(3, N), "columns": torch.zeros(N, 3).t()}.items():
            rounding.launches.clear()
            codes, exponent = quantize_grid.quantize_shared(x, grid, seed=seed)
            quantize_grid.quantize_dequantize(x, grid, seed=seed)
            kinds.setdefault(f"{layout} to codes", []).append(rounding.launches[0])
            kinds.setdefault(f"{layout} to values", []).append(rounding.launches[1])
        if name == "msfp12":
            matmul_shared.matmul_shared(codes, exponent, codes, exponent, block_size=16, fraction_bits=6)
    for kind, launches in kinds.items():
        assert len(launches) == len(numbers)
        bound = 5 if "rows" in kind and max(widths) <= 1024 else 2
        assert _variants("_quantize_grid_kernel", quantize_grid, launches) <= bound, kind
    assert _variants("_matmul_shared_kernel", matmul_shared, product.launches) <= 2


def test_kernels_and_operators_have_one_bound_of_int32_sums() -> None:
    """Kernels import nothing of the package above them."""
    assert tuning.MAX_INT32_TERMS == rounding.MAX_INT32_TERMS
    assert tuning.MAX_INT32_TERMS * 128**2 < 2**31 <= (tuning.MAX_INT32_TERMS + 1) * 128**2
