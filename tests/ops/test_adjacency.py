"""``qgnn::adjacency_filter`` and ``adjacency_merge``: registration, backends and trace; values are tested below."""

import pytest
import torch
from torch import Tensor

import qgnn
from op_arguments import arguments_of
from op_checks import opcheck
from qgnn import ops
from qgnn.ops._backends import torch_backend
from qgnn.ops.adjacency import _adjacency_filter, _adjacency_merge

NAMES = pytest.mark.parametrize("name", ["adjacency_filter", "adjacency_merge"])
WITHOUT = ("weight", "new_weight", "number")


def operands(name: str, whole: bool = True) -> dict[str, Tensor]:
    arguments = arguments_of(name)
    return arguments if whole else arguments | {k: None for k in WITHOUT if k in arguments}


@NAMES
@pytest.mark.parametrize("whole", [False, True])
def test_adjacency_opcheck(name: str, whole: bool) -> None:
    opcheck(getattr(ops, name), tuple(operands(name, whole).values()))


@NAMES
@pytest.mark.parametrize("whole", [False, True])
def test_backends_agree(name: str, whole: bool) -> None:
    function = {"adjacency_filter": _adjacency_filter, "adjacency_merge": _adjacency_merge}[name]
    arguments = operands(name, whole)
    results, expected = getattr(ops, name)(**arguments), function(torch_backend(), **arguments)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@NAMES
def test_the_trace_shows_it(name: str) -> None:
    with qgnn.trace() as t:
        getattr(ops, name)(**operands(name))
    assert t.ops[f"{name}.forward"]["format"] == "int32"


@NAMES
def test_weights_that_need_a_gradient_are_refused(name: str) -> None:
    arguments = operands(name)
    arguments["weight"].requires_grad_()
    *_, weight = getattr(ops, name)(**arguments)
    with pytest.raises(NotImplementedError, match=f"'qgnn::{name}' has no derivative"):
        weight.sum().backward()


def test_the_number_of_kept_edges_is_checked() -> None:
    """Before there is room for them, and against what is kept."""
    arguments = arguments_of("adjacency_filter")
    kept = int(arguments["keep"].sum())
    for number, message in ((-1, r"to be at least 0 \(got -1\)"), (kept + 1, rf"{kept} \(got {kept + 1}\)")):
        with pytest.raises(ValueError, match=f"'qgnn::adjacency_filter' expects 'num_kept' .*{message}"):
            torch.ops.qgnn.adjacency_filter(**arguments | {"num_kept": number})
