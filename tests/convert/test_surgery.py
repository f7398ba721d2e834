"""What somebody does to a converted model: modules replaced, copied, parametrized, set to another mode."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch_geometric import nn as pyg
from torch_geometric.nn import RGCNConv

from model_cases import CLASSES, EDGES, HIDDEN, K, N
from qgnn import QConfig, quantize_, revert_, summary
from qgnn import nn as qnn
from qgnn.convert.fuse import Moved
from qgnn.nn._layer import Quantized
from qgnn.rounding import MAX_INT32_TERMS

INT8 = QConfig(rounding="nearest")


def gcn() -> pyg.GCN:
    return pyg.GCN(K, HIDDEN, 2, CLASSES, dropout=0.5, act="elu")


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize(
    ("name", "module"), [("act", nn.Tanh()), ("dropout", nn.Dropout(0.0)), ("convs.0", pyg.GCNConv(K, HIDDEN))]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_replaced_module_counts_and_the_others_do_their_own_work(name: str, module: Any, compiled: bool) -> None:
    theirs, x = gcn().eval(), torch.randn(N, K)
    ours = quantize_(copy.deepcopy(theirs), None)
    run = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(run(x, EDGES), theirs(x, EDGES))
    for model in (theirs, ours):
        model.set_submodule(name, module)
    torch.testing.assert_close(run(x, EDGES), theirs(x, EDGES))
    table = summary(ours)
    assert [row.name for row in table.rows if row.epilogue] == []
    assert "epilogue" not in repr(ours)
    revert_(ours)
    assert ours.get_submodule(name) is module
    assert not any(isinstance(each, (Quantized, Moved)) or "_moved" in vars(each) for each in ours.modules())
    torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))


def test_second_conversion_takes_the_replaced_module() -> None:
    theirs, x = gcn().eval(), torch.randn(N, K)
    ours = quantize_(copy.deepcopy(theirs), None)
    theirs.act = ours.act = nn.LeakyReLU(0.3)
    assert summary(quantize_(ours, None))["convs.0"].epilogue == "leaky_relu, dropout 0.5"
    torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))
    ours.dropout = nn.Dropout(0.25)
    assert summary(quantize_(ours, None))["convs.0"].epilogue == "leaky_relu, dropout 0.25"


def test_module_in_between_puts_the_activation_back() -> None:
    model, x = quantize_(nn.Sequential(nn.Linear(K, K), nn.ReLU()), None), torch.randn(N, K)
    model.insert(1, nn.Hardtanh(-1.0, -0.5))  # from -1 to -1/2, whatever it gets
    assert model(x).eq(0).all()
    assert model[0](x).min() < 0


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_follows_the_mode_of_its_module(compiled: bool) -> None:
    model, x = quantize_(nn.Sequential(nn.Linear(K, K), nn.ELU(), nn.Dropout(0.5)), INT8), torch.randn(N, K)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    model.eval()
    assert run(x).ne(0).all()
    model[2].train()  # Monte Carlo dropout
    assert run(x).eq(0).any()
    model.train()
    model[0].eval()
    assert run(x).eq(0).any()
    model[2].eval()
    model[0].train()
    assert run(x).ne(0).all()


@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_copy_has_the_activation_only_if_it_holds_the_model(again: Callable[[Any], Any]) -> None:
    """Whatever the order in which the copy meets the model's parts."""
    model, x = quantize_(gcn(), None).eval(), torch.randn(N, K)
    expected, plain = model(x, EDGES), revert_(copy.deepcopy(model)).convs[0](x, EDGES)
    fused = nn.functional.elu(plain)
    for whole in (again(model), again([model.convs, model])[1], again([model.act, model.convs[1], model])[2]):
        torch.testing.assert_close(whole(x, EDGES), expected)
        torch.testing.assert_close(whole.convs[0](x, EDGES), fused)
        assert type(revert_(whole).act) is nn.ELU
    for conv in (again(model.convs)[0], again(model.convs[0]), again({"a": model.convs[0], "b": model.act})["a"]):
        torch.testing.assert_close(conv(x, EDGES), plain)
        assert type(revert_(conv)) is pyg.GCNConv
    torch.testing.assert_close(again(model.act)(x), nn.functional.elu(x))
    torch.testing.assert_close(model.convs[0](x, EDGES), fused)
    shallow = copy.copy(model)
    torch.testing.assert_close(shallow(x, EDGES), expected)
    del model
    torch.testing.assert_close(again(shallow)(x, EDGES), expected)


