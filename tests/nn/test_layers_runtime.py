"""How every layer runs: compiled, exported, recorded, checkpointed, under autocast, in other types."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from capture import record
from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, passes, relative_error
from layers import LAYERS, K, learned
from qgnn import QConfig

NEAREST = QConfig(rounding="nearest")
ALL = pytest.mark.parametrize("name", LAYERS)
CONFIGS = pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])


def compiled(names: Iterable[str]) -> pytest.MarkDecorator:
    """A compilation takes seconds: every entry in int8, and each layer's first one, whose code is the same, in fp32."""
    cases = [(name, config) for name in names for config in (None, NEAREST) if config is not None or "/" not in name]
    ids = [f"{name}-{'fp32' if config is None else 'int8'}" for name, config in cases]
    return pytest.mark.parametrize(("name", "config"), cases, ids=ids)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inputs(name: str, graph: str = "power_law") -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    edge_index, num_nodes = GRAPHS[graph]
    torch.manual_seed(4)
    return torch.randn(num_nodes, K), edge_index, LAYERS[name].args(edge_index, num_nodes)


class Named(nn.Module):
    """Another way to run a module, with its parameters under their plain names."""

    def __init__(self, run: Any, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "run", run)
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        return self.run(*args)


@compiled(LAYERS)
def test_layer_compiles_once_for_all_graphs(name: str, config: QConfig | None) -> None:
    layer = LAYERS[name].ours(config)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for graph in ("random", "power_law", "self_loops"):
        x, edge_index, args = inputs(name, graph)
        expected = passes(Named(layer, layer), x, edge_index, *args, extra=learned(args))
        actual = passes(Named(run, layer), x, edge_index, *args, extra=learned(args))
        # Edges that a compiled graph keeps with weight 0 change the order of sums, and a last bit a code.
        rel = 1e-5 if config is None else 2e-2
        assert_same_pass(actual, expected, rel, LAYERS[name].cancelling)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]  # more than 1 where the compiler starts over, to take a layer's float for a constant


@compiled(name for name, layer in LAYERS.items() if layer.hook is None)
def test_layer_can_be_exported(name: str, config: QConfig | None) -> None:
    layer = LAYERS[name].ours(config).eval()
    x, edge_index, args = inputs(name, "path")
    rows, edges = torch.export.Dim("rows", min=2, max=2**30), torch.export.Dim("edges", min=2, max=2**30)
    of_args = [LAYERS[name].dynamic(arg, rows, edges, edge_index.shape[1]) for arg in args]
    shapes = ({0: rows}, {1: edges}, *of_args)
    detached = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    program = torch.export.export(layer, (x, edge_index, *detached), dynamic_shapes=shapes).module()
    for graph in ("path", "isolated", "hub"):
        x, edge_index, args = inputs(name, graph)
        actual, expected = program(x, edge_index, *args), layer(x, edge_index, *args)
        torch.testing.assert_close(
            actual, expected, rtol=1e-5 if config is None else 2e-2, atol=2e-2 if config else 1e-5
        )


@CONFIGS
@ALL
def test_layer_can_be_recorded(name: str, config: QConfig | None) -> None:
    """A whole step reads no value of a tensor, so it can become a CUDA graph."""
    layer = LAYERS[name].ours(config)
    x, edge_index, args = inputs(name)
    given = learned(args)

    def step(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, *given)]
        rest = iter(leaves[1:])
        taken = [next(rest) if any(arg is t for t in learned(args)) else arg for arg in args]
        out = layer(leaves[0], edge_index, *taken)
        inputs = [*leaves, *layer.parameters()]
        return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs, materialize_grads=True))

    tensors = (x, *(t.detach() for t in given))
    replay = record(step, tensors)
    for result, expected in zip(replay(), step(*tensors), strict=True):
        assert torch.equal(result, expected)


# A re-entrant checkpoint runs its first pass without gradients, where the constants of the second cannot be told: the
# initial features of this entry, which its weights multiply, are rounded to nearest there alone.
RECOMPUTED = [(name, entry) for name in LAYERS for entry in (False, True) if (name, entry) != ("gcn2/weighted", True)]


@pytest.mark.parametrize(("name", "reentrant"), RECOMPUTED)
def test_layer_draws_the_same_codes_when_it_is_recomputed(name: str, reentrant: bool) -> None:
    layer = LAYERS[name].ours(QConfig())
    x, edge_index, args = inputs(name)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = layer

        def forward(self, *given: Any) -> Tensor:
            out = checkpoint(self.module, *given, use_reentrant=reentrant)
            assert isinstance(out, Tensor)
            return out

    torch.manual_seed(9)
    expected = backward_of(Named(layer, layer), x, edge_index, args)
    torch.manual_seed(9)
    assert_equal_pass(backward_of(Checkpointed(), x, edge_index, args), expected)


