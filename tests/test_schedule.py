"""``qgnn.schedule``: widths per epoch against lists made by hand and torch's own scheduler; states; targets."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import qgnn
from compress_cases import INT8
from compress_cases import Net as Dense
from graphs import GRAPHS
from qgnn import QConfig
from qgnn.formats import MSFP, MXFP4
from qgnn.nn import QGCNConv, QLinear
from qgnn.schedule import ActiveSchedule, PlateauSchedule, Schedule, StaticSchedule

EDGES, N = GRAPHS["random"]
DEFAULT = QConfig()


class Net(nn.Module):
    def __init__(self, config: QConfig | None = DEFAULT) -> None:
        super().__init__()
        self.conv, self.last = QGCNConv(8, 16, config=config), QLinear(16, 4, config=None)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.conv(x, edge_index).relu())


def widths(make: Callable[[Any], Schedule], losses: Sequence[float | Tensor | None]) -> list[int]:
    """The width that a function of the width had in each epoch, and would have in the next."""
    now: list[int] = []
    schedule = make(lambda bits: now.__setitem__(slice(None), [bits]))
    found = list(now)
    for loss in losses:
        schedule.step(loss=loss)
        found += now
    assert found == schedule.history
    assert schedule.last_epoch == len(losses)
    return found


@pytest.mark.parametrize(
    ("bits", "epochs", "expected"),
    [
        ((8, 6, 5, 4), 8, [8, 8, 6, 6, 5, 5, 4, 4]),
        ((8, 6, 5, 4), 10, [8, 8, 8, 6, 6, 5, 5, 5, 4, 4]),
        ([4, 8, 4], 4, [4, 4, 8, 4]),
        ((5,), 3, [5, 5, 5]),
    ],
)
def test_static_widths_of_each_epoch(bits: Any, epochs: int, expected: list[int]) -> None:
    """Parts begin with epoch ceil(j E / k); the last width stays."""
    found = widths(lambda target: StaticSchedule(target, bits, epochs), [None] * (epochs + 3))
    assert found == expected + [expected[-1]] * 4


def test_static_jumps_to_an_epoch() -> None:
    net = Net()
    schedule = StaticSchedule(net, (8, 4), 10)
    for epoch, bits in ((7, 4), (3, 8), (1000, 4)):
        schedule.step(epoch)
        assert (schedule.last_epoch, schedule.current_bits) == (epoch, bits)
        assert net.conv.config == QConfig(bits=bits)
    schedule.step(10)
    assert schedule.mean_bits == 6


# Means of five: 1.00, 0.96 | 0.90 | 0.50 | 0.50 | ... with an epoch behind a colon that decides.
CURVE = [1.0] * 5 + [0.96] * 5 + [0.9] * 5 + [0.5] * 5 + [0.5] * 5 + [0.1] * 5 + [7.0] * 10


def test_active_widths_of_a_loss_by_hand() -> None:
    """After 10 epochs 0.96 > 0.95; after 15 0.9 < 0.95 * 0.96 = 0.912; after 20 no; after 25 0.5 > 0.475; after 30 no;
    after 35 7 > 0.095: three raises, and a fourth after 40 were it not for ``stop``."""
    found = widths(lambda target: ActiveSchedule(target, 4, 7), CURVE)
    assert found == [4] * 10 + [5] * 15 + [6] * 10 + [7] * 6
    assert widths(lambda target: ActiveSchedule(target, 4, 8), CURVE)[-1] == 8
    assert widths(lambda target: ActiveSchedule(target, 8, 8), CURVE) == [8] * 41


def test_active_decides_by_strictly_more_than_its_patience() -> None:
    """Halves are exact: a mean of exactly half the one before counts as falling, whatever lies before these windows."""

    def make(target: Any) -> Schedule:
        return ActiveSchedule(target, 2, 8, window=2, patience=0.5, warmup=5)

    assert widths(make, [9.0, 1.0, 1.0, 0.5, 0.5]) == [2] * 6
    assert widths(make, [9.0, 1.0, 1.0, 0.5, 0.75, 0.75, 0.75, 0.0, 0.5]) == [2] * 5 + [3, 3, 4, 4, 4]
    assert widths(make, [1.0, 1.0, 1.0, float("nan"), 1.0]) == [2] * 6


def test_losses_on_the_device_are_copied_and_read_at_decisions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor that each epoch writes its loss to, as a replayed graph does."""
    loss, net = torch.zeros((), requires_grad=True), Net()
    schedule, reads = ActiveSchedule(net, 4, 8), []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: (reads.append(schedule.last_epoch), tolist(t))[1])
    for name in ("item", "__float__", "__bool__", "cpu"):
        monkeypatch.setattr(Tensor, name, None)
    for value in CURVE:
        loss.data.fill_(value)
        schedule.step(loss=loss)
    assert schedule.history == [4] * 10 + [5] * 15 + [6] * 10 + [7] * 5 + [8]
    assert reads == [9, 14, 19, 24, 29, 34, 39]


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 12), max_size=60),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
    st.sampled_from([1e-4, 0.0, 0.25]),
)
def test_plateau_counts_as_torch_does(
    losses: list[int], patience: int, cooldown: int, mode: str, threshold: float
) -> None:
    """Where torch halves a learning rate, a bit is added; up to the last one."""
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    options: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "mode": mode, "threshold": threshold}
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, eps=0, **options)
    expected = [3]
    for loss in losses:
        theirs.step(loss)
        expected.append(min(3 - round(torch.tensor(optimizer.param_groups[0]["lr"]).log2().item()), 8))
    assert widths(lambda target: PlateauSchedule(target, 3, 8, **options), losses) == expected


