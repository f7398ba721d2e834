"""Activations and dropout moved into layers: only where the order is certain, seen by nobody, and back again."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from layer_cases import kept_bytes
from model_cases import CLASSES, EDGES, HIDDEN, K, N
from qgnn import QConfig, quantize_, revert_, summary
from qgnn.convert.fuse import Moved
from qgnn.nn import Epilogue, QLinear

INT8 = QConfig(rounding="nearest")


def gcn(**options: Any) -> pyg.GCN:
    return pyg.GCN(K, HIDDEN, 3, CLASSES, **{"dropout": 0.5, **options})


def fused(model: nn.Module) -> dict[str, str]:
    return {row.name: row.epilogue for row in summary(quantize_(model, INT8)).rows if row.epilogue}


def test_moved_modules_look_like_themselves() -> None:
    model = gcn(act="leaky_relu", act_kwargs={"negative_slope": 0.2})
    act, keys = model.act, list(model.state_dict())
    quantize_(model, INT8)
    assert isinstance(model.act, nn.LeakyReLU)
    assert isinstance(model.dropout, nn.Dropout)
    assert (model.act.negative_slope, model.dropout.p) == (0.2, 0.5)
    assert repr(model.act) == "MovedLeakyReLU(negative_slope=0.2, fused)"
    assert [name for name, _ in model.named_modules()] == [name for name, _ in gcn().named_modules()]
    assert list(model.state_dict()) == keys
    x = torch.randn(N, K)
    assert model.act(x) is model.dropout(x) is x
    assert not model.eval().act.training
    revert_(model)
    assert model.act is act
    assert not act.training  # what happened in between is kept


def test_dropout_follows_the_module_that_it_came_from() -> None:
    """What the model's ``dropout.p`` says at a call counts: all elements dropped leave nothing but the bias."""
    model, x = quantize_(gcn(), INT8), torch.randn(N, K)
    hidden: list[Tensor] = []
    model.convs[1].register_forward_hook(lambda module, args, out: hidden.append(out))
    for p, share in ((1.0, 1.0), (0.0, None)):
        model.dropout.p = p
        model(x, EDGES)
        zeros = hidden[-1].eq(0).float().mean()
        assert zeros == share if share is not None else 0.1 < zeros < 0.9  # ReLU's
    model.dropout.p = 0.5
    model.eval()
    assert torch.equal(model(x, EDGES), model(x, EDGES))
    model.train()
    assert not torch.equal(model(x, EDGES), model(x, EDGES))
    twin = copy.deepcopy(model)
    twin.dropout.p = 0.25
    assert summary(twin)["convs.0"].epilogue == "relu, dropout 0.25"
    assert summary(model)["convs.0"].epilogue == "relu, dropout 0.5"
    assert revert_(twin).dropout.p == 0.25


def test_compiled_model_follows_a_changed_dropout() -> None:
    model, x = quantize_(nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Dropout(0.5)), INT8), torch.randn(N, K)
    run = torch.compile(model, backend="eager", fullgraph=True)
    assert not torch.equal(run(x), run(x))
    model[2].p = 0.0
    assert torch.equal(run(x), model(x))
    model[2].p = 1.0
    assert run(x).eq(0).all()


def test_fused_model_keeps_fewer_bytes() -> None:
    """Of a ReLU and dropout behind a layer PyG keeps rows and a byte an element; the layer keeps one bit."""
    x = torch.randn(N, K)
    model = pyg.GCN(K, HIDDEN, 2, CLASSES, dropout=0.5)
    runs = {}
    for fuse in (False, True):
        quantize_(model, QConfig(), fuse=fuse)
        model(x, EDGES)  # prepares the graph
        runs[fuse] = kept_bytes(lambda: model(x, EDGES), ignore=(x, *model.parameters()))
    # rows behind ReLU (4 B) and a mask (1 B) against a bit, rows of bits padded to 16 B at most
    assert runs[False] - runs[True] >= N * HIDDEN * 5 - N * 16


def test_dropout_scales_what_it_leaves() -> None:
    """Dropped with probability 1/4, the others 4/3 of what they were."""
    layer, x = nn.Sequential(nn.Linear(K, 64), nn.ELU(), nn.Dropout(0.25)), torch.randn(400, K)
    expected = layer.eval()(x)
    out = quantize_(layer, None).train()(x)
    dropped = out == 0
    torch.testing.assert_close(out[~dropped], (expected / 0.75)[~dropped])
    share, n = dropped.float().mean(), dropped.numel()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5


