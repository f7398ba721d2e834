"""``qgnn::codes_pack`` and ``codes_unpack``: registration, backends and trace."""

import pytest
import torch

import qgnn
from code_cases import codes_of
from op_checks import opcheck
from qgnn import ops
from qgnn.ops import _backends
from qgnn.ops.codes import _codes_pack, _codes_unpack


@pytest.mark.parametrize("bits", [1, 5, 8, 11])
def test_codes_opcheck(bits: int) -> None:
    codes = codes_of(bits, 5, 33)
    opcheck(ops.codes_pack, (codes, bits), compiled=True)
    for signed in (False, True):
        opcheck(ops.codes_unpack, (ops.codes_pack(codes, bits), bits, 33, signed), compiled=True)


@pytest.mark.parametrize("bits", range(1, 17))
def test_backends_agree(bits: int, device: str) -> None:
    codes = codes_of(bits, 5, 33)
    stored = ops.codes_pack(codes, bits)
    for backend in (_backends.torch_backend(), _backends.triton_backend()):
        assert torch.equal(_codes_pack(backend, codes.to(device), bits).cpu(), stored)
        unpacked = _codes_unpack(backend, stored.to(device), bits, 33, True)
        assert torch.equal(unpacked.cpu(), ops.codes_unpack(stored, bits, 33, True))


def test_sizes_that_depend_on_data_compile() -> None:
    """What is packed of them is unpacked again, without a guard."""

    @torch.compile(fullgraph=True)
    def there_and_back(codes: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        rows = codes[keep]
        return ops.codes_unpack(ops.codes_pack(rows, 3), 3, rows.shape[1], True), ops.codes_pack(rows.t(), 3)

    codes = codes_of(3, 6, 40)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for kept in (2, 5):
            keep = torch.arange(6) < kept
            unpacked, packed = there_and_back(codes, keep)
            assert torch.equal(unpacked, codes[keep])
            assert torch.equal(packed, ops.codes_pack(codes[keep].t(), 3))


def test_a_trace_names_the_width() -> None:
    codes = codes_of(3, 5, 33)
    with qgnn.trace() as trace:
        ops.codes_unpack(ops.codes_pack(codes, 3), 3, 33, False)
    rows = {name: (row["format"], row["backend"]) for name, row in trace.ops.items()}
    assert rows == {"codes.pack": ("int3", "c"), "codes.unpack": ("int3", "c")}
