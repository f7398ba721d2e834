"""``compress.GradientAccumulator``: exact sums, coded sums, the mean over seeds, what may happen to a model."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN

import qgnn
from block_cases import error_bound
from op_checks import assert_unbiased
from qgnn.compress import GradientAccumulator
from qgnn.formats import Blocks
from statistics_checks import EPS

BLOCKS = Blocks(bits=8, block_size=64)


class Net(nn.Module):
    """One parameter that is coded from 100 values on, and one that is not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 33, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(7, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t() + self.bias).tanh()


def micro_batches(dtype: torch.dtype = torch.float32, number: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(number, 10, 33, generator=generator).to(dtype))


def accumulator_of(net: nn.Module, blocks: Blocks = BLOCKS) -> GradientAccumulator:
    return GradientAccumulator(net.named_parameters(), blocks, min_size=100)


def plain_sums(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Of torch's own accumulation."""
    net.zero_grad()
    for x in batches:
        net(x).sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def step_bound(grads: list[Tensor], blocks: Blocks) -> float:
    """What coding the sums of these can be off by: a step of each sum, which has the errors of those before it."""
    total, allowed = torch.zeros_like(grads[0], dtype=torch.float64), 0.0
    for grad in grads:
        total += grad
        extent = 2 * (float(total.abs().max()) + allowed)
        unit = 1 + 4 * torch.finfo(blocks.metadata_dtype).eps
        low, step = torch.tensor(extent / 2 * unit), torch.tensor(extent * unit**2 / (2**blocks.bits - 1))
        allowed += float(error_bound(low, step, blocks.bits, nearest=False)) + 4 * EPS * extent
    return allowed


# --- sums


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_are_exact_or_some_steps_off(bits: int, in_backward: bool) -> None:
    net, batches, blocks = Net(), micro_batches(), Blocks(bits, 64)
    exact = plain_sums(net, batches)
    each = [plain_sums(net, [x])["weight"] for x in batches]
    net.zero_grad()
    accumulator = accumulator_of(net, blocks)
    if in_backward:
        with accumulator.in_backward():
            for x in batches:
                net(x).sum().backward()
                assert net.weight.grad is net.bias.grad is None
        net(batches[0]).sum().backward()  # no more accumulated once the block has ended
        assert net.weight.grad is not None
        net.zero_grad()
    else:
        for x in batches:
            net(x).sum().backward()
            accumulator.accumulate()
            assert net.weight.grad is net.bias.grad is None
    accumulator.finish()
    assert torch.equal(net.bias.grad, exact["bias"])
    error = (net.weight.grad - exact["weight"]).abs().max()
    assert 0 < error <= step_bound(each, blocks)
    assert accumulator.nbytes == 0


def test_the_mean_over_seeds_is_the_sum() -> None:
    net, batches = Net(), micro_batches()
    exact = plain_sums(net, batches)
    each = []
    for x in batches:
        net.zero_grad()
        net(x).sum().backward()
        each.append(net.weight.grad)

    def draw(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        accumulator = GradientAccumulator([net.weight], Blocks(4, 32), min_size=1)
        for grad in each:
            net.weight.grad = grad
            accumulator.accumulate()
        accumulator.finish()
        return {"weight": net.weight.grad}

    assert_unbiased(draw, {"weight": exact["weight"]}, 300)


def test_what_is_pending_is_part_of_the_sum_and_needs_no_codes() -> None:
    net, batches = Net(), micro_batches()
    exact = plain_sums(net, batches[:1])
    net.zero_grad()
    accumulator = accumulator_of(net)
    net(batches[0]).sum().backward()
    accumulator.finish()
    assert all(torch.equal(p.grad, exact[name]) for name, p in net.named_parameters())
    accumulator.accumulate()
    accumulator.finish(divide_by=2)
    assert torch.equal(net.bias.grad, exact["bias"] / 2)
    torch.testing.assert_close(net.weight.grad, exact["weight"] / 2, rtol=0, atol=0.01 * exact["weight"].abs().max())


def test_gradients_handed_in_stay_as_they_are() -> None:
    net = Net()
    accumulator = accumulator_of(net)
    given = []
    for _ in range(3):
        given += [torch.randn_like(net.weight), torch.randn_like(net.bias)]
        net.weight.grad, net.bias.grad = given[-2:]
        accumulator.accumulate()
    accumulator.finish()
    assert all(grad._version == 0 for grad in given)


def test_each_addition_draws_new_numbers_from_the_generator() -> None:
    net, grad = Net(), torch.randn(7, 33)

    def coded() -> Tensor:
        accumulator = accumulator_of(net)
        net.weight.grad = grad
        accumulator.accumulate()
        accumulator.finish()
        return net.weight.grad

    torch.manual_seed(1)
    first = coded()
    assert not torch.equal(coded(), first)
    torch.manual_seed(1)
    assert torch.equal(coded(), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_of_other_types_are_made_in_fp32_or_better(dtype: torch.dtype) -> None:
    """Beside 1 the half types lose each 2**-12, but not their sum 2**-7. The offset of a constant block is at most
    2**-7 below (bf16), so that a step is that over 255, and each addition costs at most one."""
    net = Net(dtype)
    accumulator = accumulator_of(net)
    for grad in [1.0] + 32 * [2.0**-12]:
        net.bias.grad = torch.full_like(net.bias, grad)
        net.weight.grad = torch.full_like(net.weight, grad)
        accumulator.accumulate()
    accumulator.finish()
    assert net.weight.grad.dtype == net.bias.grad.dtype == dtype
    assert torch.equal(net.bias.grad, torch.full_like(net.bias, 1 + 2.0**-7).to(dtype))
    allowed = 33 * (2.0**-7 / 255 * (1 + 2.0**-7) + 8 * EPS) + torch.finfo(dtype).eps / 2
    assert ((net.weight.grad.double() - 1 - 2.0**-7).abs() <= allowed).all()


def test_poison_reaches_the_optimizer() -> None:
    net = Net()
    accumulator = accumulator_of(net)
    for _ in range(2):
        net.weight.grad = torch.ones(7, 33)
        net.weight.grad[0, 0] = torch.nan
        accumulator.accumulate()
    accumulator.finish()
    assert net.weight.grad.flatten()[:64].isnan().all()
    assert net.weight.grad.flatten()[64:].isfinite().all()


# --- memory


@pytest.mark.parametrize(("bits", "block_size", "metadata_dtype"), [(8, 64, torch.bfloat16), (4, 32, torch.float32)])
def test_bytes_are_those_of_codes_and_small_sums(bits: int, block_size: int, metadata_dtype: torch.dtype) -> None:
    net, x = Net(), micro_batches()[0]
    accumulator = accumulator_of(net, Blocks(bits, block_size, metadata_dtype=metadata_dtype))
    assert accumulator.nbytes == 0
    net(x).sum().backward()
    accumulator.accumulate()
    num_blocks = -(-7 * 33 // block_size)
    assert accumulator.nbytes == num_blocks * (block_size * bits // 8 + 2 * metadata_dtype.itemsize) + 7 * 4
    assert repr(accumulator) == f"GradientAccumulator(2 parameters, {accumulator.blocks}, {accumulator.nbytes} bytes)"
    accumulator.reset()
    assert accumulator.nbytes == 0
    accumulator.finish()
    assert net.weight.grad is net.bias.grad is None


def test_in_backward_no_two_gradients_are_there_at_once() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    accumulator = GradientAccumulator(layers.parameters(), BLOCKS, min_size=1)
    there = []
    for layer in layers:
        layer.weight.register_hook(lambda _: there.append(sum(p.grad is not None for p in layers.parameters())))
    with accumulator.in_backward():
        layers(torch.randn(3, 8)).sum().backward()
    assert there == [0, 0, 0, 0]


# --- what may happen to a model


def test_parameters_without_gradient_frozen_and_added() -> None:
    net, batches = Net(), micro_batches()
    unused = nn.Parameter(torch.ones(3))
    accumulator = GradientAccumulator([*net.parameters(), unused], BLOCKS, min_size=100)
    first = plain_sums(net, batches[:1])
    accumulator.accumulate()
    net.bias.requires_grad_(False)  # its sum stays
    added = nn.Parameter(torch.ones(2))
    accumulator.add_parameters([added])
    with accumulator.in_backward():
        (net(batches[1]).sum() + added.sum()).backward()
    accumulator.finish()
    assert torch.equal(net.bias.grad, first["bias"])
    assert torch.equal(added.grad, torch.ones(2))
    assert unused.grad is None


def test_a_pyg_model_of_lazy_layers_and_a_converted_one() -> None:
    edge_index = torch.randint(20, (2, 60))
    x = torch.randn(20, 9)
    for config in (None, qgnn.QConfig()):
        model = GCN(-1, 16, 2, 3)
        accumulator = GradientAccumulator(model.named_parameters(), BLOCKS, min_size=40)
        if config is not None:
            qgnn.quantize_(model, config)
        for _ in range(2):
            model(x, edge_index).square().mean().backward()
            accumulator.accumulate()
        accumulator.finish(divide_by=2)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_gradient_with_a_graph_of_its_own_lets_it_go() -> None:
    net = Net()
    accumulator = accumulator_of(net)
    for x in micro_batches()[:2]:
        net.weight.grad, net.bias.grad = torch.autograd.grad(net(x).sum(), [*net.parameters()], create_graph=True)
        accumulator.accumulate()
    assert not any(kept.requires_grad for kept in [accumulator._sums["bias"], *accumulator._sums["weight"].tensors])
    accumulator.finish()
    assert not net.weight.grad.requires_grad
    assert not net.bias.grad.requires_grad


def test_a_checkpoint_goes_on_where_it_was_made() -> None:
    net, batches = Net(), micro_batches()
    accumulator = accumulator_of(net)
    for x in batches[:2]:
        net(x).sum().backward()
        accumulator.accumulate()
    file = io.BytesIO()
    torch.save(accumulator.state_dict(), file)
    file.seek(0)
    other = accumulator_of(net)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.nbytes == accumulator.nbytes
    found = []
    for each in (accumulator, other):
        torch.manual_seed(3)
        net.zero_grad()
        net(batches[2]).sum().backward()
        each.accumulate()
        each.finish()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_block_length_that_was_chosen_is_loaded() -> None:
    net = Net()
    accumulator = accumulator_of(net, Blocks(8))
    net.weight.grad = torch.randn(7, 33)
    accumulator.accumulate()
    other = accumulator_of(net, Blocks(8))
    other.load_state_dict(accumulator.state_dict())
    accumulator.finish()
    expected, net.weight.grad = net.weight.grad, None
    other.finish()
    assert torch.equal(net.weight.grad, expected)


# --- errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GradientAccumulator([]), ValueError, r"expects 'parameters' \(got none\)"),
        (lambda: GradientAccumulator([3]), TypeError, r"leaf tensors of a floating-point type \(got int as '0'\)"),
        (lambda: GradientAccumulator([torch.arange(3)]), TypeError, r"\(got torch.int64, leaf: True as '0'\)"),
        (lambda: GradientAccumulator([nn.Parameter(torch.ones(3)) * 2]), TypeError, r"torch.float32, leaf: False"),
        (lambda: GradientAccumulator(2 * [nn.Parameter(torch.ones(3))]), ValueError, r"each parameter once \(got '1'"),
        (
            lambda: GradientAccumulator([("w", nn.Parameter(torch.ones(3))), ("w", nn.Parameter(torch.ones(3)))]),
            ValueError,
            r"each parameter once \(got 'w' again\)",
        ),
        (lambda: accumulator_of(Net(), 8), TypeError, r"'blocks' to be qgnn.formats.Blocks \(got 8\)"),
        (lambda: accumulator_of(Net(), Blocks(8, projection=8)), ValueError, r"without a projection.*got int8-rp8"),
    ],
)
def test_rejects(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_sparse_gradients_are_refused_by_name_and_nothing_is_lost() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    head = nn.Linear(4, 2)
    accumulator = GradientAccumulator([*head.named_parameters(), ("table", table.weight)])
    head(table(torch.tensor([1, 2]))).sum().backward()
    for call in (accumulator.accumulate, accumulator.finish):
        with pytest.raises(ValueError, match=r"layout torch.sparse_coo of 'table'\); use sparse=False"):
            call()
    assert accumulator.nbytes == head.weight.nbytes + head.bias.nbytes
    table.weight.grad = None
    accumulator.finish()
    assert torch.equal(head.bias.grad, torch.full((2,), 2.0))


def test_another_shape_is_refused_and_not_broadcast() -> None:
    net = Net()
    accumulator = accumulator_of(net)
    net.bias.grad, net.weight.grad = torch.ones(7), torch.ones(7, 33)
    accumulator.accumulate()
    net.bias.data = torch.ones(1)
    net.bias.grad = torch.ones(1)
    with pytest.raises(
        ValueError, match=r"of 'bias' of shape \[7\] on cpu, as before \(got \[1\] on cpu\); call 'reset'"
    ):
        accumulator.finish()
    assert net.weight.grad is None


def test_a_state_of_another_format_or_model_is_refused() -> None:
    net = Net()
    accumulator = accumulator_of(net)
    other = accumulator_of(net, replace(BLOCKS, bits=4))
    with pytest.raises(ValueError, match=r"a state of int4-g64 \(got int8-g64\); make it with the same 'blocks'"):
        other.load_state_dict(accumulator.state_dict())
    net.bias.grad = torch.ones(7)
    accumulator.accumulate()
    with pytest.raises(ValueError, match=r"sums of its parameters \(got \['bias'\]\)"):
        GradientAccumulator([net.bias], BLOCKS).load_state_dict(accumulator.state_dict())
    net.weight.grad = torch.ones_like(net.weight)
    accumulator.accumulate()
    for name in ("weight", "bias"):  # codes, and a sum of few values
        state = accumulator.state_dict()
        state["sums"] = {name: state["sums"][name]}
        changed = GradientAccumulator({name: torch.nn.Parameter(torch.ones(3))}.items(), BLOCKS)
        with pytest.raises(ValueError, match=rf"a sum of '{name}' of shape \[3\] \(got \[.*\]\); load the state into"):
            changed.load_state_dict(state)


def test_a_state_is_that_of_when_it_was_taken() -> None:
    net = Net()
    accumulator = accumulator_of(net)
    states = []
    for x in micro_batches(number=2):
        net(x).sum().backward()
        accumulator.accumulate()
        state = accumulator.state_dict()["sums"]
        states.append((state, copy.deepcopy(state)))
    for state, then in states:
        assert torch.equal(state["bias"]["sum"], then["bias"]["sum"])
        assert torch.equal(state["weight"]["packed"], then["weight"]["packed"])
    assert not torch.equal(states[0][0]["bias"]["sum"], states[1][0]["bias"]["sum"])