SEQUENTIALS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "plain": (
        lambda: nn.Sequential(nn.Linear(K, K), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        {"0": "relu, dropout 0.5"},
    ),
    "dropout_first": (lambda: nn.Sequential(nn.Linear(K, K), nn.Dropout(0.5), nn.ReLU()), {}),
    "other_act": (lambda: nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, K), nn.ReLU6()), {}),
    "norm": (lambda: nn.Sequential(nn.Linear(K, K), nn.LayerNorm(K), nn.ReLU()), {}),
    "alpha_dropout": (lambda: nn.Sequential(nn.Linear(K, K), nn.ELU(0.5), nn.AlphaDropout()), {"0": "elu"}),
    "falling_elu": (lambda: nn.Sequential(nn.Linear(K, K), nn.ELU(-1.0)), {}),
    "steep": (lambda: nn.Sequential(nn.Linear(K, K), nn.LeakyReLU(torch.inf)), {}),
    "two_acts": (lambda: nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.ELU()), {"0": "relu"}),
}


@pytest.mark.parametrize(("build", "expected"), SEQUENTIALS.values(), ids=SEQUENTIALS.keys())
def test_layer_of_a_sequential_takes_what_is_right_behind_it(build: Any, expected: dict[str, str]) -> None:
    model, x = build().eval(), torch.randn(N, K)
    out = model(x)
    assert fused(model) == expected
    torch.testing.assert_close(quantize_(model, None)(x), out)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (["x, e -> x", "x -> x", "x -> x"], "relu, dropout 0.5"),
        (["x, e -> h", "h -> a", "a -> y"], "relu, dropout 0.5"),
        (["x, e -> h", "h -> a", "a, h -> y"], None),  # what the layer returns is read again
        (["x, e -> h", "h -> a", "a -> b", "a, b -> y"], "relu"),  # what the activation returns is
        (["x, e -> h", "x -> a", "a -> y"], None),  # the activation reads something else
        (["x, e -> h", "h -> h", "h -> h"], "relu, dropout 0.5"),
    ],
)
def test_layer_of_pygs_sequential_takes_what_nobody_else_reads(calls: list[str], expected: str | None) -> None:
    def add(*args: Tensor) -> Tensor:
        return sum(args[1:], args[0])

    last = nn.Dropout(0.5) if len(calls) == 4 or calls[2].count(",") == 0 else add
    modules: list[Any] = [pyg.GCNConv(K, K), nn.ReLU(), last, *([add] if len(calls) == 4 else [])]
    model, x = pyg.Sequential("x, e", list(zip(modules, calls, strict=True))).eval(), torch.randn(N, K)
    out = model(x, EDGES)
    assert fused(model).get("module_0") == expected
    torch.testing.assert_close(quantize_(model, None)(x, EDGES), out)


def test_nothing_is_moved_where_the_order_is_not_certain() -> None:
    class Own(pyg.GCN):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.act(self.convs[0](x, edge_index) + 1)

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    class OwnSequential(pyg.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) - self[1](x)

    class OwnMLP(pyg.MLP):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.act(self.lins[0](x) - 1)

    patched = nn.Sequential(nn.Linear(K, K), nn.ReLU())
    patched.forward = lambda x: patched[0](x) + 1  # type: ignore[method-assign]
    assert fused(patched) == fused(OwnSequential("x", [(nn.Linear(K, K), "x -> x"), nn.ReLU()])) == {}
    assert fused(OwnMLP([K, K, K], norm=None)) == {}
    assert fused(Own(K, HIDDEN, 2)) == {}
    assert fused(Residual(nn.Linear(K, K), nn.ReLU())) == {}
    assert fused(gcn(act="tanh")) == fused(gcn(act=torch.relu)) == {}
    assert fused(quantize_(gcn(), INT8, fuse=False)) != {}  # by the second call
    assert summary(quantize_(gcn(), INT8, fuse=False))["convs.0"].epilogue is None


def test_activation_of_several_layers_is_moved_into_all_or_none() -> None:
    for spoil in ("filter", "subclass", "epilogue", "shared"):
        model = gcn()
        if spoil == "subclass":
            model.convs[1] = type("Own", (pyg.GCNConv,), {})(HIDDEN, HIDDEN)
        elif spoil == "epilogue":
            quantize_(model.convs[1], INT8)
            model.convs[1].configure(INT8, Epilogue("elu"))
        elif spoil == "shared":
            model.convs[1] = pyg.GCNConv(HIDDEN, HIDDEN)
            model.another = model.convs[1]
        quantize_(model, INT8, (lambda _, name: name != "convs.1") if spoil == "filter" else None)
        assert summary(model)["convs.0"].epilogue is None, spoil
        assert not isinstance(model.act, Moved)


@pytest.mark.parametrize("where", ["convs.0", "act", "dropout"])
def test_modules_that_somebody_watches_are_not_moved(where: str) -> None:
    model, x = gcn(), torch.randn(N, K)
    seen: list[Tensor] = []
    handle = model.get_submodule(where).register_forward_hook(lambda module, args, out: seen.append(out))
    expected = {"dropout": "relu"}.get(where)
    assert fused(model).get("convs.0") == expected
    model(x, EDGES)
    assert len(seen) == (1 if where == "convs.0" else 2)
    handle.remove()
    assert fused(model)["convs.0"] == "relu, dropout 0.5"


