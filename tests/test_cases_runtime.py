"""Inputs that broke the runtime of other libraries: memory, devices, launches. The table stands in test_cases.py."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphs import GRAPHS
from qgnn import Graph, QConfig, functional, ops, reference, rng
from qgnn.activation import mask_width
from qgnn.formats import MSFP, MXFP4, FixedPoint

NEAREST = QConfig(rounding="nearest")
K, M = 12, 5


@pytest.mark.parametrize("config", [None, NEAREST, QConfig(granularity="tensor"), QConfig(save="fp32")], ids=str)
def test_nothing_is_changed_in_place(config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, K, requires_grad=True)
    theta, bias = torch.randn(M, K, requires_grad=True), torch.randn(M, requires_grad=True)
    weight, seed = torch.rand(edge_index.shape[1], requires_grad=True), rng.make_seed(3)
    given = (edge_index, x, theta, bias, weight, seed)
    before = [(t.detach().clone(), t._version) for t in given]
    for out in (
        functional.linear(x, theta, bias, config=config, seed=seed),
        functional.spmm(edge_index, x, weight, config=config, seed=seed),
        functional.graph_linear(edge_index, x, theta, bias, weight, "mean", config=config, seed=seed),
    ):
        upstream = torch.randn_like(out)
        copy, result = upstream.clone(), out.detach().clone()
        out.backward(upstream)
        assert torch.equal(upstream, copy)
        assert torch.equal(out, result)
    for t, (value, version) in zip(given, before, strict=True):
        assert torch.equal(t.detach(), value)
        assert t._version == version


class _Seen(TorchDispatchMode):
    """Names of the operators of ours that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "qgnn":
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_every_operator_has_a_fake() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("qgnn::")}
    assert len(ours) >= 6
    mode, seen = FakeTensorMode(), _Seen()
    inputs = [torch.randn(num_nodes, K), torch.randn(M, K), torch.randn(M), torch.rand(edge_index.shape[1])]
    graph = Graph.from_edge_index(edge_index, num_nodes)  # of its own: its tensors become fake
    assert graph.csc.num_rows == num_nodes
    for index in (graph.csr, graph.csc):
        for name, value in vars(index).items():
            object.__setattr__(index, name, mode.from_tensor(value))
    graph._shared["target"] = mode.from_tensor(graph.target)
    fakes = [mode.from_tensor(t).requires_grad_() for t in inputs]
    config = QConfig()
    with mode, seen:
        x, theta, bias, weight = fakes
        codes = functional.quantize(x, config)
        assert codes.codes.shape == x.shape
        packed = ops.blocks_pack(x.detach(), None, 2, 64, torch.float32, None, 0, None)
        assert ops.blocks_unpack(*packed, 2, x.numel(), torch.float32, None, 0, None, 0, 0).shape == (x.numel(),)
        edges, weights = vars(graph.csr).values(), weight.detach()
        left = ops.adjacency_filter(*edges, torch.ones_like(graph.csr.index, dtype=torch.bool), weights, None, 3)
        assert [len(t) for t in left] == [num_nodes + 1, 3, 3, len(weight), 3]
        more = ops.adjacency_merge(*edges, weights, graph.target, *(graph.csr.index, graph.csr.order), weights)
        assert [len(t) for t in more] == [num_nodes + 1, *[2 * len(weight)] * 3]
        for out in (
            functional.linear(x, theta, bias, config=config),
            *(functional.linear(x, theta, bias, config=QConfig(fmt=fmt)) for fmt in (MSFP(3), FixedPoint(4), MXFP4())),
            functional.activation(theta.t(), "elu", bias=bias, residual=theta.t(), config=config),
            functional.spmm(graph, x, weight, config=config),
            functional.spmm(graph, x, weight, "max", config=config),
            functional.graph_linear(graph, x, theta, bias, weight, config=config),
            functional.sddmm(graph, x, x, config=config),
            functional.edge_softmax(graph, weight),
            functional.incidence_sum(graph, weight, config=config),
            functional.attention_weights(graph, x, x),
            functional.attention(graph, x.unsqueeze(1), x[:, :1], x[:, 1:2], config=config),
            functional.attention_gatv2(graph, x.unsqueeze(1), x.unsqueeze(1), theta[:1], config=config),
            functional.attention_dot(graph, *(x.unsqueeze(1) for _ in range(3)), config=config),
        ):
            grads = torch.autograd.grad(out.sum(), fakes, allow_unused=True)
            assert all(g is None or (g.shape, g.dtype) == (t.shape, t.dtype) for g, t in zip(grads, fakes, strict=True))
    assert {name.split(".")[0] for name in seen.names} == ours


