"""Blocks within blocks, threads, and what else torch lets somebody open around, within or behind one."""

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import qgnn
from qgnn.compress import compress_activations
from qgnn.compress.context import _open_sessions

N, K = 48, 32
BLOCKS = {"block_size": 1024, "min_size": 1, "seed": 1}
INT8, INT2 = {"bits": 8, **BLOCKS}, {"bits": 2, **BLOCKS}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(K, K), nn.BatchNorm1d(K), nn.Linear(K, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.first(x)).relu(), 0.25)
        return F.log_softmax(self.second(F.gelu(h)), -1)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, K)


def gradient(net: Net, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The loss, and all gradients in one vector."""
    net.zero_grad()
    torch.manual_seed(3)
    loss = run()
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in net.parameters()])


def loss_of(net: Net, x: Tensor) -> Tensor:
    return net(x).square().sum()


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def nothing_is_open() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = torch._C._len_torch_function_stack()
    return not (_open_sessions() or hooks or modes or _global_forward_hooks or _global_forward_pre_hooks)


def ops(report: qgnn.compress.Report) -> list[str]:
    return [t.op for t in report.by_tensor]


# ---- nesting and repetition


def test_the_innermost_block_holds(net: Net, x: Tensor) -> None:
    with compress_activations(**INT8) as outer:
        a = net.first(x * 1)
        with compress_activations(**INT2) as inner:
            b = net.norm(a)
            with compress_activations(**INT8, exclude="*") as innermost:
                b = b.relu()
            b = F.gelu(b)
        b.softmax(-1).sum().backward()
    assert ops(outer) == ["linear", "softmax"]
    assert (ops(inner)[0], ops(inner)[-1]) == ("batch_norm", "gelu")
    assert ops(innermost) == ["relu"]
    assert {t.format for t in outer.by_tensor} == {"int8/G1024", "int8/G1024 twice"}
    assert {t.format for t in inner.by_tensor} == {"int2/G1024", "as it is"}
    assert nothing_is_open()


def test_one_object_entered_again_and_within_itself(net: Net, x: Tensor) -> None:
    c = compress_activations(**INT2)
    with c as first:
        h = net.first(x * 1)
        with c as second:
            h = net.norm(h)
        h = F.gelu(h)
    with c as third:
        F.gelu(net.first(x * 1))
    assert (ops(first), ops(second)[0], ops(third)) == (["linear", "gelu"], "batch_norm", ["linear", "gelu"])
    assert nothing_is_open()


def test_roundings_of_blocks_are_independent(net: Net, x: Tensor) -> None:
    """Nested, repeated, after each other: two roundings alike would correlate what gradients multiply."""

    def rounded() -> bytes:
        w = torch.zeros(K, K, requires_grad=True)
        ((x * 1) @ w).backward(torch.eye(N)[:, :K])
        return w.grad.numpy().tobytes()

    found = []
    for seed in (None, 7):
        c = compress_activations(bits=2, min_size=1, seed=seed)
        for _ in range(3):
            with c:
                found.append(rounded())
                for _ in range(2):
                    with compress_activations(bits=2, min_size=1):
                        found.append(rounded())
                        with compress_activations(bits=2, min_size=1):
                            found.append(rounded())
                with c:
                    found.append(rounded())
    for seed in (8, 9):  # neighboring seeds share no rounding
        with compress_activations(bits=2, min_size=1, seed=seed):
            found += [rounded(), rounded()]
    assert len(set(found)) == len(found)


def test_same_seed_gives_the_same_codes(net: Net, x: Tensor) -> None:
    def step(seed: int | None) -> Tensor:
        with compress_activations(bits=2, min_size=1, seed=seed):
            return loss_of(net, x)

    assert torch.equal(gradient(net, lambda: step(None))[1], gradient(net, lambda: step(None))[1])
    assert torch.equal(gradient(net, lambda: step(5))[1], gradient(net, lambda: step(5))[1])
    assert not torch.equal(gradient(net, lambda: step(5))[1], gradient(net, lambda: step(6))[1])


def test_torch_generator_is_left_alone_within_the_block(net: Net, x: Tensor) -> None:
    state = torch.get_rng_state()
    with compress_activations(bits=2, min_size=1):
        with compress_activations(bits=2, min_size=1):
            F.gelu(net.first(x))
        F.gelu(net.first(x))
        assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(torch.get_rng_state(), state)  # or the next block would round alike
    state = torch.get_rng_state()
    with compress_activations(bits=2, min_size=1, seed=1):
        F.gelu(net.first(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_decorator(net: Net, x: Tensor) -> None:
    loss, exact = gradient(net, lambda: loss_of(net, x))
    decorated = compress_activations(**INT8)(loss_of)
    coded_loss, coded = gradient(net, lambda: decorated(net, x))
    assert coded_loss == loss
    assert 0 < error(coded, exact) < 0.05


# ---- the backward pass


def test_retained_graph_gives_the_same_gradients_inside_and_outside(net: Net, x: Tensor) -> None:
    with compress_activations(**INT2):
        loss = loss_of(net, x)
        inside = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    for _ in range(2):
        again = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        assert all(map(torch.equal, inside, again))


def test_second_derivative_is_right_or_refused() -> None:
    x = torch.randn(N, K, requires_grad=True)
    w = torch.randn(K, K, requires_grad=True)

    def second(f: Callable[[Tensor], Tensor], around: Any) -> Tensor:
        torch.manual_seed(3)
        with around:  # a third power is kept as it is
            y = f(x * 1)
            (g,) = torch.autograd.grad((y + y.pow(3)).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)[0]

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        **{f.__name__: f for f in (F.relu, F.leaky_relu, F.elu, F.gelu, F.dropout, F.hardtanh)},
        **{f.__name__: f for f in (torch.tanh, torch.exp, torch.square)},
        "softmax": lambda t: t.softmax(-1),
        "mse_loss": lambda t: F.mse_loss(t, torch.zeros_like(t)),
        "matmul": lambda t: t @ w,
        "mul": lambda t: t * t,
        "layer_norm": lambda t: F.layer_norm(t, [K]),
        "index": lambda t: t[torch.arange(N) + 0],
    }
    right, refused = [], {}
    for name, f in functions.items():
        exact = second(f, nullcontext())
        assert torch.equal(second(f, compress_activations(**INT2, exclude="*")), exact)
        try:
            assert torch.allclose(second(f, compress_activations(**INT2)), exact), name
            right.append(name)
        except (RuntimeError, NotImplementedError) as error:
            refused[name] = str(error)
    assert right == ["dropout", "hardtanh", "index"]
    for name, message in refused.items():
        assert "create_graph=True" in message, name


# ---- exceptions and threads


def test_exception_within_the_block_restores_everything(net: Net, x: Tensor) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    model = nn.Sequential(net, Failing())
    c = compress_activations(**INT2)
    with pytest.raises(ValueError, match="on purpose"), c, compress_activations(**INT2), c:
        model(x)
    assert nothing_is_open()
    with compress_activations(**INT2) as report:
        try:
            model(x)
        except ValueError:
            net.first(x * 1)  # no module that failed is thought to run
    assert report.by_tensor[-1].module == ""
    assert nothing_is_open()


def test_threads_have_blocks_of_their_own(x: Tensor) -> None:
    nets, barrier = [Net() for _ in range(3)], threading.Barrier(3)
    options = [INT8, INT2, None]
    expected, found, failures = [], {}, []

    def work(i: int) -> None:
        try:
            barrier.wait()
            for _ in range(4):
                if options[i] is None:
                    nets[i].zero_grad()
                    F.gelu(nets[i].norm(nets[i].first(x * 1))).sum().backward()
                    found[i] = []
                else:
                    with compress_activations(**options[i]) as report:
                        nets[i].zero_grad()
                        F.gelu(nets[i].norm(nets[i].first(x * 1))).sum().backward()
                    found[i] = [(t.op, t.module, t.format) for t in report.by_tensor]
        except BaseException as e:
            failures.append(e)

    for i in range(3):
        barrier = threading.Barrier(1)
        work(i)
        expected.append((found[i], nets[i].first.weight.grad.clone()))
    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    for i in range(3):
        assert found[i] == expected[i][0]
        assert torch.equal(nets[i].first.weight.grad, expected[i][1])


def test_block_of_one_thread_leaves_another_alone(net: Net, x: Tensor) -> None:
    with compress_activations(**INT2) as report:
        result: list[Tensor] = []
        thread = threading.Thread(target=lambda: result.append(net(x * 1)))
        thread.start()
        thread.join()
    assert not report.by_tensor
    assert type(result[0].grad_fn).__name__ == "LogSoftmaxBackward0"


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


def test_codes_are_freed_with_the_graph(net: Net, x: Tensor) -> None:
    gc.collect()
    with compress_activations(**INT2):
        h = net.first(x * 1)
        memory = StorageWeakRef(h.untyped_storage())
        loss = F.gelu(h).sum()
        del h
    loss.backward()
    assert memory.expired()
