"""Every operator refuses what its kernels would read or write beyond the end of, whoever calls it."""

import re
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bad_arguments import BAD
from op_arguments import GRAPH, OPERATORS, E, F, H, S, arguments_of, codes
from op_checks import PLAIN_PRODUCT
from qgnn import QConfig
from qgnn.nn import QLinear
from qgnn.ops import _checks
from qgnn.rounding import MAX_INT32_TERMS


def call(name: str, **change: Any) -> Any:
    return getattr(torch.ops.qgnn, name)(**arguments_of(name) | change)


def on_meta(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_arguments_here_are_right(name: str) -> None:
    """Otherwise the other tests would show nothing."""
    results, fakes = call(name), getattr(torch.ops.qgnn, name)(**on_meta(arguments_of(name)))
    for result, fake in zip(*([r] if isinstance(r, Tensor) else r for r in (results, fakes)), strict=True):
        assert (result.shape, result.dtype) == (fake.shape, fake.dtype)


@pytest.mark.parametrize(("name", "error", "change", "message"), BAD)
def test_operators_refuse(name: str, error: type[Exception], change: dict[str, Any], message: str) -> None:
    call(name)  # what passed is remembered: not this
    with pytest.raises(error, match=rf"^'qgnn::{name}' expects .*{re.escape(message)}"):
        call(name, **change)
    looks_at_values = "rise from" in message or "from 0 to" in message or "from -1 to" in message
    if looks_at_values or "meta" in message:
        return
    with pytest.raises(error, match=re.escape(message)):  # so does the fake
        getattr(torch.ops.qgnn, name)(**on_meta(arguments_of(name) | change))


def test_every_operator_is_among_the_bad_inputs() -> None:
    assert {name for name, *_ in BAD} == set(OPERATORS)


def test_integer_sums_are_limited_to_what_int32_holds() -> None:
    wide = {
        "x": torch.ones(1, MAX_INT32_TERMS + 1),
        "weight": torch.ones(1, MAX_INT32_TERMS + 1),
        "bias": None,
    }
    for name in ("matmul", "graph_linear"):
        with pytest.raises(ValueError, match=rf"'qgnn::{name}' sums at most 131071 products .*K = 131072"):
            getattr(torch.ops.qgnn, name)(**on_meta(arguments_of(name) | wide))
    widest = {
        "x": torch.ones(1, MAX_INT32_TERMS),
        "weight": torch.ones(1, MAX_INT32_TERMS),
        "bias": None,
    }
    y, *_ = call("matmul", **widest, seed=None, threshold=0)
    torch.testing.assert_close(y, torch.full((1, 1), float(MAX_INT32_TERMS)))


def test_indices_are_searched_once() -> None:
    """... while they live unchanged: a write to them is noticed."""
    arguments = arguments_of("spmm")
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for check in (_checks._check_pointers, _checks._check_indices):
            patch.setattr(_checks, check.__name__, lambda *args, check=check: seen.append(args[1]) or check(*args))
        for _ in range(3):
            torch.ops.qgnn.spmm(**arguments)
            assert seen == ["indptr", "index"]
        arguments["index"][0] = S
        with pytest.raises(ValueError, match=f"'index' from 0 to {S - 1} \\(got {S}\\)"):
            torch.ops.qgnn.spmm(**arguments)


@pytest.mark.parametrize("name", ["spmm", "spmm_backward", "sddmm", "sddmm_backward", "attention_scores_backward"])
@pytest.mark.parametrize("wide", ["indptr", "index", "indptr_t", "order_t"])
@pytest.mark.parametrize("double", [False, True])
def test_index_types_may_differ(name: str, wide: str, double: bool) -> None:
    arguments = arguments_of(name)
    if double:  # float64 is plain PyTorch's
        floats = {k: t for k, t in arguments.items() if isinstance(t, Tensor) and t.dtype == torch.float32}
        arguments |= {k: t.double() for k, t in floats.items() if not k.endswith("scale")}
    function = getattr(torch.ops.qgnn, name)
    expected, results = function(**arguments), function(**arguments | {wide: arguments[wide].long()})
    for result, value in zip(*([r] if isinstance(r, Tensor) else r for r in (results, expected)), strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize(("name", "weight"), [("spmm_backward", "weight"), ("graph_linear_backward", "edge_weight")])
def test_weights_of_both_orders_have_one_shape(name: str, weight: str) -> None:
    with pytest.raises(ValueError, match=rf"^'qgnn::{name}' expects '{weight}_t' of the shape of '{weight}', \[7\]"):
        call(name, **{f"{weight}_t": torch.rand(E, H)})


@pytest.mark.parametrize("name", ["spmm", "spmm_extremum"])
def test_rows_that_are_not_rounded_have_no_codes_to_keep(name: str) -> None:
    results = call(name, bits=0, keep_codes=True)
    kept = results[1:3] if name == "spmm" else results[2:]
    assert [t.numel() for t in kept] == [0, 0]


def test_threads_share_what_is_remembered() -> None:
    """Each thread brings indices of its own beside shared pointers, so entries come and go under one key."""
    indptr, failures = GRAPH.csr.indptr.clone(), []

    def work() -> None:
        try:
            for _ in range(300):
                call("spmm", indptr=indptr, index=GRAPH.csr.index.clone())
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_sizes_that_depend_on_data_compile() -> None:
    """The fake cannot know whether two of them are the same; the call itself does."""
    layer, x, w = QLinear(F, H, config=QConfig(rounding="nearest")), torch.randn(9, F), torch.randn(H, F)
    x_q, x_scale = codes(9, F), torch.rand(9)

    def of_some(mask: Tensor, scale_mask: Tensor) -> tuple[Tensor, Tensor]:
        options = (w, None, None, 8, "row", False, *PLAIN_PRODUCT)
        return layer(x[mask]), torch.ops.qgnn.matmul(x_q[mask], x_scale[scale_mask], *options)[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(of_some, backend="aot_eager", dynamic=True, fullgraph=True)
        for rows in (5, 2):
            mask = torch.arange(9) < rows
            for result, expected in zip(compiled(mask, mask), of_some(mask, mask), strict=True):
                assert torch.equal(result, expected)
        with pytest.raises(ValueError, match=r"'x_scale' of shape \[N\] or \[1\] with N = 5 \(got \[4\]\)"):
            compiled(torch.arange(9) < 5, torch.arange(9) < 4)


@given(st.data())
def test_a_wrong_argument_never_gets_through(data: st.DataObject) -> None:
    """Any tensor with another shape or type either raises one of our errors or is a legal call of its own."""
    name = data.draw(st.sampled_from(OPERATORS))
    arguments = arguments_of(name)
    victim = data.draw(st.sampled_from([k for k, v in arguments.items() if isinstance(v, Tensor)]))
    t = arguments[victim]
    shape = data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    dtype = data.draw(st.sampled_from([t.dtype, torch.int8, torch.int32, torch.int64, torch.float32, torch.float16]))
    value = data.draw(st.sampled_from([-9, 0, 3, 2**31 - 1]))
    changed = torch.full(shape, min(value, torch.iinfo(dtype).max) if not dtype.is_floating_point else 1.0, dtype=dtype)
    message = f"'qgnn::{name}'"
    try:
        call(name, **{victim: changed})
    except (ValueError, TypeError) as error:
        message = str(error)
    assert message.startswith((f"'qgnn::{name}'", "'sddmm'"))
