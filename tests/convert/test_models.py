"""PyG's models, converted: the same results in full precision, losses that fall in int8, and nothing left on return."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE, to_hetero

from model_cases import CLASSES, METADATA, MODELS, Case, K, N, run_hetero
from qgnn import QConfig, quantize_, revert_, summary, trace
from qgnn.nn._layer import Quantized

ALL = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())


def results(case: Case, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a pass."""
    model.zero_grad()
    out = case.run(model, x)
    out.square().sum().backward()
    return {"out": out.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@ALL
def test_model_computes_the_same_without_quantization(case: Case) -> None:
    """Fused activations included. Some gradients cancel to nothing, so all are held to the largest of the pass."""
    model, x = case.build().eval(), torch.randn(N, K)
    expected = results(case, model, x)
    actual = results(case, quantize_(model, None), x)
    assert actual.keys() == expected.keys()
    scale = max(value.abs().max().item() for value in expected.values())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)


@ALL
def test_summary_names_what_became_of_each_module(case: Case) -> None:
    table = summary(quantize_(case.build(), QConfig()))
    assert table.converted == case.converted
    assert table.kept == case.kept
    assert sorted(table.left) == sorted(case.left)
    assert all(reason in str(table[name].reason) for name, reason in case.left.items())
    assert {row.name: row.epilogue for row in table.rows if row.epilogue} == case.fused


@ALL
def test_model_trains_in_int8(case: Case) -> None:
    torch.manual_seed(1)
    model, x, y = quantize_(case.build(), QConfig()), torch.randn(N, K), torch.randint(CLASSES, (N,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(case.run(model, x), y)

    def loss_without_dropout() -> float:
        model.eval()
        value = float(loss().detach())
        model.train()
        return value

    first = loss_without_dropout()
    with trace() as record:
        for _ in range(5):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    assert loss_without_dropout() < first
    formats = {name: op["formats"] for name, op in record.ops.items() if name.endswith(".backward")}
    assert any("int8" in found for found in formats.values()), formats


@ALL
def test_revert_leaves_nothing_behind(case: Case) -> None:
    model, x = case.build().eval(), torch.randn(N, K)
    before = [(type(module), set(vars(module)), repr(module)) for module in model.modules()]
    objects, state = list(map(id, model.modules())), {k: v.clone() for k, v in model.state_dict().items()}
    expected = case.run(model, x)
    quantize_(model, QConfig())
    case.run(model, x).sum().backward()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()
    assert revert_(model) is model
    assert [(type(module), set(vars(module)), repr(module)) for module in model.modules()] == before
    assert list(map(id, model.modules())) == objects
    assert torch.equal(case.run(model, x), expected)


@ALL
def test_converted_model_survives_copy_and_pickle(case: Case) -> None:
    model, x = quantize_(case.build(), QConfig()).eval(), torch.randn(N, K)
    expected, table = case.run(model, x), str(summary(model))
    twins = [copy.deepcopy(model)]
    if case not in (MODELS["sequential"], MODELS["to_hetero"]):  # these hold functions, which PyG cannot pickle
        file = io.BytesIO()
        torch.save(model, file)
        twins += [pickle.loads(pickle.dumps(model)), torch.load(io.BytesIO(file.getvalue()), weights_only=False)]
    for twin in twins:
        assert torch.equal(case.run(twin, x), expected)
        assert str(summary(twin)) == table
        originals = [type(module).__name__ for module in case.build().modules()]
        assert [type(module).__name__ for module in revert_(twin).modules()] == originals
    assert torch.equal(case.run(model, x), expected)


def test_model_converted_before_to_hetero_computes_what_pyg_computes() -> None:
    """Copies of single layers leave their activation behind: PyG sums over kinds of edges in front of it."""
    model = GraphSAGE((K, K), 16, 2, CLASSES, act="elu", dropout=0.5)
    theirs = to_hetero(model, METADATA)
    ours = to_hetero(quantize_(model, None), METADATA)
    ours.load_state_dict(theirs.state_dict())
    assert sum(isinstance(module, Quantized) for module in ours.modules()) == 6
    x = torch.randn(N, K)
    torch.testing.assert_close(run_hetero(ours.eval(), x), run_hetero(theirs.eval(), x))
    assert ours.dropout["paper"].p == 0.5
    assert run_hetero(ours.train(), x).ne(run_hetero(ours, x)).any()  # dropout is where it was
