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
    """On a GPU the functions of torch run, on its tensors."""
    codes = codes_of(bits, 5, 33)
    stored = ops.codes_pack(codes, bits)
    for backend in (_backends.torch_backend(), _backends.triton_backend()):
        assert torch.equal(_codes_pack(backend, codes.to(device), bits).cpu(), stored)
        unpacked = _codes_unpack(backend, stored.to(device), bits, 33, True)
        assert torch.equal(unpacked.cpu(), ops.codes_unpack(stored, bits, 33, True))


def test_a_trace_names_the_width() -> None:
    codes = codes_of(3, 5, 33)
    with qgnn.trace() as trace:
        ops.codes_unpack(ops.codes_pack(codes, 3), 3, 33, False)
    rows = {name: (row["format"], row["backend"]) for name, row in trace.ops.items()}
    assert rows == {"codes.pack": ("int3", "c"), "codes.unpack": ("uint3", "c")}
