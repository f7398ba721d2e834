"""QGCNConv as a module: wherever PyG's GCNConv stands, ours can stand, and the reverse."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCN, GCNConv, Linear, Sequential
from torch_geometric.typing import OptTensor

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, passes
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import QGCNConv

EDGES, N = GRAPHS["power_law"]
K, M = 12, 6
NEAREST = QConfig(rounding="nearest")


def test_gcn_conv_takes_every_argument_of_pyg() -> None:
    ours = inspect.signature(QGCNConv.__init__).parameters
    theirs = inspect.signature(GCNConv.__init__).parameters
    assert list(ours)[: len(theirs) - 1] == list(theirs)[:-1]  # all but **kwargs, in the same order
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    assert set(ours) - set(theirs) == {"config", "epilogue"}
    assert list(inspect.signature(QGCNConv.forward).parameters) == list(inspect.signature(GCNConv.forward).parameters)
    assert issubclass(QGCNConv, GCNConv)


def test_gcn_conv_rejects_what_pyg_rejects() -> None:
    with pytest.raises(ValueError, match="'QGCNConv' does not support adding self-loops"):
        QGCNConv(K, M, add_self_loops=True, normalize=False)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        QGCNConv(K, M, no_such_argument=1)


@pytest.mark.parametrize("config", [{"bits": 8}, 8, "int8", QConfig])
def test_gcn_conv_rejects_a_config_of_another_type(config: Any) -> None:
    with pytest.raises(TypeError, match=r"'QGCNConv' expects 'config' to be a QConfig or None \(got .*write config="):
        QGCNConv(K, M, config=config)


def test_gcn_conv_rejects_block_scales_and_unknown_aggregations() -> None:
    with pytest.raises(ValueError, match=r"'QGCNConv' expects granularity 'row' or 'tensor' \(got 'block'\)"):
        QGCNConv(K, M, config=QConfig(granularity="block"))
    with pytest.raises(ValueError, match=r"expects 'aggr' to be one of .* \(got 'max'\); .*config=None"):
        QGCNConv(K, M, aggr="max")


def test_gcn_conv_serves_other_aggregations_in_full_precision() -> None:
    theirs, ours = GCNConv(K, M, aggr="max"), QGCNConv(K, M, aggr="max", config=None)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(N, K)
    assert_same_pass(passes(ours, x, EDGES), passes(theirs, x, EDGES))


@pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])
@pytest.mark.parametrize("bias", [True, False])
def test_gcn_conv_shares_a_state_dict_with_pyg(config: QConfig | None, bias: bool) -> None:
    theirs, ours = GCNConv(K, M, bias=bias), QGCNConv(K, M, bias=bias, config=config)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    ours.reset_parameters()
    assert not torch.equal(ours.lin.weight, theirs.lin.weight)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(ours.lin.weight, theirs.lin.weight)


def test_gcn_conv_starts_from_the_same_parameters_as_pyg() -> None:
    torch.manual_seed(3)
    theirs = GCNConv(K, M)
    torch.manual_seed(3)
    ours = QGCNConv(K, M)
    assert torch.equal(ours.lin.weight, theirs.lin.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_gcn_conv_takes_a_lazy_size(config: QConfig | None) -> None:
    conv = QGCNConv(-1, M, config=config)
    theirs = GCNConv(-1, M)
    x = torch.randn(N, K)
    conv(x, EDGES), theirs(x, EDGES)
    assert conv.lin.weight.shape == (M, K)
    assert conv.lin.in_channels == K
    assert conv.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(conv.state_dict())
    fresh = QGCNConv(-1, M, config=config)  # a checkpoint sets the size, too
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh(x, EDGES), conv(x, EDGES))
    if config is None:
        torch.testing.assert_close(conv(x, EDGES), theirs(x, EDGES))


def test_gcn_conv_with_a_lazy_size_stays_quantized_after_the_first_call() -> None:
    conv = QGCNConv(-1, M)
    for _ in range(2):
        with trace() as record:
            conv(torch.randn(N, K), EDGES).sum().backward()
        assert record.ops["matmul.forward"]["format"] == "int8"


def test_gcn_conv_repr_tells_sizes_and_config() -> None:
    assert repr(QGCNConv(K, M, config=None)) == f"QGCNConv({K}, {M}, config=None)"
    text = repr(QGCNConv(K, M, config=QConfig(bits=4)))
    assert text.startswith(f"QGCNConv({K}, {M}, config=QConfig(bits=4,")
    assert text.count("(") == text.count(")")


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
@pytest.mark.parametrize("cached", [False, True])
def test_gcn_conv_survives_copy_and_pickle_after_a_pass(config: QConfig | None, cached: bool) -> None:
    conv = QGCNConv(K, M, cached=cached, config=config)
    x = torch.randn(N, K)
    expected = passes(conv, x, EDGES)
    file = io.BytesIO()
    torch.save(conv, file)
    file.seek(0)
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), torch.load(file, weights_only=False)):
        assert twin.config == config
        assert_equal_pass(passes(twin, x, EDGES), expected)


def test_gcn_conv_resets_its_parameters() -> None:
    conv = QGCNConv(K, M)
    with torch.no_grad():
        conv.bias.fill_(3.0)
        before = conv.lin.weight.clone()
    conv.reset_parameters()
    assert conv.bias.abs().max() == 0
    assert not torch.equal(conv.lin.weight, before)


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16)])
@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_gcn_conv_moves_to_another_type_after_a_pass(move: Any, config: QConfig | None) -> None:
    conv = QGCNConv(K, M, config=config)
    x, weight = torch.randn(N, K), torch.rand(EDGES.shape[1])
    expected = conv(x, EDGES, weight).detach()
    conv = move(conv)
    dtype = conv.lin.weight.dtype
    out = conv(x.to(dtype), EDGES, weight)  # the fp32 edge weights do not decide the type
    assert out.dtype == dtype
    out.sum().backward()
    assert conv.lin.weight.grad.dtype == conv.bias.grad.dtype == dtype
    # operands, hidden rows and output are rounded to the type; codes may flip by a step of 1/127
    step = 0 if config is None else 2 / 127
    bound = (8 * torch.finfo(dtype).eps + step) * expected.abs().max()
    assert (out.float() - expected).abs().max() < bound
    assert torch.nn.Sequential(conv).to("meta")[0].lin.weight.device.type == "meta"


def test_gcn_conv_calls_message_hooks() -> None:
    conv, theirs = QGCNConv(K, M), GCNConv(K, M)
    theirs.load_state_dict(conv.state_dict())
    x = torch.randn(N, K)
    seen: list[str] = []
    registrations = {
        "propagate_pre": conv.register_propagate_forward_pre_hook,
        "propagate": conv.register_propagate_forward_hook,
        "message_pre": conv.register_message_forward_pre_hook,
        "message": conv.register_message_forward_hook,
        "aggregate_pre": conv.register_aggregate_forward_pre_hook,
        "aggregate": conv.register_aggregate_forward_hook,
    }
    for name, register in registrations.items():
        handle = register(lambda *_, name=name: seen.append(name))
        assert_same_pass(passes(conv, x, EDGES), passes(theirs, x, EDGES))
        assert seen == [name]
        handle.remove()
        seen.clear()
    with trace() as record:  # without hooks the quantized path is back
        conv(x, EDGES)
    assert record.ops["spmm.forward"]["format"] == "int8"


def test_gcn_conv_lets_a_message_hook_change_messages() -> None:
    conv = QGCNConv(K, M, bias=False)
    conv.register_message_forward_hook(lambda module, inputs, out: torch.zeros_like(out))
    assert conv(torch.randn(N, K), EDGES).abs().max() == 0


@pytest.mark.parametrize("kind", ["pre", "forward", "backward", "backward_pre"])
def test_gcn_conv_calls_hooks_on_its_linear(kind: str) -> None:
    conv = QGCNConv(K, M)
    seen: list[str] = []
    register = {
        "pre": conv.lin.register_forward_pre_hook,
        "forward": conv.lin.register_forward_hook,
        "backward": conv.lin.register_full_backward_hook,
        "backward_pre": conv.lin.register_full_backward_pre_hook,
    }[kind]
    register(lambda *_: seen.append(kind))
    conv(torch.randn(N, K, requires_grad=True), EDGES).sum().backward()
    assert seen == [kind]


def test_gcn_conv_calls_its_own_hooks_and_stays_quantized() -> None:
    conv = QGCNConv(K, M)
    seen: list[str] = []
    conv.register_forward_pre_hook(lambda *_: seen.append("pre"))
    conv.register_forward_hook(lambda *_: seen.append("forward"))
    conv.register_full_backward_hook(lambda *_: seen.append("backward"))
    with trace() as record:
        conv(torch.randn(N, K, requires_grad=True), EDGES).sum().backward()
    assert seen == ["pre", "forward", "backward"]
    assert record.ops["spmm.backward"]["format"] == "int8"


class TwoLayers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv1 = QGCNConv(K, 16, **options)
        self.conv2 = QGCNConv(16, 3, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.conv2(self.conv1(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("after_parent", [False, True])
def test_gcn_conv_can_be_explained(weighted: bool, after_parent: bool) -> None:
    model = TwoLayers()
    if after_parent:  # PyG generates code for a class at its first use, and a subclass inherits that code

        class Child(QGCNConv):
            pass

        model.conv1, model.conv2 = Child(K, 16), Child(16, 3)
    explainer = Explainer(
        model,
        algorithm=GNNExplainer(epochs=2),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )
    options = {"edge_weight": torch.rand(EDGES.shape[1])} if weighted else {}
    explanation = explainer(torch.randn(N, K), EDGES, index=3, **options)
    assert explanation.edge_mask.shape == (EDGES.shape[1],)
    assert (explanation.edge_mask > 0).any()
    assert (explanation.node_mask > 0).any()
    with trace() as record:  # and is quantized again afterwards
        model(torch.randn(N, K), EDGES)
    assert record.ops["spmm.forward"]["format"] == "int8"


def test_gcn_conv_refuses_a_graph_while_somebody_listens() -> None:
    conv = QGCNConv(K, M)
    conv.register_message_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match=r"expects 'edge_index' as a tensor where PyG's own path has to run: .*hooks.* \(got a Graph\)"
    ):
        conv(torch.randn(N, K), Graph.from_edge_index(EDGES, N))


def test_gcn_conv_fits_into_pyg_sequential() -> None:
    model = Sequential(
        "x, edge_index",
        [(QGCNConv(K, 16), "x, edge_index -> x"), nn.ReLU(inplace=True), (QGCNConv(16, M), "x, edge_index -> x")],
    )
    with trace() as record:
        model(torch.randn(N, K), EDGES).sum().backward()
    assert record.ops["spmm.forward"]["calls"] == 2
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gcn_conv_replaces_the_layers_of_a_pyg_model() -> None:
    class QGCN(GCN):
        def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> QGCNConv:
            return QGCNConv(in_channels, out_channels, **kwargs)

    theirs = GCN(K, 16, num_layers=3, out_channels=M, jk="cat")
    exact, ours = QGCN(K, 16, 3, M, jk="cat", config=None), QGCN(K, 16, 3, M, jk="cat")
    exact.load_state_dict(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(N, K)
    expected = passes(theirs, x, EDGES)
    assert_same_pass(passes(exact, x, EDGES), expected)
    with trace() as record:
        actual = passes(ours, x, EDGES)
    assert record.ops["spmm.forward"]["format"] == record.ops["spmm.backward"]["format"] == "int8"
    assert (actual["out"] - expected["out"]).abs().max() < 0.1 * expected["out"].abs().max()


def test_gcn_conv_can_be_subclassed() -> None:
    class Doubled(QGCNConv):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
            return 2 * super().forward(x, edge_index, edge_weight)

    conv, doubled = QGCNConv(K, M, config=NEAREST), Doubled(K, M, config=NEAREST)
    doubled.load_state_dict(conv.state_dict())
    x = torch.randn(N, K)
    assert torch.equal(doubled(x, EDGES), 2 * conv(x, EDGES))
    with pytest.raises(TypeError, match="'Doubled' expects 'config'"):
        Doubled(K, M, config=8)


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_gcn_conv_calls_a_message_that_a_subclass_overrides(config: QConfig | None) -> None:
    class Silent(QGCNConv):
        def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:
            return torch.zeros_like(x_j)

    assert Silent(K, M, config=config)(torch.randn(N, K), EDGES).abs().max() == 0


def test_gcn_conv_runs_another_module_in_place_of_its_linear() -> None:
    conv, theirs = QGCNConv(K, M), GCNConv(K, M)
    conv.lin = theirs.lin = nn.Sequential(Linear(K, 8), nn.ReLU(), Linear(8, M))
    x = torch.randn(N, K)
    assert_same_pass(passes(conv, x, EDGES), passes(theirs, x, EDGES))


def test_gcn_conv_takes_features_that_are_quantized_already() -> None:
    conv = QGCNConv(K, M, config=NEAREST)
    x = torch.randn(N, K)
    quantized = functional.quantize(x, NEAREST)
    out = conv(quantized, EDGES)
    assert torch.equal(out, conv(x, EDGES))
    out.sum().backward()
    grad = conv.lin.weight.grad.clone()
    conv.zero_grad()
    conv(x, EDGES).sum().backward()
    assert torch.equal(conv.lin.weight.grad, grad)
    with trace() as record:
        conv(quantized, EDGES)
    assert record.ops["quantize.forward"]["calls"] == 1  # the weight alone
    exact = QGCNConv(K, M, config=None)
    exact.load_state_dict(conv.state_dict())
    torch.testing.assert_close(exact(quantized, EDGES), exact(quantized.dequantize(), EDGES))
    lazy = QGCNConv(-1, M)
    lazy(quantized, EDGES)
    assert lazy.lin.weight.shape == (M, K)
