"""quantize_ and revert_: which layers change, what stays, and what is refused."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.explain.algorithm.utils import set_masks

from model_cases import CLASSES, EDGES, HIDDEN, K, N
from qgnn import QConfig, quantize_, revert_, summary, trace
from qgnn import nn as qnn
from qgnn.convert.layers import COUNTERPARTS
from qgnn.nn._layer import Quantized

INT8, INT4 = QConfig(rounding="nearest"), QConfig(bits=4)


class Net(nn.Module):
    """A model with layers in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(K, HIDDEN)
        self.blocks = nn.ModuleDict({"a": pyg.GCNConv(HIDDEN, HIDDEN), "b": pyg.SAGEConv(HIDDEN, HIDDEN)})
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.mixers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False), pyg.Linear(HIDDEN, HIDDEN)])
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encoder(x).relu()
        for conv in self.blocks.values():
            x = conv(x, edge_index).relu()
        x = self.norm(x)
        for mixer in self.mixers:
            x = mixer(x).relu()
        return self.head(x)


NAMES = ["encoder", "blocks.a", "blocks.b", "mixers.0", "mixers.1", "head"]


def formats(model: nn.Module) -> dict[str, str | None]:
    return {row.name: row.what for row in summary(model).rows if isinstance(model.get_submodule(row.name), Quantized)}


def test_every_quantized_layer_has_the_layer_that_it_stands_for() -> None:
    layers = [cls for cls in vars(qnn).values() if isinstance(cls, type) and issubclass(cls, Quantized)]
    assert {ours: theirs for theirs, ours in COUNTERPARTS.items() if theirs is not nn.Linear} == {
        ours: getattr(pyg, ours.__name__.removeprefix("Q")) for ours in layers
    }
    assert issubclass(COUNTERPARTS[nn.Linear], nn.Linear)


def test_conversion_changes_classes_and_nothing_else() -> None:
    model, x = Net(), torch.randn(N, K)
    modules, parameters = list(model.modules()), dict(model.named_parameters())
    buffers, keys = dict(model.named_buffers()), list(model.state_dict())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    seen: list[nn.Module] = []
    model.encoder.register_forward_hook(lambda module, *_: seen.append(module))
    assert quantize_(model, INT8) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert list(model.state_dict()) == keys
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert formats(model) == {**dict.fromkeys(NAMES, "int8"), "head": "fp32"}
    with trace() as record:
        model(x, EDGES)
    assert seen == [model.encoder]
    assert record.ops["spmm.forward"]["formats"] == {"int8": 2}


def test_optimizer_goes_on_with_its_state_through_conversion_and_back() -> None:
    """The same steps as with a model that was never converted: full precision is exact up to the order of sums."""
    torch.manual_seed(0)
    theirs, x, y = Net(), torch.randn(N, K), torch.randint(CLASSES, (N,))
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (theirs, ours)]
    for step in range(6):
        if step == 2:
            quantize_(ours, None)
        elif step == 4:
            revert_(ours)
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x, EDGES), y).backward()
            optimizer.step()
    # Adam divides by the size of a gradient, so that errors of 1e-6 of it move a parameter by 1e-6 of the rate a step;
    # gradients that are nothing but rounding errors (in front of a batch norm) move it by the whole rate.
    for (name, theirs_p), ours_p in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        allowed = 6 * 0.01 if name.endswith("blocks.b.lin_l.bias") else 1e-4
        assert (theirs_p - ours_p).abs().max() <= allowed, name
    assert optimizers[1].state[ours.encoder.weight]["step"] == 6


def test_second_conversion_configures_anew() -> None:
    model = quantize_(Net(), INT8)
    quantize_(model, INT4, keep_last=False)
    assert formats(model) == dict.fromkeys(NAMES, "int4")
    quantize_(model, INT8, lambda _, name: name == "encoder")
    assert formats(model) == {"encoder": "int8"}
    assert type(model.head) is nn.Linear
    assert set(vars(model.head)) - set(vars(nn.Linear(2, 2))) == {"_conversion"}
    revert_(model)
    assert not any(isinstance(module, Quantized) or "_conversion" in vars(module) for module in model.modules())


def test_first_pattern_that_matches_counts() -> None:
    model = quantize_(Net(), {"blocks.a": None, "blocks": INT4, r"re:mixers\.[0-9]+": INT8, "head": INT4})
    expected = {"blocks.a": "fp32", "blocks.b": "int4", "mixers.0": "int8", "mixers.1": "int8", "head": "int4"}
    assert formats(model) == expected
    assert summary(model)["encoder"].reason == "matched by no pattern of config"
    assert formats(quantize_(Net(), {"*": INT8, "encoder": INT4}))["encoder"] == "int8"
    gin = quantize_(pyg.GIN(K, HIDDEN, 2, CLASSES), {"convs.0": INT4, "*": INT8}, keep_last=False)
    assert formats(gin)["convs.0.nn.lins.1"] == "int4"  # inside of what the pattern names


