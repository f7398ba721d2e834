"""Optimizers with 8- and 4-bit state, of torchao, train PyG's layers and ours. They run where torchao is installed
(extra ``optim``); torch.compile, which they go through, is left out: what they compute is the same."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCN, GraphSAGE

import qgnn
from qgnn.compress import GradientAccumulator

optim = pytest.importorskip("torchao.optim", exc_type=ImportError)

N, WIDTHS = 60, (80, 64, 5)
# How far the sum of five updates may be from that of AdamW. Among the largest values of a block, which make most of it,
# neighboring codes of 8 bits differ by a factor of at most 1.13, so that a first moment is off by at most 6 % and the
# root of a second by 3 %. With 4 bits they differ by a factor of up to 2.06: a third, and a sixth.
TOLERANCE = {"AdamW8bit": 0.1, "AdamW4bit": 0.5}

OPTIMIZERS = pytest.mark.parametrize("name", TOLERANCE)
MODELS = pytest.mark.parametrize("make", [GCN, GraphSAGE], ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def data() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(N, WIDTHS[0]), torch.randint(N, (2, 300)), torch.randint(WIDTHS[-1], (N,))


def model_of(make: Callable[..., nn.Module], is_quantized: bool) -> nn.Module:
    torch.manual_seed(1)
    model = make(WIDTHS[0], WIDTHS[1], 2, WIDTHS[2])
    return qgnn.quantize_(model, qgnn.QConfig()) if is_quantized else model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, ...], num_steps: int = 5) -> None:
    x, edge_index, y = data
    for number in range(num_steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x, edge_index), y).backward()
        optimizer.step()


def update(model: nn.Module, before: nn.Module) -> Tensor:
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return torch.cat([(p - q).detach().flatten() for p, q in pairs])


@OPTIMIZERS
@MODELS
@pytest.mark.parametrize("is_quantized", [False, True], ids=["pyg", "qgnn"])
def test_models_train_as_with_adamw(
    make: Callable[..., nn.Module], is_quantized: bool, name: str, data: tuple[Tensor, Tensor, Tensor]
) -> None:
    model = model_of(make, is_quantized)
    before, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-3)
    train(model, optimizer, data)
    train(other, torch.optim.AdamW(other.parameters(), lr=1e-3), data)
    expected = update(other, before)
    assert 0 < (update(model, before) - expected).norm() <= TOLERANCE[name] * expected.norm()
    coded = {p for p in model.parameters() if p.numel() >= 4096 and p.numel() % 256 == 0}
    for p, state in optimizer.state.items():
        assert (type(state["exp_avg"]) is not Tensor) == (p in coded)
    assert coded


def test_a_model_may_be_converted_when_it_has_its_optimizer(data: tuple[Tensor, Tensor, Tensor]) -> None:
    model = model_of(GCN, False)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    train(model, optimizer, data, 2)
    before = copy.deepcopy(model)
    qgnn.quantize_(model, qgnn.QConfig())
    train(model, optimizer, data, 2)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_a_checkpoint_goes_on(data: tuple[Tensor, Tensor, Tensor]) -> None:
    model = model_of(GCN, True)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    train(model, optimizer, data, 2)
    other = copy.deepcopy(model)
    loaded = optim.AdamW8bit(other.parameters(), lr=1e-3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer, data, 1)
    train(other, loaded, data, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_it_takes_gradients_of_an_accumulator(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, edge_index, y = data
    model = model_of(GCN, True)
    before = copy.deepcopy(model)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    accumulator = GradientAccumulator(model.parameters())
    for nodes in torch.arange(N).chunk(3):
        F.cross_entropy(model(x, edge_index)[nodes], y[nodes]).backward()
        accumulator.accumulate()
    accumulator.finish(divide_by=3)
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