def backward_of(module: nn.Module, x: Tensor, edge_index: Tensor, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Output and gradients through ``backward()``, which re-entrant checkpoints need."""
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x, **dict(module.named_parameters())}
    for t in leaves.values():
        t.grad = None
    out = module(x, edge_index, *args)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return {"out": out.detach()} | {f"d{key}": t.grad for key, t in leaves.items() if t.grad is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@CONFIGS
@ALL
def test_layer_gives_the_type_of_its_input_under_autocast(
    name: str, config: QConfig | None, dtype: torch.dtype
) -> None:
    layer = LAYERS[name].ours(config)
    x, edge_index, args = inputs(name)
    expected = passes(layer, x, edge_index, *args, extra=learned(args))

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "layer", layer)

        def named_parameters(self, *_: Any, **__: Any) -> Any:
            return layer.named_parameters()

        def forward(self, *given: Any) -> Tensor:
            with torch.autocast("cpu", dtype):
                return layer(*given)

    actual = passes(Autocast(), x, edge_index, *args, extra=learned(args))
    assert {key: t.dtype for key, t in actual.items()} == {key: t.dtype for key, t in expected.items()}
    if not layer.has_network:
        assert_equal_pass(actual, expected)
    low = x.to(dtype)
    with torch.autocast("cpu", dtype):
        assert layer(low, edge_index, *args).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@CONFIGS
@ALL
def test_layer_works_in_half_types(name: str, config: QConfig | None, dtype: torch.dtype) -> None:
    """Parameters and rows in a half type, edge weights in fp32 as data sets have them."""
    layer = LAYERS[name].ours(config)
    x, edge_index, args = inputs(name)
    expected = passes(layer, x, edge_index, *args, extra=learned(args))
    actual = passes(layer.to(dtype), x.to(dtype), edge_index, *args, extra=learned(args))
    eps = torch.finfo(dtype).eps
    for key in ("out", "dx"):
        assert actual[key].dtype == dtype
        if key in LAYERS[name].switched:
            continue
        # inputs and each of a handful of results are rounded to the type; codes of rounded inputs move by a step
        assert relative_error(actual[key], expected[key]) < 8 * eps + (0.03 if config else 0), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [None, QConfig.only(attention="int8", rounding="nearest")], ids=["fp32", "rounded"])
@pytest.mark.parametrize("name", ["gat/edges", "gatv2/edges", "transformer/edges"])
def test_layer_returns_weights_in_half_types(name: str, config: QConfig | None, dtype: torch.dtype) -> None:
    """Weights of edges are made one by one here; features of edges stay in fp32."""
    layer = LAYERS[name].ours(config)
    x, edge_index, (edges,) = inputs(name)
    expected, (_, expected_weights) = layer(x, edge_index, edges, return_attention_weights=True)
    out, (_, weights) = layer.to(dtype)(x.to(dtype), edge_index, edges, return_attention_weights=True)
    assert out.dtype == weights.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps + (0.03 if config else 0)  # codes of rounded inputs move by a step
    assert relative_error(out, expected) < bound
    assert relative_error(weights, expected_weights) < bound


@ALL
def test_layer_computes_float64_in_float64(name: str) -> None:
    theirs, ours = (layer.double() for layer in LAYERS[name].pair(None))
    x, edge_index, args = inputs(name)
    args = tuple(
        t.detach().double().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in args
    )
    expected = passes(theirs, x.double(), edge_index, *args, extra=learned(args))
    actual = passes(ours, x.double(), edge_index, *args, extra=learned(args))
    assert_same_pass(actual, expected, 1e-12, LAYERS[name].cancelling)


@ALL
def test_scaled_losses_scale_gradients_exactly(name: str) -> None:
    """Scales of rows are as long as the rows, so powers of two of the loss go through them without any error."""
    layer = LAYERS[name].ours(NEAREST)
    x, edge_index, args = inputs(name)
    plain = backward_of(layer, x, edge_index, args)
    scaled = backward_of(Scaled(layer), x, edge_index, args)
    for key, value in plain.items():
        assert torch.equal(
            scaled[key.replace("d", "dmodule.", 1) if key not in ("out", "dx") else key], value * 2.0**16
        )


class Scaled(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        return self.module(*args) * 2.0**16


@CONFIGS
@ALL
def test_layer_repeats_itself_in_deterministic_mode(name: str, config: QConfig | None) -> None:
    layer = LAYERS[name].ours(config and QConfig())
    x, edge_index, args = inputs(name)
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            torch.manual_seed(5)
            results.append(passes(layer, x, edge_index, *args, extra=learned(args)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal_pass(*results)


@CONFIGS
@ALL
def test_layer_refuses_second_derivatives(name: str, config: QConfig | None) -> None:
    layer = LAYERS[name].ours(config)
    x, edge_index, args = inputs(name)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(x, edge_index, *args).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


@ALL
def test_layer_loads_weights_only(name: str) -> None:
    layer, other = LAYERS[name].ours(NEAREST), LAYERS[name].ours(NEAREST)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x, edge_index, args = inputs(name)
    assert torch.equal(other(x, edge_index, *args), layer(x, edge_index, *args))
