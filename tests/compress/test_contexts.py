"""What else of torch's somebody may open around, within or behind a block."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from compress_cases import INT2, INT8, K, N, Net, error, gradient, loss_of, nothing_is_open
from qgnn.compress import compress_activations

# ---- other things of torch's within the block


def test_without_gradients_nothing_is_kept(net: Net, x: Tensor) -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with compress_activations(**INT2) as report, context:
            torch.manual_seed(1)
            y = net(x)
        torch.manual_seed(1)
        with torch.no_grad():
            assert torch.allclose(net(x), y)
        assert not report.by_tensor


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_within_the_block_keeps_what_it_keeps(net: Net, x: Tensor, reentrant: bool, inside: bool) -> None:
    x.requires_grad_()
    w = torch.randn(N, K)

    def part(h: Tensor) -> Tensor:
        return F.dropout(F.relu(F.gelu(net.first(h)).softmax(-1)), 0.3)

    def step() -> Tensor:
        return checkpoint(part, x * w, use_reentrant=reentrant).square().sum()

    def compressed() -> Tensor:
        with compress_activations(**INT8, exclude="pow") as report:
            y = checkpoint(part, x * w, use_reentrant=reentrant)
            assert sum(t.saved_bytes for t in report.by_tensor) == x.nbytes  # its argument
            if inside:
                torch.manual_seed(9)
                y.square().sum().backward()
                return y.detach().sum().requires_grad_()
        return y.square().sum()

    x.grad = None
    net.zero_grad()
    torch.manual_seed(3)
    step().backward()
    exact, x.grad = [p.grad.clone() for p in (x, net.first.weight)], None
    net.zero_grad()
    torch.manual_seed(3)
    compressed().backward()
    assert error(x.grad, exact[0]) < 0.02
    assert error(net.first.weight.grad, exact[1]) < 0.02


def test_hooks_of_others_within_the_block_hold(x: Tensor) -> None:
    w = nn.Parameter(torch.randn(K, K))
    seen: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(t)
        return t.detach()

    def run() -> Tensor:
        return F.mse_loss(F.gelu(F.leaky_relu(F.relu((x * 1) @ w), 0.1)).softmax(-1), x)

    with compress_activations(**INT2, redraw_dropout=True) as report:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run().backward()
        with torch.autograd.graph.save_on_cpu():
            F.dropout(run(), 0.5).backward()
    assert not report.by_tensor
    assert len(seen) > 5
    exact = torch.autograd.grad(run(), w)[0]
    w.grad = None
    with compress_activations(**INT2), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run().backward()
    assert torch.equal(w.grad, exact)


@pytest.mark.parametrize("is_inside", [True, False])
def test_torch_function_mode_of_others(net: Net, x: Tensor, is_inside: bool) -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counting = Counting()
    contexts = [compress_activations(**INT8), counting]
    outer, inner = contexts if is_inside else contexts[::-1]
    loss, exact = gradient(net, lambda: loss_of(net, x))

    def step() -> Tensor:
        with outer, inner:
            return loss_of(net, x)

    coded_loss, coded = gradient(net, step)
    assert coded_loss == loss
    assert 0 < error(coded, exact) < 0.05
    assert counting.calls > 5


def test_default_device_does_not_matter(net: Net, x: Tensor) -> None:
    torch.set_default_device("meta")
    try:
        c = compress_activations(bits=8, min_size=1)
        with c:
            y = net(x)
    finally:
        torch.set_default_device(None)
    assert y.device.type == "cpu"
    y.square().sum().backward()
    assert all(p.grad.device.type == "cpu" for p in net.parameters())


def test_vmap_within_the_block_keeps_what_it_keeps(x: Tensor) -> None:
    w = nn.Parameter(torch.randn(K, K))

    def run() -> Tensor:
        return torch.vmap(lambda row: F.gelu(F.relu(row @ w)).exp())(x * 1).sum()

    exact = torch.autograd.grad(run(), w)[0]
    with compress_activations(**INT2) as report:
        loss = run()
    loss.backward()
    assert torch.equal(w.grad, exact)
    assert {t.format for t in report.by_tensor} <= {"as it is", "shared"}


def test_func_grad_within_the_block_is_refused_by_torch(x: Tensor) -> None:
    with compress_activations(**INT2), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda t: F.relu(t).sum())(x)
    assert nothing_is_open()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, but from warnings that are errors
@pytest.mark.parametrize("breaks", [False, True])
def test_compiled_functions_keep_what_they_keep(net: Net, x: Tensor, breaks: bool) -> None:
    params = [*net.first.parameters(), *net.norm.parameters()]

    def part(t: Tensor) -> Tensor:
        h = net.norm(net.first(t)).relu()
        if breaks:
            torch._dynamo.graph_break()
        return F.gelu(h)

    torch._dynamo.reset()
    compiled = torch.compile(part, backend="aot_eager", fullgraph=not breaks)
    exact = torch.autograd.grad(part(x).square().sum(), params)
    for _ in range(2):
        with compress_activations(**INT2) as report:
            y = compiled(x)
        found = torch.autograd.grad(y.square().sum(), params)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, exact, strict=True))
        assert {t.format for t in report.by_tensor} <= {"as it is", "shared"}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_block_within_a_compiled_function_is_refused(net: Net, x: Tensor, fullgraph: bool) -> None:
    @torch.compile(backend="aot_eager", fullgraph=fullgraph)
    def function(t: Tensor) -> Tensor:
        with compress_activations(**INT2):
            return net.first(t)

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"'compress_activations' (expects to be|is) entered outside of"):
        function(x)
    assert nothing_is_open()


# ---- a training that is resumed


def test_seeds_go_on_from_a_state(net: Net, x: Tensor) -> None:
    """A new object with the state of one that has been used gives the codes that this one gives next."""
    options = {**INT2, "seed": 3}

    def gradient_in(block: compress_activations) -> Tensor:
        def run() -> Tensor:
            with block:
                return loss_of(net, x)

        return gradient(net, run)[1]

    first = compress_activations(**options)
    gradient_in(first)
    state = first.state_dict()
    assert first.state_dict() == state, "asking changes nothing"
    expected = gradient_in(first)
    resumed = compress_activations(**options)
    resumed.load_state_dict(state)
    assert torch.equal(gradient_in(resumed), expected)
    assert not torch.equal(gradient_in(compress_activations(**options)), expected)


def test_states_of_objects_with_and_without_a_seed_differ() -> None:
    with_seed, without = compress_activations(seed=3), compress_activations()
    without.load_state_dict(without.state_dict())
    with pytest.raises(ValueError, match=r"'compress_activations' has no seed \(got the state of one with one\)"):
        without.load_state_dict(with_seed.state_dict())
    with pytest.raises(ValueError, match=r"'compress_activations' has a seed \(got the state of one without one\)"):
        with_seed.load_state_dict(without.state_dict())


def test_a_compiled_model_is_compiled_once_for_all_blocks() -> None:
    """The compiler guards on the hooks by which blocks know what runs; none is left behind them."""
    counter = CompileCounterWithBackend("eager")
    model = torch.compile(nn.Sequential(nn.Linear(K, 8), nn.GELU(), nn.Linear(8, 4)), backend=counter)
    x = torch.randn(N, K)
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*global hooks on modules", UserWarning)
            with compress_activations(**INT2):
                model(x).sum().backward()
        assert nothing_is_open()
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_a_budget_measures_a_backward_pass_within_another_block(net: Net, x: Tensor) -> None:
    with compress_activations(budget_mib=1) as report:
        loss = loss_of(net, x)
        with compress_activations(**INT8):
            loss.backward()
    assert report.by_tensor
    assert all(p.grad is not None for p in net.parameters())