def test_model_is_freed_with_its_last_reference() -> None:
    """Without waiting for the collector: its parameters may fill a GPU."""
    model = quantize_(nn.Sequential(nn.Linear(K, K), nn.ReLU()), None)
    known, first = weakref.ref(model), model[0]
    x = torch.randn(N, K)
    assert first(x).min() == 0
    gc.disable()
    try:
        del model
        assert known() is None
    finally:
        gc.enable()
    assert first(x).min() < 0  # nobody is left whose work it would do


def test_layer_that_was_parametrized_since_is_not_touched() -> None:
    model, x = quantize_(nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K)), INT8), torch.randn(N, K)
    nn.utils.parametrizations.weight_norm(model[0])
    expected = model(x)
    message = r"expects layers of the classes that 'quantize_' gave them \(got a ParametrizedQTorchLinear in '.*'\); "
    with pytest.raises(ValueError, match=f"'revert_' {message}remove its parametrizations"):
        revert_(model)
    with pytest.raises(ValueError, match=f"'quantize_' {message}remove its parametrizations"):
        quantize_(model, INT8, lambda _, name: name == "2")
    assert torch.equal(model(x), expected)
    assert isinstance(model[1], Moved)
    quantize_(model, None)
    assert summary(model)["0"].what == "fp32"
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert [type(module) for module in revert_(model)] == [nn.Linear, nn.ReLU, nn.Linear]


def test_layer_inside_of_one_that_was_parametrized_since_is_not_touched() -> None:
    conv = pyg.GCNConv(K, K)
    quantize_(conv.lin, INT8)
    nn.utils.parametrizations.weight_norm(conv.lin)
    table = summary(quantize_(conv, INT8))
    assert (type(conv), table[""].what) == (qnn.QGCNConv, "fp32")


def test_export_of_a_fused_model() -> None:
    model, x = quantize_(gcn(), INT8).eval(), torch.randn(N, K)
    exported: Tensor = torch.export.export(model, (x, EDGES)).module()(x, EDGES)
    torch.testing.assert_close(exported, model(x, EDGES))


def test_torchs_dense_layer_is_called_by_its_argument_s_name() -> None:
    model, x = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), torch.randn(5, 16)
    quantize_(model, QConfig(rounding="nearest"))
    assert torch.equal(model[0](input=x), model[0](x))


def test_sums_that_int32_does_not_hold_stay_in_full_precision() -> None:
    """Of the product, of its gradient, and of rows of all relations side by side."""
    wide = MAX_INT32_TERMS + 1
    model = nn.ModuleDict(
        {
            "columns": nn.Linear(wide, 1),
            "rows": nn.Linear(1, wide),
            "relations": RGCNConv(wide // 4, 2, 4, num_bases=1),
            "parametrized": parametrizations.weight_norm(qnn.QLinear(wide, 1)),
            "blocks": RGCNConv(wide // 4, 8, 4, num_blocks=8),
            "narrow": nn.Linear(8, 8),
        }
    )
    quantize_(model, QConfig(), keep_last=False)
    rows = {row.name: row for row in summary(model).rows}
    assert [name for name, row in rows.items() if row.what == "int8"] == ["blocks", "narrow"]
    for name in ("columns", "rows", "relations", "parametrized"):
        assert "sums of more than 131,071 products" in str(rows[name].reason)
