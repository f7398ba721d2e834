"""The native product of blocks with shared exponents equals the reference bit for bit, with products of bytes and
without."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu import build, library
from qgnn.kernels.cpu import matmul_shared as cpu_matmul_shared
from qgnn.kernels.cpu.matmul_shared import matmul_shared
from torch import Tensor

from kernel_cases import FLOATS, LAYOUTS, assert_within, far_columns, far_rows, storage_error, surrounded
from qgnn import reference
from shared_cases import BLOCK_SIZES, EXTREMES, SHAPES, assert_equal, operands_of, options_of

EMULATED = Path(__file__).parent / "emulated"
FLAGS = {
    "plain": (),  # for a processor of which nothing is known
    "avx2": ("-mavx2",),
    "vnni": ("-D__AVX512VNNI__", "-Wno-psabi", f"-I{EMULATED}"),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The product for other processors than this one."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("common.h", "matmul_shared.c"):
        shutil.copy(build.SOURCES / name, folder)
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", folder)
        for name, flags in FLAGS.items():
            if name == "avx2" and not torch.cpu._is_avx2_supported():
                continue
            build.compile_library(build.compiler(), ("-fopenmp", "-Werror", *flags), folder / f"{name}.so")
            made[name] = ctypes.CDLL(str(folder / f"{name}.so"))
    return made


@pytest.fixture(params=["native", *FLAGS])
def code(request: pytest.FixtureRequest, libraries: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the codes that the source can become, in memory that is not zero before: as floats it holds NaNs."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: _poison(empty(*args, **kwargs)))
    if request.param != "native":
        if request.param not in libraries:
            pytest.skip(f"this processor has no {request.param}")
        monkeypatch.setattr(library, "_library", libraries[request.param])
        monkeypatch.setattr(library, "_functions", {})
        monkeypatch.setattr(cpu_matmul_shared, "_code_bytes", cpu_matmul_shared._code_bytes.__wrapped__)
    return request.param


def _poison(t: Tensor) -> Tensor:
    t.view(torch.uint8).fill_(255)
    return t


@pytest.mark.parametrize("G", [*BLOCK_SIZES, 1, 5, 24, 128])
@pytest.mark.parametrize(("N", "K", "M"), [*SHAPES, (5, 300, 66), (9, 32, 300)])
def test_matmul_shared_equals_reference(code: str, N: int, K: int, M: int, G: int) -> None:
    o = operands_of(N, K, M, G, bias=K % 2 == 0)
    assert_equal(matmul_shared(*o, **options_of(G)), reference.matmul_shared(*o, **options_of(G)))


@pytest.mark.parametrize("exponents", EXTREMES)
@pytest.mark.parametrize("fraction_bits", [0, 22])
def test_extreme_exponents_equal_reference(code: str, exponents: str, fraction_bits: int) -> None:
    o = operands_of(19, 130, 33, 16, exponents)
    options = options_of(16, fraction_bits=fraction_bits)
    assert_equal(matmul_shared(*o, **options), reference.matmul_shared(*o, **options))


@given(st.data(), st.integers(0, 9), st.integers(0, 70), st.integers(0, 40), st.integers(1, 128))
def test_any_shape(data: st.DataObject, N: int, K: int, M: int, G: int) -> None:
    o = operands_of(N, K, M, G, data.draw(st.sampled_from(list(EXTREMES))), data.draw(st.booleans()))
    options = options_of(G, fraction_bits=data.draw(st.integers(0, 22)))
    assert_equal(matmul_shared(*o, **options), reference.matmul_shared(*o, **options))


@pytest.mark.parametrize("G", [16, 128])
def test_the_largest_dot_products_are_exact(code: str, G: int) -> None:
    o = operands_of(3, 2 * G, 18, G, bias=False)
    o.x_q.fill_(-128)
    o.w_q.fill_(-128)
    o.w_q[1, ::3] = 127
    assert_equal(matmul_shared(*o, **options_of(G)), reference.matmul_shared(*o, **options_of(G)))


def test_poisoned_blocks_stay_in_their_row_and_column(code: str) -> None:
    o = operands_of(20, 40, 34, 16)
    expected = reference.matmul_shared(*o, **options_of(16))
    o.x_exponent[3, 2], o.w_exponent[5, 0] = 255, 255
    expected[3], expected[:, 5] = float("nan"), float("nan")
    assert_equal(matmul_shared(*o, **options_of(16)), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_type_of_result_and_bias(dtype: torch.dtype) -> None:
    o = operands_of(20, 33, 34, 16)
    o = o._replace(bias=o.bias.to(dtype), x_exponent=o.x_exponent.fill_(127), w_exponent=o.w_exponent.fill_(127))
    expected = reference.matmul_shared(*o, **options_of(16))
    out = matmul_shared(*o, **options_of(16, out_dtype=dtype))
    assert out.dtype == dtype
    assert_within(out, expected, storage_error(dtype) * expected.abs() + 2.0**-24)  # fp16 is subnormal below 2^-14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(code: str, layout: str) -> None:
    o, view = operands_of(20, 70, 34, 16), LAYOUTS[layout]
    strided = (*map(view, o[:4]), o.bias.repeat_interleave(2)[::2])
    assert_equal(matmul_shared(*strided, **options_of(16)), matmul_shared(*o, **options_of(16)))


@pytest.mark.parametrize("move", [far_columns, far_rows])
@pytest.mark.parametrize("far", ["x_q", "w_q", "x_exponent", "w_exponent"])
def test_elements_beyond_32_bit_offsets(move: Callable[[Tensor], Tensor], far: str) -> None:
    o = operands_of(3, 32, 2, 16)
    moved = o._replace(**{far: move(getattr(o, far))})
    assert_equal(matmul_shared(*moved, **options_of(16)), matmul_shared(*o, **options_of(16)))


@pytest.mark.parametrize("K", [7, 33, 130])
def test_nothing_outside_a_view_is_used(code: str, K: int) -> None:
    o = operands_of(19, K, 18, 16)
    inside = (*(surrounded(t, 99) for t in o[:4]), o.bias)
    before = [t.clone() for t in inside]
    assert_equal(matmul_shared(*inside, **options_of(16)), reference.matmul_shared(*o, **options_of(16)))
    assert all(torch.equal(a, b) for a, b in zip(inside, before, strict=True))


@pytest.mark.parametrize(("N", "K", "M"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_products_of_nothing(code: str, N: int, K: int, M: int) -> None:
    o = operands_of(N, K, M, 16)
    assert_equal(matmul_shared(*o, **options_of(16)), reference.matmul_shared(*o, **options_of(16)))


@pytest.mark.parametrize("G", [16, 32])
def test_threads_change_nothing(threads: int, code: str, G: int) -> None:
    """Enough rows that both threads are at work at once."""
    o = operands_of(3000, 64, 90, G)
    assert_equal(matmul_shared(*o, **options_of(G)), reference.matmul_shared(*o, **options_of(G)))