def test_plateau_reads_losses_no_more_often_than_it_can_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, reads = PlateauSchedule(Net(), 4, 8, patience=3), []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: (reads.append(schedule.last_epoch), tolist(t))[1])
    for loss in (5.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        schedule.step(loss=torch.tensor(loss))
    assert reads == [3, 7]
    assert schedule.history == [4] * 8 + [5]


SCHEDULES: dict[str, Callable[[Any], Schedule]] = {
    "static": lambda target: StaticSchedule(target, (4, 8, 6, 5), 38),
    "active": lambda target: ActiveSchedule(target, 4, 8),
    "plateau": lambda target: PlateauSchedule(target, 4, 8, patience=2, cooldown=1),
}


@pytest.mark.parametrize("as_tensor", [False, True], ids=["floats", "tensors"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_schedules_go_on_as_if_nothing_had_been(name: str, as_tensor: bool) -> None:
    """Whenever it is stopped; through JSON, into a new model of another width."""
    losses = [torch.tensor(loss) if as_tensor else loss for loss in CURVE]
    whole = SCHEDULES[name](Net())
    states = []
    for loss in losses:
        states.append(json.dumps(whole.state_dict()))
        whole.step(loss=loss)
    assert len(set(whole.history)) > 2
    for stop in (0, 7, 13, 22, 39):
        net = Net(QConfig(bits=2))
        resumed = SCHEDULES[name](net)
        resumed.load_state_dict(json.loads(states[stop]))
        assert net.conv.config == QConfig(bits=whole.history[stop])
        assert resumed.last_epoch == stop
        for epoch, loss in enumerate(losses[stop:], stop + 1):
            resumed.step(epoch, loss)
        assert resumed.history == whole.history
        assert resumed.state_dict() == whole.state_dict()


def test_states_are_copies() -> None:
    schedule = ActiveSchedule(Net(), 4, 8)
    state = schedule.state_dict()
    kept = copy.deepcopy(state)
    schedule.step(loss=1.0)
    assert state == kept
    schedule.load_state_dict(state)
    schedule.step(loss=1.0)
    assert state == kept


def test_mean_bits_is_that_of_the_epochs_done() -> None:
    schedule = StaticSchedule(Net(), (8, 4), 4)
    means = [schedule.mean_bits]
    for _ in range(5):
        schedule.step()
        means.append(schedule.mean_bits)
    assert means == [8, 8, 8, 20 / 3, 6, 28 / 5]


def test_layers_get_the_width_in_each_of_their_formats() -> None:
    config = QConfig(rounding="nearest", components={"weights": MSFP(7), "messages": None})
    net = Net(config)
    schedule = StaticSchedule(net, (6, 4), 2)
    assert net.last.config is None
    for bits in (6, 4):
        assert net.conv.config == config.with_bits(bits)
        assert net.conv.config.format_of("weights") == MSFP(bits - 1)
        schedule.step()


def test_compressor_gets_the_width_and_gives_back_its_bins() -> None:
    net, x = Dense(), torch.randn(48, 32)
    compressor = qgnn.compress_activations(**{**INT8, "bits": 2, "bins": "optimal"})
    schedule = StaticSchedule(compressor, (2, 8, 2), 3)
    saved = []
    for _ in range(3):
        with compressor as report:
            net(x).sum().backward()
        saved.append(report.saved_bytes)
        schedule.step()
    assert saved[0] == saved[2] < saved[1]
    assert compressor._blocks == qgnn.formats.Blocks(2, 1024, bins="optimal")


def test_compressor_rises_through_its_widths_and_targets_may_be_several() -> None:
    compressor, net, seen = qgnn.compress_activations(1), Net(), []
    schedule = PlateauSchedule([compressor, net, seen.append], 2, 8, patience=0)
    for _ in range(5):
        assert compressor.bits == schedule.current_bits
        assert net.conv.config == QConfig(bits=schedule.current_bits)
        schedule.step(loss=1.0)
    assert schedule.history == [2, 2, 4, 8, 8, 8]
    assert seen == [2, 4, 8]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_models_compile_once_for_each_width() -> None:
    """And compute with it: the results of eager code, in training and in eval mode."""
    net, x = Net(), torch.randn(N, 8)
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(net, fullgraph=True, backend=counter)
    schedule = StaticSchedule(run, (8, 4, 8, 4), 8)
    results: dict[tuple[int, bool], Tensor] = {}
    for _ in range(8):
        for training in (True, False):
            net.train(training)
            torch.manual_seed(1)
            out = run(x, EDGES)
            torch.manual_seed(1)
            assert torch.equal(out, net(x, EDGES))
            assert torch.equal(results.setdefault((schedule.current_bits, training), out), out)
        schedule.step()
    assert not torch.equal(results[8, False], results[4, False])
    assert counter.frame_count == len(results) == 4


def test_eval_mode_computes_with_the_width_of_the_epoch() -> None:
    """Whatever was remembered of an earlier one: codes of constant rows, configs."""
    net, x = Net().eval(), torch.randn(N, 8)
    schedule = StaticSchedule(net, (8, 3, 8), 3)
    for _ in range(3):
        other = Net(QConfig(bits=schedule.current_bits, rounding="nearest")).eval()
        other.load_state_dict(net.state_dict())
        assert torch.equal(net(x, EDGES), other(x.clone(), EDGES))
        schedule.step()


def test_repr_says_where_a_schedule_stands() -> None:
    schedule = StaticSchedule(Net(), (8, 4), 2)
    schedule.step()
    assert repr(schedule) == "StaticSchedule(bits=[8, 4], epochs=2, last_epoch=1, current_bits=4)"
    assert repr(ActiveSchedule(Net(), 4, 8)).startswith("ActiveSchedule(start=4, stop=8, window=5, patience=0.95, ")


def active() -> ActiveSchedule:
    return ActiveSchedule(Net(), 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: StaticSchedule(nn.Linear(2, 2), (8,), 1), ValueError, "model with quantized layers"),
        (lambda: StaticSchedule(Net(None), (8,), 1), ValueError, "model with quantized layers"),
        (lambda: StaticSchedule(3, (8,), 1), TypeError, r"expects a model, .* \(got 3\)"),
        (lambda: StaticSchedule([], (8,), 1), ValueError, "at least one target"),
        (lambda: StaticSchedule(Net(), 8, 1), TypeError, "'bits' to be a list"),
        (lambda: StaticSchedule(Net(), (), 1), ValueError, "at least one width"),
        (lambda: StaticSchedule(Net(), (8.0,), 1), TypeError, "'bits' to be an int"),
        (lambda: StaticSchedule(Net(), (8, 4), 1), ValueError, r"'epochs' at least 2 \(got 1\)"),
        (lambda: StaticSchedule(Net(), (8, 9), 2), ValueError, "from 2 to 8"),
        (lambda: StaticSchedule(Net(QConfig(fmt=MXFP4())), (4, 8), 2), ValueError, "codes of 4 bits only"),
        (
            lambda: StaticSchedule(qgnn.compress_activations(), (4, 3), 2),
            ValueError,
            r"one of \(1, 2, 4, 8\) \(got 3\)",
        ),
        (
            lambda: StaticSchedule(qgnn.compress_activations(budget_mib=1), (4,), 1),
            ValueError,
            "'compress_activations' chooses widths itself",
        ),
        (
            lambda: StaticSchedule(qgnn.compress_activations(4, block_size=2), (4, 1), 2),
            ValueError,
            "'block_size' to be a multiple of 8",
        ),
        (lambda: StaticSchedule(Net(), (8,), 1).step(-1), ValueError, "'epoch' to be at least 0"),
        (lambda: ActiveSchedule(Net(), 8, 4), ValueError, r"'start' to be at most 'stop' \(got 8 and 4\)"),
        (lambda: ActiveSchedule(Net(), 4, 8, warmup=9), ValueError, r"'warmup' at least 10 \(got 9\)"),
        (lambda: ActiveSchedule(Net(), 4, 8, patience="a"), TypeError, "'patience' to be a number"),
        (lambda: PlateauSchedule(Net(), 4, 8, mode="mean"), ValueError, "'mode' to be 'min' or 'max'"),
        (lambda: PlateauSchedule(Net(), 4, 8, threshold=-1), ValueError, "'threshold' of at least 0"),
        (lambda: PlateauSchedule(qgnn.compress_activations(), 3, 8), ValueError, r"\(1, 2, 4, 8\)"),
        (lambda: active().step(0.5), TypeError, "give a loss as 'loss=...'"),
        (lambda: active().step(0, 0.5), ValueError, r"each epoch in turn, now 'epoch' 1 \(got 0\)"),
        (lambda: active().step(), ValueError, "expects the epoch's loss"),
        (lambda: active().step(loss="a"), TypeError, "a number or a tensor"),
        (lambda: active().step(loss=torch.ones(2)), ValueError, "one real number"),
        (
            lambda: active().load_state_dict(StaticSchedule(Net(), (8,), 1).state_dict()),
            ValueError,
            "state of a ActiveSchedule",
        ),
    ],
)
def test_schedules_say_what_is_wrong(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_schedule_that_fails_leaves_its_target_alone() -> None:
    compressor, net = qgnn.compress_activations(2), Net()
    with pytest.raises(ValueError, match="got 3"):
        StaticSchedule([net, compressor], (4, 3), 2)
    assert (compressor.bits, net.conv.config) == (2, QConfig())
