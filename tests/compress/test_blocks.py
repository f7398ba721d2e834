"""Blocks within blocks and again and again, their seeds, their backward passes, exceptions and threads."""

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

from compress_cases import INT2, INT8, K, N, Net, error, gradient, loss_of, nothing_is_open, ops
from qgnn.compress import compress_activations

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
    assert {t.format for t in outer.by_tensor} == {"int8-g1024", "int8-g1024 twice"}
    assert {t.format for t in inner.by_tensor} == {"int2-g1024", "as it is"}
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


def test_codes_are_freed_with_the_graph(net: Net, x: Tensor) -> None:
    gc.collect()
    with compress_activations(**INT2):
        h = net.first(x * 1)
        memory = StorageWeakRef(h.untyped_storage())
        loss = F.gelu(h).sum()
        del h
    loss.backward()
    assert memory.expired()
