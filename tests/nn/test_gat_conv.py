"""QGATConv: what its scores keep of the rows, and which rows are rounded for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv

from graphs import GRAPHS, RECTANGULAR
from layer_cases import assert_same_pass, kept_bytes
from qgnn import QConfig, QTensor, functional
from qgnn.formats import MXFP4, Int
from qgnn.nn import QGATConv, _attention
from qgnn.nn._attention import score_product
from qgnn.nn._edges import LoopedEdges

K, M, H = 8, 6, 2
EDGES, N = GRAPHS["random"]
CODES: dict[str, Callable[[Tensor], QTensor]] = {
    "row": lambda x: functional.quantize(x, QConfig()),
    "tensor": lambda x: functional.quantize(x, QConfig(granularity="tensor")),
    "block": lambda x: functional.quantize(x, QConfig(granularity="block", block_size=4)),
    "zero": lambda x: Int(8, symmetric=False).encode(x),
    "packed": lambda x: MXFP4().encode(x),
}


@pytest.mark.parametrize("kind", CODES)
def test_gradients_behind_given_codes_are_those_of_their_values(kind: str) -> None:
    theirs, ours = GATConv(K, M, H), QGATConv(K, M, H, config=None)
    ours.load_state_dict(theirs.state_dict())
    q = CODES[kind](torch.randn(N, K) + 1)
    results = []
    for layer, x in ((ours, q), (theirs, q.dequantize())):
        out = layer(x, EDGES)
        grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        names = [f"d{name}" for name, _ in layer.named_parameters()]
        results.append({"out": out.detach(), **dict(zip(names, grads, strict=True))})
    assert_same_pass(*results)


def test_scores_of_a_frozen_weight_keep_no_rows() -> None:
    x, weight = torch.randn(N, K, requires_grad=True), torch.randn(H, K)
    for codes in (x, functional.quantize(x)):
        assert kept_bytes(lambda codes=codes: score_product(x, codes, weight), ignore=(weight,)) == 0
        learned = weight.clone().requires_grad_()
        assert kept_bytes(lambda codes=codes, w=learned: score_product(x, codes, w), ignore=(learned,)) >= N * K


@pytest.mark.parametrize("kind", CODES)
def test_scores_of_given_codes_keep_these(kind: str) -> None:
    """And nothing beside: they are all that there is of the rows."""
    q, weight = CODES[kind](torch.randn(N, K)), torch.randn(H, K, requires_grad=True)
    assert kept_bytes(lambda: score_product(q, q, weight), ignore=(weight,)) == q.nbytes


@pytest.mark.parametrize(
    ("residual", "grad", "read"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_targets_are_rounded_only_for_what_reads_their_codes(
    residual: bool, grad: bool, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded: list[Tensor] = []
    operand = _attention.operand
    monkeypatch.setattr(_attention, "operand", lambda x, *args, **kw: rounded.append(x) or operand(x, *args, **kw))
    edges, num_sources, num_targets = RECTANGULAR["wide"]
    conv, (source, target) = (
        QGATConv((K, 5), M, residual=residual),
        (torch.randn(num_sources, K), torch.randn(num_targets, 5)),
    )
    with torch.set_grad_enabled(grad):
        conv((source, target), edges)
    assert [t is target for t in rounded] == ([False, True] if read else [False])


def test_a_tensor_that_fills_self_loops_is_a_key_of_their_features(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = LoopedEdges.features
    monkeypatch.setattr(LoopedEdges, "features", lambda *args: made.append(1) or original(*args))
    fill, edge_attr = torch.randn(3), torch.randn(EDGES.shape[1], 3)
    theirs, ours = GATConv(K, M, edge_dim=3, fill_value=fill), QGATConv(K, M, edge_dim=3, fill_value=fill, config=None)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(N, K)
    for count in (1, 1, 2, 2):
        if count > len(made) > 0:
            fill.neg_()  # noticed
        torch.testing.assert_close(ours(x, EDGES, edge_attr), theirs(x, EDGES, edge_attr), rtol=1e-5, atol=1e-5)
        assert len(made) == count
