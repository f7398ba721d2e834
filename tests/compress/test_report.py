"""What is kept, counted in three ways; and what a user may say about it."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as pyg

import qgnn
from graphs import GRAPHS
from qgnn.cli.measure import SavedBytes
from qgnn.compress import Report, SavedTensor, compress_activations
from qgnn.memory import MIB

EDGES, N = GRAPHS["random"]
K, HIDDEN = 12, 16

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCN(K, HIDDEN, 3, 4, dropout=0.5),
    "sage": lambda: pyg.GraphSAGE(K, HIDDEN, 3, 4, dropout=0.5, norm="batch_norm"),
    "gin": lambda: pyg.GIN(K, HIDDEN, 2, 4, act="leaky_relu"),
    "gat": lambda: pyg.GAT(K, HIDDEN, 3, 4, dropout=0.5, heads=2, act="elu"),
    "gcn/gelu": lambda: pyg.GCN(K, HIDDEN, 2, 4, act="gelu", norm="layer_norm", jk="cat"),
    "gat/max": lambda: pyg.GAT(K, HIDDEN, 2, 4, jk="max", act="sigmoid"),
    "pna": lambda: pyg.PNA(K, HIDDEN, 2, 4, aggregators=["mean", "max"], scalers=["identity"], deg=torch.arange(4)),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x, EDGES), torch.arange(N) % 4)


def nodes(root: Any) -> Iterator[Any]:
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [next_node for next_node, _ in node.next_functions]


def walked_bytes(loss: Tensor, alive: set[int]) -> int:
    """Bytes of distinct storages that the nodes of a graph hold."""
    storages = {}
    for node in nodes(loss.grad_fn):
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names] + list(getattr(node, "saved_tensors", ()))
        for value in values:
            for t in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in alive:
                    storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(storages.values())


def living() -> dict[int, int]:
    """Bytes of all storages that Python knows of, by identity."""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.layout == torch.strided:
            storage = item.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_original_bytes_are_what_plain_torch_keeps(name: str) -> None:
    model, x = MODELS[name](), torch.randn(N, K)
    loss_of(model, x)  # whatever is made once
    counter = SavedBytes()
    with counter.count():
        loss_of(model, x)
    gc.collect()
    living_tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    alive = {t.untyped_storage().data_ptr() for t in living_tensors if t.layout == torch.strided}
    del living_tensors
    loss = loss_of(model, x)
    walked = walked_bytes(loss, alive)
    del loss
    for options in ({}, {"exclude": "*"}, {"min_size": 10**6}):
        with compress_activations(**{"min_size": 1, **options}) as report:
            loss_of(model, x)
        assert report.original_bytes == round(counter.mib * MIB) == walked, options


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"projection": 4, "block_size": 64}, {"exclude": "*"}])
@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_what_lives_after_the_forward_pass(name: str, options: dict[str, Any]) -> None:
    model, x = MODELS[name](), torch.randn(N, K)
    loss_of(model, x)
    before = living()
    with compress_activations(**{"min_size": 1, **options}) as report:
        loss = loss_of(model, x)
    after = {place: size for place, size in living().items() if place not in before}
    del after[loss.untyped_storage()._cdata]
    assert report.saved_bytes == sum(after.values())
    assert report.saved_bytes == sum(t.saved_bytes for t in report.by_tensor)
    assert report.original_bytes == sum(t.original_bytes for t in report.by_tensor)
    assert report.ratio == report.original_bytes / report.saved_bytes
    loss.backward()


def test_layers_of_ours() -> None:
    config = qgnn.QConfig(save="fp32")
    model = nn.ModuleList([qgnn.nn.QSAGEConv(K, HIDDEN, config=None), qgnn.nn.QGCNConv(HIDDEN, 4, config=config)])
    x = torch.randn(N, K)

    def run() -> Tensor:
        return model[1](model[0](x, EDGES).relu(), EDGES).sum()

    run()
    counter = SavedBytes()
    with counter.count():
        exact = torch.autograd.grad(run(), model[0].lin_l.weight)[0]
    with compress_activations(8, min_size=1) as report:
        coded = torch.autograd.grad(run(), model[0].lin_l.weight)[0]
    assert report.original_bytes == round(counter.mib * MIB)
    assert any(t.op.startswith("qgnn::") for t in report.by_tensor)
    assert (coded - exact).norm() <= 0.05 * exact.norm()


def test_report_prints() -> None:
    model, x = MODELS["gat"](), torch.randn(N, K)
    with compress_activations(bits=2, block_size=64, projection=4, min_size=1) as report:
        loss_of(model, x)
    text = str(report)
    for part in ("int2-rp4-g64", "convs.1", "elu", "int2-g64 twice", "1 bit", "MiB kept", "times smaller"):
        assert part in text or part == "int2-g64 twice"
    assert f"{report.saved_bytes / MIB:.3f}" in text
    assert str(Report()).count("1.0 times smaller") == 1


# ---- what is kept as it is


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, K))
        self.head = nn.Linear(K, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x * 1).exp())


def kept(**options: Any) -> list[tuple[str, str]]:
    net = Net()
    exclude = options.pop("exclude", ())
    rules = [rule(net) if getattr(rule, "of_net", False) else rule for rule in exclude]
    with compress_activations(bits=2, **{"min_size": 1, **options}, exclude=rules) as report:
        net(torch.randn(N, K)).sum().backward()
    return [(t.op, t.module) for t in report.by_tensor if t.format in ("as it is", "shared")]


def of_net(choose: Callable[[Net], nn.Module]) -> Callable[[Net], nn.Module]:
    choose.of_net = True  # type: ignore[attr-defined]
    return choose


EXCLUDED: list[tuple[list[Any], list[tuple[str, str]]]] = [
    ([], []),
    (["gelu"], [("gelu", "body.1")]),
    (["lin*"], [("linear", "body.0"), ("linear", "body.2"), ("linear", "head")]),
    (["body.?"], [("linear", "body.0"), ("gelu", "body.1"), ("linear", "body.2")]),
    (["head", "exp"], [("exp", ""), ("linear", "head")]),
    ([of_net(lambda net: net.body)], [("linear", "body.0"), ("gelu", "body.1"), ("linear", "body.2")]),
    ([lambda entry: entry.shape[-1] == K and entry.op == "exp"], [("exp", "")]),
    (["*"], [("linear", "body.0"), ("gelu", "body.1"), ("linear", "body.2"), ("exp", ""), ("linear", "head")]),
]


@pytest.mark.parametrize("case", range(len(EXCLUDED)))
def test_excluded(case: int) -> None:
    exclude, expected = EXCLUDED[case]
    # What exp saves is what the head saves: kept by both, it is counted once.
    assert kept(exclude=exclude) == expected


def test_small_tensors_are_kept() -> None:
    assert kept(min_size=N * K) == []
    assert len(kept(min_size=N * K + 1)) == 5
    assert not [op for op, _ in kept(min_size=0)]


def test_redrawn_dropout_keeps_a_seed() -> None:
    x = torch.randn(N, 100, requires_grad=True)
    with compress_activations(min_size=1, redraw_dropout=True) as report:
        y = F.dropout(x * 1, 0.5)
        assert torch.equal(F.dropout(x * 1, 0.5, training=False), x)
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0) * 2.0)
    assert 0.4 < float((y != 0).float().mean()) < 0.6  # 5000 elements: 14 deviations
    assert [(t.op, t.original_bytes, t.saved_bytes) for t in report.by_tensor] == [("dropout", x.nbytes, 8)]
    with compress_activations(min_size=1, redraw_dropout=True):
        torch.testing.assert_close(F.dropout(x * 1, 2.0**-40), x)  # rarer than one number of 65,536: torch's


def test_empty_tensors_scalars_and_values_that_are_not_finite() -> None:
    for shape in ((), (0,), (0, 3), (3, 0, 2), (1,), (1, 1), (1, 5), (5, 1)):
        results = []
        for options in (None, {"bits": 8, "min_size": 0, "metadata_dtype": torch.float32}):
            x = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape)
            x.requires_grad_()
            if options is None:
                y = F.gelu(F.relu(x * 2) * x).exp() * x
            else:
                with compress_activations(**options):
                    y = F.gelu(F.relu(x * 2) * x).exp() * x
            y.sum().backward()
            results.append((y, x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.allclose(results[0][1], results[1][1], atol=0.2)
    x = torch.tensor(
        [[float("nan"), float("inf"), -float("inf"), 1.0, -0.0, 1e-40, -1e30, 2.0]] * 4, requires_grad=True
    )
    for f in (F.relu, F.leaky_relu, F.elu, F.gelu, torch.exp, lambda t: t * t, lambda t: t.softmax(-1)):
        with compress_activations(min_size=1):
            y = f(x * 1)
            y.sum().backward()
        torch.testing.assert_close(y, f(x * 1), rtol=0, atol=0, equal_nan=True)


def test_complex_values_are_kept() -> None:
    x = torch.randn(N, K, dtype=torch.complex64, requires_grad=True)
    with compress_activations(min_size=1) as report:
        y = torch.tanh(x * x) * x
    y.abs().sum().backward()
    gradient, x.grad = x.grad, None
    (torch.tanh(x * x) * x).abs().sum().backward()
    assert torch.equal(x.grad, gradient)
    assert {t.format for t in report.by_tensor} <= {"as it is", "shared"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 3}, ValueError, "'bits'"),
        ({"bits": 2.0}, TypeError, "'bits'"),
        ({"block_size": 3}, ValueError, "'block_size'"),
        ({"projection": 1}, ValueError, "'projection'"),
        ({"bins": "other"}, ValueError, "'bins'"),
        ({"seed": 1.5}, TypeError, "'compress_activations' expects 'seed' to be an int"),
        ({"min_size": None}, TypeError, "'compress_activations' expects 'min_size' to be an int"),
        ({"metadata_dtype": torch.int8}, TypeError, "'metadata_dtype'"),
        ({"exclude": 3}, TypeError, "'exclude' to hold names, modules or predicates"),
        ({"exclude": ["linear", 3]}, TypeError, "'exclude' to hold names, modules or predicates"),
        ({"exclude": nn.ReLU}, TypeError, "; give the modules of that class"),
        ({"block_rows": 1.5}, TypeError, "'compress_activations' expects 'block_rows' to be an int"),
        ({"block_rows": True}, TypeError, "'compress_activations' expects 'block_rows' to be an int"),
        ({"reestimate_every": 2.5}, TypeError, "'compress_activations' expects 'reestimate_every' to be an int"),
        ({"budget_mib": "64"}, TypeError, "'compress_activations' expects 'budget_mib' to be a number or None"),
        ({"budget_mib": 1, "block_size": 12}, ValueError, "'block_size'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compress_activations(**options)


def test_saved_tensor_of_a_predicate() -> None:
    seen: list[SavedTensor] = []
    with compress_activations(min_size=1, exclude=lambda entry: seen.append(entry)):
        F.gelu(nn.Linear(K, K)(torch.randn(N, K) * 1))
    assert {(t.op, t.shape, t.dtype) for t in seen} == {(op, (N, K), torch.float32) for op in ("linear", "gelu")}
