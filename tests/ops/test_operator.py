"""What all operators have from their registration: remembered checks, derivatives, names."""

import pytest
import torch
from torch._dynamo.utils import counters

from op_arguments import OPERATORS, arguments_of
from op_checks import PLAIN_PRODUCT, shares_memory
from qgnn import ops
from qgnn.ops import _operator


@pytest.mark.parametrize("name", OPERATORS)
def test_arguments_pass_the_checks_once_for_all_of_their_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, arguments = getattr(torch.ops.qgnn, name), arguments_of(name)
    op(**arguments)
    with monkeypatch.context() as patched:
        patched.setattr(_operator.Signature, "check", lambda *_: pytest.fail("checked again"))
        op(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})


def test_forms_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    check = _operator.Signature.check
    monkeypatch.setattr(_operator, "_MAX_REMEMBERED", 4)
    monkeypatch.setattr(_operator.Signature, "check", lambda *a: checks.append(a[1]) or check(*a))
    for _ in range(2):
        for num_rows in range(200, 209):
            ops.quantize(torch.randn(num_rows, 3), None, 8, "row", 16)
    assert len(checks) > 9 + 4  # most of the second round's were forgotten
    checks.clear()
    ops.quantize(torch.randn(208, 3), None, 8, "row", 16)
    assert not checks


def test_a_node_has_the_name_of_its_operator() -> None:
    y = ops.matmul(
        torch.randn(5, 6),
        None,
        torch.randn(3, 6, requires_grad=True),
        *(None, None, 8, "row", True),
        *PLAIN_PRODUCT,
    )
    assert y[0].grad_fn.name() == "qgnn_matmul_Backward"


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_memory_of_their_own(name: str) -> None:
    """Nothing looks for it in a call, and compiled code relies on it."""
    arguments = arguments_of(name)
    optional = {"mask": None, "derivative": None, "seed": None, "bias": None, "residual": None, "kind": "none"}
    plain = {key: value for key, value in optional.items() if key in arguments}
    for change in ({}, plain):
        results = getattr(torch.ops.qgnn, name)(**arguments | change)
        results = [results] if isinstance(results, torch.Tensor) else [t for t in results if t.numel()]
        others = [a for a in arguments.values() if isinstance(a, torch.Tensor)]
        for result in results:
            assert not shares_memory(result, others)
            others.append(result)


def test_torch_compile_does_not_look_into_calls_of_a_frame_that_it_gave_up() -> None:
    x, weight = torch.randn(5, 6), torch.randn(3, 6, requires_grad=True)

    def step() -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            return ops.matmul(x, None, weight, *(None, None, 8, "row", True), *PLAIN_PRODUCT)[0]
        finally:
            torch._dynamo.graph_break()

    torch._dynamo.reset()
    counters.clear()
    torch.compile(step, backend="eager")().sum().backward()
    assert counters["frames"]["total"] == 1
    assert weight.grad is not None