def test_layers_stay_in_full_precision_by_name() -> None:
    config = QConfig(keep_fp32=("blocks.*", "encoder", "norm"))
    model = quantize_(Net(), config, keep_last=False)
    assert formats(model) == {
        **{"encoder": "fp32", "blocks.a": "fp32", "blocks.b": "fp32"},
        **{"mixers.0": "int8", "mixers.1": "int8", "head": "int8"},
    }
    assert summary(model)["blocks.a"].reason == "in keep_fp32"


def test_filter_leaves_layers_alone_with_all_that_is_inside() -> None:
    asked: list[str] = []

    def only_first(module: nn.Module, name: str) -> bool:
        asked.append(name)
        assert type(module) in COUNTERPARTS
        return name.startswith("convs.0")

    model = quantize_(pyg.GIN(K, HIDDEN, 2, CLASSES), INT8, only_first)
    assert asked == ["convs.0", "convs.0.nn.lins.0", "convs.0.nn.lins.1", "convs.1"]
    table = summary(model)
    assert (table.converted, table.left) == (["convs.0", "convs.0.nn.lins.0", "convs.0.nn.lins.1"], ["convs.1"])
    assert table["convs.1"].reason == "left alone by filter_fn"
    assert repr(model.convs[1]) == repr(pyg.GIN(K, HIDDEN, 2, CLASSES).convs[1])
    quantize_(model, INT8)  # and are found again
    assert "convs.1.nn.lins.0" in summary(model).kept


def test_last_layer_stays_in_full_precision() -> None:
    def kept(model: nn.Module) -> list[str]:
        return summary(quantize_(model, INT8)).kept

    model = pyg.GCN(K, HIDDEN, 2, CLASSES, jk="cat")
    model.convs = model._modules.pop("convs")  # registered last, but what BasicGNN runs last counts
    assert kept(model) == ["lin"]
    assert kept(pyg.GCN(K, HIDDEN, 2)) == ["convs.1"]
    assert kept(nn.Sequential(nn.Linear(K, K), nn.Sequential(nn.Linear(K, K), nn.ReLU()), nn.Dropout())) == ["1.0"]
    assert kept(nn.Sequential(pyg.MLP([K, K, K]), nn.ReLU())) == ["0.lins.1"]
    assert kept(nn.ModuleDict({"a": nn.Linear(K, K), "b": nn.Linear(K, K)})) == ["b"]
    for layer in (pyg.GCNConv(K, K), nn.Linear(K, K), pyg.HeteroConv({("a", "to", "a"): pyg.SAGEConv(K, K)})):
        assert kept(layer) == []  # what is given as a layer is meant
    assert summary(quantize_(Net(), INT8, keep_last=False)).kept == []
    assert summary(quantize_(Net(), {"head": INT8, "*": INT8})).kept == []  # named by itself


def test_reason_for_the_last_layer_claims_no_more_than_is_known() -> None:
    assert summary(quantize_(pyg.GCN(K, HIDDEN, 2), INT8))["convs.1"].reason == "feeds the class softmax (keep_last)"
    for model in (Net(), nn.Sequential(nn.Linear(K, K), pyg.GCN(K, HIDDEN, 2))):
        table = summary(quantize_(model, INT8))
        assert [table[name].reason for name in table.kept] == ["last of the layers (keep_last)"]


def test_nothing_in_front_stays_in_full_precision_for_an_end_that_is_no_layer() -> None:
    model = pyg.GCN(K, HIDDEN, 2)
    model.convs[1] = type("Own", (pyg.GCNConv,), {})(HIDDEN, HIDDEN)
    del model.convs[1].lin  # which would be a layer
    assert summary(quantize_(nn.Sequential(nn.Linear(K, K), model), INT8)).kept == []


def test_layers_whose_weights_torch_reads_are_left_alone() -> None:
    """torch's encoder hands its weights to a fused kernel in eval mode, which would be full precision in silence."""
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2), nn.TransformerDecoderLayer(8, 2), nn.Linear(8, 8)])
    table = summary(quantize_(model, INT8, keep_last=False))
    assert table.converted == ["2"]
    assert table["0.linear1"].reason == (
        "part of a TransformerEncoderLayer, whose fast path reads its weights instead of calling it"
    )
    assert type(model[1].linear2) is nn.Linear


def test_complex_layer_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(K, K, dtype=torch.complex64), nn.Linear(K, K))
    assert summary(quantize_(model, INT8))["0"].reason == "complex weights"
    assert model[0](torch.ones(2, K, dtype=torch.complex64)).is_complex()


