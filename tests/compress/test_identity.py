"""What tells one saved tensor from another, and what is kept as it is: without these rules gradients are wrong.

Codes have 8 bits and fp32 metadata: a decoded value is within one step, a 255th of the range, of the saved one.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import qgnn
from qgnn.compress import compress_activations, recorder
from qgnn.compressed_tensor import CompressedTensor
from qgnn.functional.blocks import pack

N, K, M = 32, 16, 8


def block(**options: object) -> compress_activations:
    return compress_activations(
        **{"bits": 8, "block_size": 1024, "min_size": 1, "metadata_dtype": torch.float32, "seed": 1, **options}
    )


def weight(rows: int = K, columns: int = M) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns))


def step(*tensors: Tensor) -> float:
    """The largest error of a decoded value; a thousandth more than a 255th covers fp32."""
    return max(float(t.detach().max() - t.detach().min()) for t in tensors) * 1.001 / 255


def formats(report: qgnn.compress.Report) -> list[tuple[str, str]]:
    return [(t.op, t.format) for t in report.by_tensor]


# ---- identity


def test_freed_memory_that_another_tensor_gets_is_no_hit() -> None:
    w, x = weight(), torch.randn(N, K)
    places, expected, total = set(), torch.zeros(K, M), torch.zeros(())
    with block():
        for i in range(1, 21):
            h = x * i
            places.add(h.data_ptr())
            expected += h.sum(0)[:, None]
            total = total + (h @ w).sum()
            del h  # its codes live on in the graph
        total.backward()
    assert len(places) < 20  # memory was in fact given out again
    bound = sum(range(1, 21)) * N * step(x) + 1e-3  # N rows each, and the order of fp32 sums
    assert (w.grad - expected).abs().max() <= bound < expected.abs().max()


def test_freed_memory_is_no_hit_for_what_is_counted() -> None:
    w, x = weight(), torch.randn(N, K)
    with block(exclude="*") as report:
        for i in range(1, 6):
            (x * i) @ w  # the result goes, and with it all that was saved
    assert report.original_bytes == report.saved_bytes == 5 * x.nbytes


def test_views_of_one_start_and_size_are_no_hit() -> None:
    x, (a, b) = torch.randn(2 * N, K), (weight(), weight())
    with block():
        h = x * 1
        ((h[:N] @ a).sum() + (h[::2] @ b).sum()).backward()
    bound = N * step(x) + 1e-4
    assert (a.grad - x[:N].sum(0)[:, None]).abs().max() <= bound
    assert (b.grad - x[::2].sum(0)[:, None]).abs().max() <= bound


def test_views_that_start_elsewhere_or_have_another_type_are_no_hit() -> None:
    x, (a, b), c = torch.randn(2 * N, K), (weight(), weight()), weight().double()
    c = c.detach().requires_grad_()
    with block():
        h = x * 1
        ((h[:N] @ a).sum() + (h[N:] @ b).sum()).backward()
        integers = torch.arange(N * K).view(N, K).float().contiguous()
        (integers.view(torch.float64) @ c[: K // 2]).sum().backward()
    assert (a.grad - x[:N].sum(0)[:, None]).abs().max() <= N * step(x) + 1e-4
    assert (b.grad - x[N:].sum(0)[:, None]).abs().max() <= N * step(x) + 1e-4


def test_a_view_that_is_negated_lazily_is_no_hit_and_has_its_sign() -> None:
    x, (a, b) = torch.randn(N, K), (weight(), weight())
    with block():
        z = torch.complex(x * 1, x * 2)
        imaginary, negated = z.imag, z.conj().imag
        assert negated.is_neg()
        ((negated @ a).sum() + (imaginary @ b).sum()).backward()
    for w, sign in ((a, -2), (b, 2)):
        assert (w.grad - sign * x.sum(0)[:, None]).abs().max() <= N * step(2 * x) + 1e-4


def test_a_later_version_is_no_hit() -> None:
    a, x = weight(), torch.randn(N, K)
    with block() as report, torch.no_grad():
        h = x * 1
        with torch.enable_grad():
            first = h @ a  # its codes live on
        h.mul_(-3)
        with torch.enable_grad():
            (h @ a).sum().backward()
    assert (a.grad + 3 * x.sum(0)[:, None]).abs().max() <= 3 * N * step(x) + 1e-3
    with pytest.raises(RuntimeError, match="is at version 1"):
        first.sum().backward()
    assert [f for op, f in formats(report) if op == "matmul"] == ["int8-g1024", "int8-g1024"]


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h,
        lambda h: h.view(N, K // 2, 2).flatten(1),
        lambda h: h.t().t(),
        lambda h: h[None].squeeze(0),
        lambda h: h.detach(),
    ],
)
def test_views_of_the_same_values_share_codes(view: Callable[[Tensor], Tensor]) -> None:
    a, b, x = weight(), weight(), torch.randn(N, K)
    with block() as report:
        h = x * 1
        ((h @ a).sum() + (view(h) @ b).sum()).backward()
    assert [f for op, f in formats(report) if op == "matmul"] == ["int8-g1024", "shared"]
    assert torch.equal(a.grad, b.grad)  # one rounding


def test_transposed_operand_shares_codes() -> None:
    a, b, x = weight(), weight(M, N), torch.randn(N, K)
    with block() as report:
        h = x * 1
        ((h @ a).sum() + (b @ h).sum() + (h.t() @ b.t()).sum()).backward()
    assert [f for op, f in formats(report) if op == "matmul"] == ["int8-g1024", "shared", "shared"]
    assert (b.grad - 2 * x.sum(1)).abs().max() <= 2 * K * step(x) + 1e-4


# ---- what lives anyway


def test_parameters_their_views_and_constants_from_outside_are_kept_and_not_counted() -> None:
    w, x = weight(K, K), torch.randn(N, K, requires_grad=True)
    constant, index = torch.randn(N, K), torch.randint(N, (50,))
    with block() as report:
        h = x * constant
        h = h @ w.t()
        h = h[index] @ w[:, ::2].view(K, -1)
        h.sum().backward()
    assert formats(report) == [("matmul", "int8-g1024"), ("matmul", "int8-g1024")]
    assert report.original_bytes == x.nbytes + 50 * K * 4  # results of the product and of the rows
    with torch.no_grad():
        expected = (torch.zeros(N, K).index_add(0, index, torch.ones(50, K // 2) @ w[:, ::2].t()) @ w) * constant
    assert torch.allclose(x.grad, expected, atol=1e-4)  # through what is kept alone: exact but for the order of sums


def test_parameters_that_appear_within_the_block_are_kept() -> None:
    lazy, x = nn.LazyLinear(M), torch.randn(N, K)
    with block() as report:
        lazy(x * 1).sum().backward()
        late = nn.Linear(M, M)
        F.relu(late(lazy(x * 1))).sum().backward()
    kept = {t.shape for t in report.by_tensor if t.op == "linear"}
    assert kept == {(N, K), (N, M)}


def test_constants_made_within_the_block_count() -> None:
    w, x = weight(), torch.randn(N, K)
    with block() as report:
        (torch.sin(x) @ w).sum().backward()
        ((w.sum() * x).detach() @ w).sum().backward()  # the memory of a node, of which a constant is left
    assert [f for op, f in formats(report) if op == "matmul"] == ["int8-g1024"] * 2


def test_weights_that_autocast_casts_are_kept() -> None:
    w, x = weight(K, K), torch.randn(N, K, requires_grad=True)
    with block() as report, torch.autocast("cpu", torch.bfloat16):
        h = (x * 1) @ w
        h.sum().backward()
    assert sorted(formats(report)) == [("matmul", "as it is"), ("matmul", "int8-g1024")]
    expected = torch.ones(N, K, dtype=torch.bfloat16) @ w.detach().bfloat16().t()
    assert torch.equal(x.grad, expected.float())


# ---- changes in place


SAVERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "coded": lambda h, w: h @ w,
    "coded twice": lambda h, w: h * h,
    "kept": lambda h, w: h.pow(3),
}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda h: h.add_(1),
    "a view": lambda h: h[1:].zero_(),
    "an alias": lambda h: h.detach().mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("saver", SAVERS)
def test_change_in_place_raises(saver: str, change: str) -> None:
    w, x = weight(), torch.randn(N, K, requires_grad=True)
    with block():
        h = x * 1
        y = SAVERS[saver](h, w)
    CHANGES[change](h)
    with pytest.raises(RuntimeError, match=r"saved by '(matmul|mul|pow)', is at version 1; expected version 0"):
        y.sum().backward()


@pytest.mark.parametrize("is_coded", [True, False])
def test_change_in_place_of_the_base_of_what_was_saved_raises(is_coded: bool) -> None:
    w, x = weight(K // 2), torch.randn(N, K, requires_grad=True)
    with block(exclude=() if is_coded else "*"):
        h = x * 1
        y = h[:, ::2] @ w
    h[:, 1::2] = 0  # other elements; of one counter, as torch has it
    del h
    with pytest.raises(RuntimeError, match="saved by 'matmul', is at version 1; expected version 0"):
        y.sum().backward()


@pytest.mark.parametrize("is_coded", [True, False])
@pytest.mark.parametrize("name", ["exp", "softmax"])
def test_change_in_place_of_a_saved_result_raises(name: str, is_coded: bool) -> None:
    x = torch.randn(N, K, requires_grad=True)
    with block(exclude=() if is_coded else "*"):
        y = (x * 1).exp() if name == "exp" else (x * 1).softmax(-1)
        assert not y._is_view()
        z = y.detach()
        total = y.sum()
        del y  # nobody refers to the tensor that was saved any more
    z.add_(1)
    with pytest.raises(RuntimeError, match=f"saved by '{name}', is at version 1; expected version 0"):
        total.backward()


def test_no_error_without_a_change() -> None:
    w, x = weight(), torch.randn(N, K, requires_grad=True)
    with block():
        h = x * 1
        h.add_(1)  # before it is saved
        y = h @ w
    y.add_(1)  # not saved
    y.sum().backward()


# ---- lifetime


class Hook:
    def __call__(self, *grads: object) -> None:
        pass


def test_graph_and_tensors_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        w, x = weight(), torch.randn(N, K, requires_grad=True)
        with block(exclude="sigmoid") as report:
            h = x * 1
            y = F.gelu(F.relu(h @ w)).exp()
            z = torch.softmax(y, -1).abs().sqrt() * y.sigmoid()
        assert len(report.by_tensor) > 5
        hook = Hook()
        h.grad_fn.register_hook(hook)
        memory = [StorageWeakRef(t.untyped_storage()) for t in (h, y, z)]
        held = weakref.ref(hook)  # by the graph's first node
        del h, y, z, hook
        assert held() is None
        assert all(m.expired() for m in memory)
    finally:
        gc.enable()


def test_the_block_itself_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(N, K, requires_grad=True)
        with block():
            F.gelu(nn.Linear(K, M)(x * 1))
            recorder = weakref.ref(qgnn.compress.context._open_recorders()[-1])
        assert recorder() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("function", [F.relu, F.gelu, torch.exp, lambda t: t.softmax(-1), lambda t: t @ t.t()])
def test_codes_are_freed_by_the_backward_pass_while_the_loss_lives(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[CompressedTensor]] = []

    def noted(*args: Any) -> CompressedTensor:
        c = pack(*args)
        made.append(weakref.ref(c))
        return c

    monkeypatch.setattr(recorder, "pack", noted)
    x = torch.randn(N, K, requires_grad=True)
    with block():
        loss = (function(x * 1) * 2).sum()
    loss.backward()
    assert [c() for c in made] == [None] * len(made)
    if function is not F.relu:  # its mask is made elsewhere
        assert made
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_memory_of_what_is_coded_is_freed_in_the_forward_pass() -> None:
    w, x = weight(), torch.randn(N, K, requires_grad=True)
    with block():
        h = x * 1
        memory = StorageWeakRef(h.untyped_storage())
        y = h @ w
        assert not memory.expired()
        del h
        assert memory.expired()
    y.sum().backward()


# ---- sparse layouts


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("product", [torch.sparse.mm, torch.mm, torch.matmul, lambda a, x: a @ x])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_matrices_are_kept(product: Callable[[Tensor, Tensor], Tensor], layout: torch.layout) -> None:
    dense = torch.eye(N) + torch.eye(N).roll(1, 0)
    a = dense.to_sparse(layout=layout).requires_grad_()
    x = torch.randn(N, K, requires_grad=True)
    g = torch.randn(N, K)
    with block() as report:
        h = x * 1
        (product(a, h) * g).sum().backward()
    assert [f for _, f in formats(report)] == ["int8-g1024"]  # the rows, for the gradient of the matrix
    assert torch.allclose(x.grad, dense.t() @ g, atol=1e-5)
    where = dense.bool()
    wrong = (a.grad.to_dense() - g @ x.detach().t())[where]
    assert wrong.abs().max() <= step(x) * float(g.abs().sum(1).max()) + 1e-5


# ---- masks


def test_masks_of_relu_and_dropout_are_exact() -> None:
    x = torch.randn(4 * N, K, requires_grad=True)
    functions: list[Callable[[Tensor], Tensor]] = [
        F.relu,
        lambda t: F.relu(t, inplace=True),
        lambda t: torch.relu_(t),
        nn.ReLU(inplace=True),
        lambda t: F.relu(t.t()),
        lambda t: F.leaky_relu(t, 0.3),
        lambda t: F.leaky_relu(t.t(), 0.3),
        nn.LeakyReLU(0.1, inplace=True),
        F.relu6,
        lambda t: F.hardtanh(t, -0.3, 0.7),
        lambda t: F.hardtanh(t, -0.1, 0.3) + 2 * F.hardtanh(t, -1, 1),  # of one tensor, two masks
        lambda t: F.hardtanh(t, 0, float("inf")),
        *(lambda t, p=p: F.dropout(t, p) for p in (0.1, 0.3, 0.5, 0.77, 0.9, 1.0)),
        nn.Dropout(0.2, inplace=True),
    ]
    for function in functions:
        results = []
        for bits in (None, 2):
            torch.manual_seed(1)
            x.grad = None
            if bits is None:
                y = function(x * 2)
                y.cos().sum().backward()
            else:
                with block(bits=bits, exclude="cos") as report:
                    y = function(x * 2)
                    y.cos().sum().backward()
                masks = [t for t in report.by_tensor if t.op != "cos" and t.format != "as it is"]
                assert all(t.format == "1 bit" and t.saved_bytes <= x.numel() // 8 + 16 for t in masks)
            results.append((y.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