def _kernels() -> Iterator[tuple[Any, str]]:
    """Every kernel, as (a module that can launch it, its name)."""
    package = importlib.import_module("qgnn.kernels")
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"qgnn.kernels.{info.name}")
        for name in vars(module):
            if name.startswith("_") and name.endswith("_kernel"):
                yield module, name


class _Launches:
    """Stands before every kernel and looks at each launch: its grid, and the guard that is open around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.guarded: Tensor | None = None
        for module, name in list(_kernels()):
            monkeypatch.setattr(module, name, self._watch(name, getattr(module, name)))
        monkeypatch.setattr(torch.cuda, "device_of", self._device_of)

    @contextmanager
    def _device_of(self, t: Tensor) -> Iterator[None]:
        self.guarded = t
        yield
        self.guarded = None

    def _watch(self, name: str, kernel: Any) -> Any:
        launches = self

        class Watched:
            def __getitem__(self, grid: Any) -> Callable[..., Any]:
                def launch(*args: Any, **options: Any) -> Any:
                    sizes = grid(options) if callable(grid) else grid
                    assert min(sizes) > 0, f"{name} got the empty grid {sizes}"
                    assert launches.guarded is not None, f"{name} runs outside a device guard"
                    operands = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
                    assert {t.device for t in operands} == {launches.guarded.device}
                    launches.names.append(name)
                    return kernel[grid](*args, **options)

                return launch

        return Watched()


def _run_kernels(num_rows: int, num_edges: int, width: int, num_outputs: int, device: str) -> list[tuple[Any, Any]]:
    """Each launcher once in every variant, beside the reference: ``[(kernel's result, expected), ...]``."""
    from qgnn.kernels import (
        activation,
        attention,
        blocks,
        matmul,
        matmul_shared,
        quantize,
        quantize_grid,
        sddmm,
        softmax,
        spmm,
    )
    from qgnn.kernels import codes as code_kernels

    codes = torch.randint(-127, 128, (num_rows, width), dtype=torch.int8, device=device)
    grad = torch.randint(-127, 128, (num_rows, num_outputs), dtype=torch.int8, device=device)
    theta = torch.randint(-127, 128, (num_outputs, width), dtype=torch.int8, device=device)
    # powers of two, which every backend folds into its operands without rounding
    scale, theta_scale = (0.5 ** torch.arange(size, device=device).remainder(4) for size in (num_rows, num_outputs))
    x = torch.randn(num_rows, width, device=device)
    target = torch.randint(max(1, num_rows), (num_edges,)).sort().values
    indptr = torch.searchsorted(target, torch.arange(num_rows + 1)).int().to(device)
    index = torch.randint(max(1, num_rows), (num_edges,), dtype=torch.int32).to(device)
    order = torch.argsort(index, stable=True).int()
    indptr_t = torch.searchsorted(index[order], torch.arange(num_rows + 1, device=device)).int()
    score, edge_x = torch.randn(num_rows, 1, device=device), torch.randn(num_edges, 1, device=device)
    seed = rng.make_seed(1, device)
    mask = torch.zeros((num_rows, mask_width(width)), dtype=torch.uint8, device=device)
    behind = {"mask": mask, "factor": 2.0}
    exponents = (torch.full((rows, (width + 15) // 16), 127, dtype=torch.uint8) for rows in (num_rows, num_outputs))
    blocks_of_codes = tuple(
        t for pair in zip((codes, theta), exponents, strict=True) for t in (pair[0], pair[1].to(device))
    )
    signs = {"projection": 8, "projection_seed": seed}
    low = torch.ones((num_rows + 1) // 2, device=device)
    stored = torch.full((num_rows, -(-width * 3 // 8)), 77, dtype=torch.uint8, device=device)
    packed = (torch.zeros((low.numel(), 4), dtype=torch.uint8, device=device), low, low)
    calls: list[tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = [
        *((quantize, "quantize", (x,), {"granularity": g, "seed": seed}) for g in ("row", "tensor", "block")),
        (quantize_grid, "quantize_dequantize", (x, MSFP(3).grid), {"seed": seed}),
        (matmul_shared, "matmul_shared", blocks_of_codes, {"block_size": 16, "fraction_bits": 6}),
        (matmul, "matmul", (codes, scale, theta, theta_scale), {}),
        (matmul, "matmul_requantize", (codes, scale, theta, theta_scale), {"seed": seed}),
        (matmul, "matmul_dw", (grad, scale, codes, scale), {}),
        (matmul, "quantize_matmul", (x, theta, theta_scale), {"seed": seed}),
        (matmul, "quantize_matmul_requantize", (x, theta, theta_scale), {"seed": seed}),
        (quantize, "quantize_grad", (x,), {**behind, "sum_columns": True, "seed": seed}),
        (activation, "activation", (x, None, x), {"kind": "elu", "slope": 0.5}),
        (activation, "activation_backward", (x,), {**behind, "sum_columns": True}),
        (spmm, "spmm_extremum", (indptr, index, codes), {"x_scale": scale}),
        (spmm, "spmm", (indptr, index, codes), {"x_scale": scale}),
        (spmm, "spmm_requantize", (indptr, index, codes), {"x_scale": scale, "seed": seed}),
        (sddmm, "sddmm", (indptr, index, codes, codes), {"target_scale": scale, "source_scale": scale}),
        (sddmm, "sddmm", (indptr, index, x, x), {"op": "add"}),
        (softmax, "softmax", (indptr, edge_x), {}),
        (softmax, "softmax_backward", (indptr, edge_x, edge_x), {}),
        (softmax, "attention_scores", (indptr, index, score, score), {}),
        (softmax, "attention_scores_backward", (indptr, index, indptr_t, order, score, score, edge_x, edge_x), {}),
        (blocks, "blocks_pack", (x,), {"bits": 2, "block_size": 8, "seed": seed}),
        (blocks, "blocks_pack", (codes.float(),), {"bits": 2, "block_size": 16, "seed": seed, **signs}),  # exact sums
        (blocks, "blocks_unpack", packed, {"bits": 2, "size": 8 * num_rows}),
        (code_kernels, "codes_pack", (codes,), {"bits": 3}),
        (code_kernels, "codes_unpack", (stored,), {"bits": 3, "num_codes": width, "signed": True}),
        (blocks, "blocks_unpack", packed, {"bits": 2, "size": 8 * num_rows, "num_columns": width, **signs}),
    ]
    if width:
        graph = (indptr, index, indptr_t, target.to(device, torch.int32)[order], order)
        of_head = scale[:, None]
        operands = {
            "attention": ((score, score, codes), ("x_scale",)),
            "attention_gatv2": ((codes, codes, torch.ones(1, width, device=device)), ("target_scale", "source_scale")),
            "attention_dot": ((codes, codes, codes), ("query_scale", "key_scale", "value_scale")),
        }
        for name, (rows, names) in operands.items():
            given = dict.fromkeys(names, of_head * 2.0**-7)
            calls.append((attention, name, (indptr, index, *rows), given))
            lse = getattr(reference, name)(indptr, index, *rows, **given)[1]
            given = {**given, "grad_bits": 8, "needs_dedge": True}
            calls.append((attention, f"{name}_backward", (*graph, *rows, lse, x), given))
    return [
        (getattr(module, name)(*args, **options), getattr(reference, name)(*args, **options))
        for module, name, args, options in calls
    ]


def _aggregate_long_rows(device: str) -> None:
    """Codes wide enough for tensor cores, and rows that are cut into chunks."""
    from qgnn.kernels.softmax import softmax, softmax_backward
    from qgnn.kernels.spmm import make_plan, spmm, spmm_extremum

    indptr = torch.tensor([0, 1, 40], dtype=torch.int32, device=device)
    index = torch.zeros(40, dtype=torch.int32, device=device)
    plan, x_scale = make_plan(indptr, 40, cap=8), torch.ones(1, device=device)
    for width in (8, 32):
        x = torch.ones((1, width), dtype=torch.int8, device=device)
        assert torch.equal(spmm(indptr, index, x, x_scale=x_scale, plan=plan)[:, 0].cpu(), torch.tensor([1.0, 39.0]))
        assert (spmm_extremum(indptr, index, x, x_scale=x_scale, plan=plan)[0] == 1).all()
    weight = softmax(indptr, torch.ones(40, 1, device=device), plan=plan)
    torch.testing.assert_close(weight[1:], torch.full((39, 1), 1 / 39, device=device))
    assert (softmax_backward(indptr, weight, torch.ones_like(weight), plan=plan).abs() < 1e-6).all()


@pytest.mark.parametrize(
    "sizes", [(0, 0, 5, 3), (4, 0, 5, 3), (4, 6, 0, 3), (4, 6, 5, 0), (0, 0, 0, 0), (4, 0, 0, 3)], ids=str
)
def test_no_kernel_gets_an_empty_grid(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    _Launches(monkeypatch)
    for actual, expected in _run_kernels(*sizes, device):
        torch.testing.assert_close(actual, expected)


def test_kernels_run_under_the_device_guard_of_their_tensors(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    launches = _Launches(monkeypatch)
    _run_kernels(9, 20, 5, 3, device)
    several_parts = torch.ones(2048, 1, dtype=torch.int8, device=device), torch.ones(1, device=device)
    importlib.import_module("qgnn.kernels.matmul").matmul_dw(*several_parts, *several_parts)
    _aggregate_long_rows(device)
    assert len(set(launches.names)) >= 8
    assert set(launches.names) == {name for _, name in _kernels()}


@pytest.fixture
def far_rows(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Three rows as a view whose last row starts 2^31 elements after the first: address space, no memory."""

    def spread(values: Tensor) -> Tensor:
        size, stride = (1 << 31) + values.shape[1], 1 << 30
        if device == "cuda":
            space = torch.empty(size, dtype=values.dtype, device=device)
        else:  # a file with holes; pages that nobody writes take no room
            path = str(tmp_path / f"space{len(list(tmp_path.iterdir()))}")
            space = torch.from_file(path, shared=True, size=size, dtype=values.dtype)
        view = space.as_strided(values.shape, (stride, 1))
        view.copy_(values)
        return view

    if device == "cpu":  # the interpreter writes each argument back onto itself, holes included
        executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
        monkeypatch.setattr(executor, "_restore_args_dev", lambda *_: None)
    return spread


def test_offsets_beyond_32_bits(far_rows: Callable[[Tensor], Tensor], device: str) -> None:
    """Row 2 of these views lies at element 2^31: an offset held in 32 bits would point before the tensor."""
    from qgnn.kernels import attention, matmul, quantize, sddmm, spmm

    codes = torch.randint(-127, 128, (3, 16), dtype=torch.int8, device=device)
    far = far_rows(codes)
    scale, theta_scale = torch.rand(3, device=device), torch.rand(4, device=device)
    theta = torch.randint(-127, 128, (4, 16), dtype=torch.int8, device=device)
    indptr = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device)
    index = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device=device)
    transposed = ([0, 1, 2, 4], [0, 2, 0, 1], [1, 3, 0, 2])
    graph = (indptr, index, *(torch.tensor(part, dtype=torch.int32, device=device) for part in transposed))
    half = codes.half()
    far_half = far_rows(half)

    def results(backend: Any, x: Tensor, values: Tensor) -> dict[str, Any]:
        edges, scales = (indptr, index, x), {"target_scale": scale, "source_scale": scale}
        of_head, att = scale[:, None], torch.full((1, 16), 2.0**-10, device=device)
        gatv2 = backend["attention_gatv2"](indptr, index, values, values, att)
        dot = backend["attention_dot"](indptr, index, values, values, values)
        return {
            "matmul": backend["matmul"](x, scale, theta, theta_scale),
            "matmul_requantize": backend["matmul_requantize"](x, scale, theta, theta_scale),
            "matmul_dw": backend["matmul_dw"](x, scale, x, scale),
            "spmm": backend["spmm"](*edges, x_scale=scale),
            "spmm_requantize": backend["spmm_requantize"](*edges, x_scale=scale),
            "sddmm": backend["sddmm"](*edges, x, **scales),
            "attention": backend["attention"](indptr, index, of_head, of_head, x, x_scale=of_head),
            "attention_backward": backend["attention_backward"](
                *graph, of_head, of_head, x, of_head, values, x_scale=of_head
            )[:3],
            "attention_gatv2": gatv2,
            "attention_gatv2_backward": backend["attention_gatv2_backward"](
                *graph, values, values, att, gatv2[1], values
            )[:3],
            "attention_dot": dot,
            "attention_dot_backward": backend["attention_dot_backward"](*graph, values, values, values, dot[1], values)[
                :3
            ],
            "quantize": backend["quantize"](values),
            "quantize_tensor": backend["quantize"](values, granularity="tensor"),
        }

    kernels = vars(matmul) | vars(spmm) | vars(sddmm) | vars(quantize) | vars(attention)
    for backend in (kernels, vars(reference)):
        near = results(backend, codes, half)
        for name, result in results(backend, far, far_half).items():
            torch.testing.assert_close(
                result, near[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