@pytest.mark.parametrize("attach", ["hook", "explainer"])
def test_summary_tells_what_runs_in_full_precision_for_attached_code(attach: str) -> None:
    conv: Any = quantize_(pyg.SAGEConv(K, HIDDEN), INT8)
    assert (summary(conv)[""].what, summary(conv)[""].note) == ("int8", None)
    if attach == "hook":
        conv.lin_l.register_forward_hook(lambda *_: None)
    else:
        set_masks(conv, torch.zeros(EDGES.shape[1]), EDGES)
    with trace() as record:
        conv(torch.randn(N, K), EDGES)
    assert "messages.forward" in record.ops
    assert summary(conv)[""].what == "fp32"
    assert str(summary(conv)[""].note).startswith("runs on PyG's path in full precision")


@pytest.mark.parametrize("config", [{"re:[": None, "*": INT8}, QConfig(keep_fp32=("re:[",))])
def test_pattern_that_is_no_regular_expression_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"expects a regular expression behind 're:' \(got 're:\[': unterminated"):
        quantize_(Net(), config)


def test_layer_used_twice_is_converted_once() -> None:
    model = Net()
    model.again = model.blocks["a"]
    model.mixers.append(model.mixers[0])
    quantize_(model, INT8)
    assert type(model.again) is qnn.QGCNConv
    assert set(formats(model)) == set(NAMES)
    revert_(model)
    assert type(model.again) is pyg.GCNConv
    assert type(model.mixers[2]) is nn.Linear


@pytest.mark.parametrize("cls", [nn.Linear, pyg.Linear])
def test_dense_layer_comes_back_as_what_it_was(cls: type[nn.Module]) -> None:
    layer: Any = cls(K, 3)
    layer.in_channels, layer.weight_initializer, layer.config = K, "mine", "mine too"
    before, text = dict(vars(layer)), repr(layer)
    quantize_(layer, INT8)
    assert isinstance(layer, cls)  # what goes by class, as initializations and groups of parameters do, finds it
    assert repr(layer).startswith(f"Q{text[:-1]}, config=QConfig(")
    assert summary(layer)[""].layer == "QLinear"
    assert layer.weight_initializer == "mine"
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight, layer.weight)
    quantize_(layer, INT4)
    layer.weight_initializer = None
    torch.manual_seed(5)
    layer.reset_parameters()
    weight = layer.weight.detach().clone()
    assert repr(revert_(layer)) == text
    assert vars(layer) == {**before, "weight_initializer": None}
    torch.manual_seed(5)
    layer.reset_parameters()
    assert torch.equal(layer.weight, weight)


def test_dense_layer_that_a_convolution_calls_is_converted() -> None:
    conv, x = pyg.GINConv(pyg.Linear(K, CLASSES)), torch.randn(N, K)
    assert summary(quantize_(conv, INT8)).converted == ["", "nn"]
    with trace() as record:
        conv(x, EDGES)
    assert record.ops["matmul.forward"]["format"] == record.ops["spmm.forward"]["format"] == "int8"


def test_layers_of_unknown_size_are_converted() -> None:
    model = nn.Sequential(pyg.Linear(-1, HIDDEN), nn.ReLU(), pyg.Linear(-1, CLASSES))
    quantize_(model, INT8)(torch.randn(N, K))
    assert model[0].weight.shape == (HIDDEN, K)
    conv = quantize_(pyg.SAGEConv((-1, -1), HIDDEN), INT8)
    conv(torch.randn(N, K), EDGES)
    assert conv.lin_l.weight.shape == (HIDDEN, K)


def test_what_has_code_of_its_own_is_left_alone_with_the_reason() -> None:
    class Doubled(pyg.GCNConv):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    model = nn.ModuleDict({"conv": Doubled(K, K), "lazy": nn.LazyLinear(3), "embed": nn.Embedding(3, 3)})
    model["attention"], model["lin"] = nn.MultiheadAttention(4, 2), nn.Linear(K, K)
    model["script"] = torch.jit.script(nn.Linear(K, K))
    table = summary(quantize_(model, INT8, keep_last=False))
    assert table.converted == ["conv.lin", "lin"]
    reasons = {name: table[name].reason for name in table.left}
    assert reasons["conv"] == "Doubled: a subclass of GCNConv, whose own code a conversion would lose"
    assert str(reasons["attention.out_proj"]).startswith("NonDynamicallyQuantizableLinear: a subclass of Linear")
    assert str(reasons["lazy"]).startswith("LazyLinear: becomes a Linear in the first pass")
    assert str(reasons["script"]).startswith("TorchScript")
    assert reasons["embed"] == "Embedding: no quantized counterpart"
    assert len(reasons) == 6