def test_dropout_that_a_model_uses_elsewhere_is_not_moved() -> None:
    """Its probability may be changed there."""
    dropout = nn.Dropout(0.9)
    model = nn.ModuleDict({"run": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), dropout), "other": dropout})
    quantize_(model, INT8, keep_last=False)
    assert model["run"][2] is model["other"] is dropout
    epilogue = model["run"][0].epilogue
    assert (epilogue.activation, epilogue.dropout) == ("relu", 0)


def test_watched_identity_in_between_keeps_the_activation_where_it_is() -> None:
    model, mlp = gcn(), pyg.MLP([K, K, K], norm=None)
    for norm in (model.norms[0], mlp.norms[0]):
        norm.register_forward_hook(lambda *_: None)
    assert fused(model) == fused(mlp) == {}


def test_model_infers_layer_by_layer() -> None:
    model, x = quantize_(gcn(), None).eval(), torch.randn(N, K)
    out = x
    for layer in range(3):  # as BasicGNN.inference(), whose loader needs a library
        out = model.inference_per_layer(layer, out, EDGES, batch_size=N)
    torch.testing.assert_close(out, model(x, EDGES))


def test_layer_copied_out_of_its_model_is_plain() -> None:
    theirs = pyg.GCN(K, HIDDEN, 2, CLASSES, act="elu")
    model, x = quantize_(copy.deepcopy(theirs), None), torch.randn(N, K)
    assert model.convs[0](x, EDGES).min() > -1  # behind the ELU
    torch.testing.assert_close(copy.deepcopy(model.convs[0])(x, EDGES), theirs.convs[0](x, EDGES))
    torch.testing.assert_close(copy.deepcopy(model.act)(x), nn.functional.elu(x))
    assert summary(copy.deepcopy(model))["convs.0"].epilogue == "elu"


def test_part_of_a_fused_model_is_not_reverted_alone() -> None:
    model, x = quantize_(gcn(), None).eval(), torch.randn(N, K)
    expected = model(x, EDGES)
    message = r"expects a whole model to undo a conversion \(got a part, whose layer '.*' applies the activation"
    with pytest.raises(ValueError, match=f"'revert_' {message}"):
        revert_(model.convs)
    with pytest.raises(ValueError, match=f"'quantize_' {message}"):
        quantize_(model.convs, INT8, lambda _, name: name == "2")
    assert torch.equal(model(x, EDGES), expected)
    quantize_(model.convs[1], INT8)  # configured anew, it still applies it
    assert summary(model)["convs.1"].epilogue == "relu, dropout 0.5"
    assert type(revert_(model).act) is nn.ReLU


def test_a_layer_whose_forward_was_replaced_keeps_what_stands_behind_it() -> None:
    """As by code that wraps it on the instance: it runs no epilogue, and is no counterpart's."""
    x = torch.randn(N, K)
    for place in (0, 1):
        model = nn.Sequential(nn.Linear(K, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        wrapped, former = model[place], model[place].forward
        wrapped.forward = lambda *args, former=former: former(*args).abs() - 0.5
        expected = model(x)
        quantize_(model, None)
        assert torch.equal(model(x), expected)
        rows = {row.name: row for row in summary(model).rows}
        assert rows["0"].epilogue is None
        assert ("somebody replaced its forward" in str(rows["0"].reason)) == (place == 0)


def test_a_converted_layer_whose_forward_was_wrapped_is_configured_again() -> None:
    model, x = nn.Sequential(nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, CLASSES)), torch.randn(N, K)
    quantize_(model, None)
    former = model[0].forward
    model[0].forward = lambda *args: 2 * former(*args)
    expected = model(x)
    assert torch.equal(quantize_(model, None)(x), expected)
    assert quantize_(model, INT8, keep_last=False)[0].config == INT8


def test_what_is_within_a_layer_whose_forward_was_replaced_is_left() -> None:
    conv = pyg.GINConv(nn.Sequential(nn.Linear(K, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)))
    conv.forward = conv.forward
    model = nn.ModuleDict({"conv": conv, "last": nn.Linear(CLASSES, CLASSES)})
    quantize_(model, INT8, keep_last=False)
    assert [type(module) for module in conv.nn] == [nn.Linear, nn.ReLU, nn.Linear]
    assert type(model["last"]) is not nn.Linear


def test_a_subclass_of_a_layer_keeps_what_stands_behind_it() -> None:
    class Residual(QLinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    model, x = nn.Sequential(Residual(K, K, config=None), nn.ReLU(), nn.Linear(K, CLASSES)), torch.randn(N, K)
    expected = model(x)
    assert torch.equal(quantize_(model, None)(x), expected)
    assert not fused(model)