def test_option_that_needs_full_precision_keeps_it_with_the_reason() -> None:
    model = nn.ModuleList([pyg.GCNConv(K, K, aggr="max"), pyg.SAGEConv(K, K, aggr="lstm"), pyg.GCNConv(K, K)])
    table = summary(quantize_(model, INT8, keep_last=False))
    assert (table.converted, table.kept) == (["2"], ["0", "1"])
    assert "expects 'aggr' to be one of" in str(table["0"].reason)
    assert table["1"].note == "aggregation 'lstm' runs on PyG's path in full precision"
    assert [name for name in table.left if name.endswith("lstm")] == ["1.aggr_module.lstm"]


def test_layers_that_were_built_quantized_are_configured_and_stay() -> None:
    epilogue = qnn.Epilogue("relu")
    model = nn.ModuleList([qnn.QGCNConv(K, K, config=None, epilogue=epilogue), nn.Linear(K, K)])
    quantize_(model, INT4)
    assert (model[0].config, model[0].epilogue) == (INT4, epilogue)
    quantize_(model, INT8, lambda _, name: name == "1")
    assert model[0].config is None  # left alone: as it was built
    quantize_(model, INT8)
    assert model[0].config == INT8
    revert_(model)
    assert (type(model[0]), type(model[1])) == (qnn.QGCNConv, nn.Linear)
    assert (model[0].config, model[0].epilogue) == (None, epilogue)
    assert "_conversion" not in vars(model[0])


def test_dense_layer_inside_of_a_convolution_gives_way_to_the_convolution() -> None:
    conv = pyg.GCNConv(K, K)
    quantize_(conv.lin, INT8)
    quantize_(conv, INT8)
    assert type(conv.lin) is pyg.Linear  # a converted one would be called, and the convolution take PyG's path
    with trace() as record:
        conv(torch.randn(N, K), EDGES)
    assert record.ops["spmm.forward"]["format"] == "int8"


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager", fullgraph=True)])
def test_model_in_a_wrapper_is_converted_inside(wrap: Any) -> None:
    model, x = nn.Sequential(nn.Linear(K, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)), torch.randn(N, K)
    wrapped = wrap(model)
    before = wrapped(x)
    assert quantize_(wrapped, {"0": INT8}) is wrapped
    assert (summary(wrapped).converted, summary(wrapped).left) == (["0"], ["2"])
    out = wrapped(x)
    assert not torch.equal(out, before)  # compiled anew
    assert torch.equal(out, model(x))
    assert torch.equal(revert_(wrapped)(x), before)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.BatchNorm1d(3), "got BatchNorm1d: no int8 counterpart: normalization"),
        (nn.ModuleList([nn.Embedding(2, 2), nn.Embedding(2, 2)]), r"got Embedding: no quantized counterpart \(x2\)"),
        (pyg.EdgeConv(nn.ReLU()), "got EdgeConv: no quantized counterpart"),
        (nn.ReLU(), "got ReLU, which has no parameters"),
    ],
)
def test_model_without_layers_is_refused_with_what_it_has(model: nn.Module, found: str) -> None:
    with pytest.raises(ValueError, match=f"'quantize_' expects a model with layers to convert .{found}"):
        quantize_(model, INT8)


def test_filter_that_leaves_nothing_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"Linear: left alone by filter_fn \(x4\); .*BatchNorm1d: no int8"):
        quantize_(model, INT8, lambda *_: False)
    assert not any("_conversion" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block.*": INT8}, r"got 'block.\*', which matches no layer\); the closest names are 'blocks.b', 'blocks.a'"),
        ({"norm": INT8, "*": INT8}, "got 'norm', which matches no layer"),
        (QConfig(keep_fp32=("heads",)), "got 'heads', which matches no module.; the closest names are 'head'"),
        (QConfig(granularity="block"), r"'quantize_' expects granularity 'row' or 'tensor' \(got 'block'\)"),
    ],
)
def test_pattern_that_matches_nothing_is_refused(config: Any, message: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=message):
        quantize_(model, config)
    assert not any(isinstance(module, Quantized) for module in model.modules())


@pytest.mark.parametrize("config", [8, "int8", QConfig, {1: INT8}, {"*": 8}, [INT8]])
def test_config_of_another_type_is_refused(config: Any) -> None:
    with pytest.raises(TypeError, match=r"'quantize_' expects 'config' to be a QConfig.*write config=qgnn.QConfig"):
        quantize_(Net(), config)


def test_what_cannot_be_changed_is_refused() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    for call in (lambda model: quantize_(model, INT8), revert_):
        with pytest.raises(TypeError, match=r"expects a model whose layers can be changed \(got a TorchScript"):
            call(script)
        with pytest.raises(TypeError, match=r"expects 'model' to be a torch.nn.Module \(got str\)"):
            call("model")
    with pytest.raises(TypeError, match=r"'summary' expects 'model' to be a torch.nn.Module \(got str\)"):
        summary("model")  # type: ignore[arg-type]
