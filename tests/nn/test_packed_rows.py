"""Layers whose config keeps packed blocks: the forward pass of int8, weight gradients of the same mean, fewer bytes."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_unbiased, kept_bytes, passes
from layers import LAYERS
from op_checks import saved_tensors, shares_memory
from qgnn import Graph, QConfig, functional, trace
from qgnn.formats import Blocks
from qgnn.nn import QGATConv, QGCNConv, QLinear, QSAGEConv

K, M = 32, 16
EDGES, N = GRAPHS["power_law"]
INT2, PROJECTED = Blocks(2, 64), Blocks(2, 64, projection=8, bins="optimal")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def after(seed: int, run: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return run()


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("name", LAYERS)
def test_only_gradients_of_weights_change(name: str, rounding: str) -> None:
    """Forward pass and the gradients of rows and edges, bit for bit."""
    edge_index, num_nodes = GRAPHS["random"]
    layer = after(0, lambda: LAYERS[name].ours(QConfig(rounding=rounding)))
    other = after(0, lambda: LAYERS[name].ours(QConfig(rounding=rounding, save=Blocks(2, 8, projection=2))))
    other.load_state_dict(layer.state_dict())
    x, args = torch.randn(num_nodes, 7), LAYERS[name].args(edge_index, num_nodes)
    extra = tuple(t for t in args if isinstance(t, Tensor) and t.requires_grad)
    results = [after(1, lambda m=m: passes(m, x, edge_index, *args, extra=extra)) for m in (layer, other)]
    unchanged = [{k: v for k, v in r.items() if k in ("out", "dx") or k.startswith("dextra")} for r in results]
    assert_equal_pass(*unchanged)


LAYERS_HERE: dict[str, Callable[[QConfig], nn.Module]] = {
    "linear": lambda config: QLinear(K, M, config=config),
    "gcn": lambda config: QGCNConv(K, M, config=config),
    "sage": lambda config: QSAGEConv(K, M, config=config),
    "sage/widens": lambda config: QSAGEConv(K, 2 * K, config=config),
    "gat": lambda config: QGATConv(K, 4, heads=4, config=config),
}


def edges_of(name: str) -> tuple[Tensor, ...]:
    return () if name == "linear" else (EDGES,)


@pytest.mark.parametrize(("name", "save"), [("linear", INT2), *((name, PROJECTED) for name in LAYERS_HERE)], ids=str)
def test_the_mean_over_seeds_is_the_gradient_of_kept_rows(name: str, save: Blocks) -> None:
    """All but blocks and signs is rounded to nearest, so that these alone are drawn."""
    layer, x = LAYERS_HERE[name](QConfig(rounding="nearest", save="fp32")), torch.randn(N, K)
    exact = passes(layer, x, *edges_of(name))
    layer.config = QConfig(rounding="nearest", save=save)
    weights = {k: v for k, v in exact.items() if ("lin" in k and k.endswith("weight")) or k == "dweight"}
    assert weights
    assert_unbiased(lambda: passes(layer, x, *edges_of(name)), weights, 200)


@pytest.mark.parametrize("name", ["linear", "gcn", "sage"])
def test_the_mean_over_seeds_is_the_gradient_in_full_precision(name: str) -> None:
    layer, x = LAYERS_HERE[name](QConfig(save=PROJECTED)), torch.randn(N, K)
    config, layer.config = layer.config, None
    exact = {k: v for k, v in passes(layer, x, *edges_of(name)).items() if not k.endswith("bias")}
    layer.config = config
    assert_unbiased(lambda: passes(layer, x, *edges_of(name)), exact, 200)


def kept_of(run: Callable[[], Tensor], save: Any) -> list[Tensor]:
    """What products keep of their rows."""
    dtype = torch.uint8 if isinstance(save, Blocks) else torch.int8 if save == "int8" else torch.float32
    return [t for t in saved_tensors(run) if t.dtype == dtype and t.numel() and t.dim() == 2]


def test_rows_that_products_share_are_packed_once() -> None:
    layer, x = QSAGEConv(K, M, config=QConfig(save=INT2)), torch.randn(N, K, requires_grad=True)
    with trace() as record:
        layer(x, EDGES)
    assert record.ops["blocks.pack"]["calls"] == 1
    first, second = kept_of(lambda: layer(x, EDGES), INT2)
    assert shares_memory(first, [second])
    apart = QSAGEConv((K, K), M, config=QConfig(save=INT2))
    with trace() as record:
        apart((x, x.detach().clone().requires_grad_()), EDGES)
    assert record.ops["blocks.pack"]["calls"] == 2


def test_sets_of_rows_are_packed_each() -> None:
    layer, x = QSAGEConv(K, M, config=QConfig(save=INT2)), torch.randn(3, N, K, requires_grad=True)
    out = layer(x, EDGES)
    out.sum().backward()
    assert out.shape == (3, N, M)
    assert layer.lin_l.weight.grad.isfinite().all()


def test_codes_of_a_constant_stay_as_they_are() -> None:
    layer, x = QGCNConv(K, M, config=QConfig(save=INT2)), torch.randn(N, K)
    with trace() as record:
        saved = saved_tensors(lambda: layer(x, EDGES))
    assert "blocks.pack" not in record.ops
    assert any(t.dtype == torch.int8 for t in saved)


def test_sums_with_constant_weights_keep_nothing() -> None:
    graph, config = Graph.from_edge_index(EDGES, N), QConfig(save=INT2)
    x, weight = torch.randn(N, K, requires_grad=True), torch.rand(EDGES.shape[1])
    with trace() as record:
        saved = saved_tensors(lambda: functional.spmm(graph, x, weight, config=config))
    assert "blocks.pack" not in record.ops
    assert all(t.numel() != x.numel() for t in saved)
    learned = saved_tensors(lambda: functional.spmm(graph, x, weight.requires_grad_(), config=config))
    assert any(t.dtype == torch.int8 and t.numel() == x.numel() for t in learned)


def test_nothing_is_packed_without_a_gradient_of_the_weight() -> None:
    layer, x = QLinear(K, M, config=QConfig(save=INT2)), torch.randn(N, K, requires_grad=True)
    with trace() as record, torch.no_grad():
        layer(x)
    assert "blocks.pack" not in record.ops
    layer.weight.requires_grad_(False)
    with trace() as record:
        layer(x)
    assert "blocks.pack" not in record.ops


def bytes_of_products(convs: list[nn.Module], x: Tensor, edge_index: Tensor) -> int:
    """What the layers of a model keep, each storage counted once, without weights and what belongs to the graph. The
    mask or rows of the ReLU between layers are none of it."""
    storages: dict[int, int] = {}
    for conv in convs:
        outs: list[Tensor] = []
        for t in saved_tensors(lambda conv=conv, x=x, outs=outs: outs.append(conv(x, edge_index)) or outs[0]):
            of_graph = t.dim() == 1 and t.numel() >= len(x)  # an entry a node or an edge; blocks are fewer
            if not of_graph and not shares_memory(t, list(conv.parameters())):
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        x = outs[0].relu()
    return sum(storages.values())


@pytest.mark.parametrize("conv", [QGCNConv, QSAGEConv])
@pytest.mark.parametrize(("projection", "factor"), [(None, 12), (8, 30)])
def test_a_model_keeps_so_many_times_fewer_bytes(conv: type[nn.Module], projection: int | None, factor: int) -> None:
    """A block of 1024 2-bit codes has 4 bytes of metadata: 1/16 + 1/1024 of the bytes of fp32, or an eighth of that.
    SAGE's second product shares its rows. What fills the last block and the seeds is little of 400 rows."""
    x, edge_index = torch.randn(400, 128, requires_grad=True), torch.randint(400, (2, 1600))
    saves = ("fp32", Blocks(2, 1024, projection=projection))
    models = [[conv(128, 128, config=QConfig(save=save)) for _ in range(3)] for save in saves]
    fp32, packed = (bytes_of_products(model, x, edge_index) for model in models)
    assert fp32 >= 3 * x.nbytes
    assert fp32 >= factor * packed


class Model(nn.Module):
    def __init__(self, save: Any) -> None:
        super().__init__()
        config = QConfig(save=save)
        self.conv = QSAGEConv(K, M, config=config)
        self.head = QLinear(M, 4, config=config)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        return self.head(self.conv(x, edges).relu())


def test_a_compiled_model_trains_and_keeps_blocks() -> None:
    model, counter = Model(PROJECTED), CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for name in ("random", "power_law"):
        edge_index, num_nodes = GRAPHS[name]
        x = torch.randn(num_nodes, K, requires_grad=True)
        out = run(x, edge_index)
        kept = [t.dtype for t in out.grad_fn.saved_tensors if t.dtype in (torch.uint8, torch.int8)]
        assert kept == [torch.uint8] * 2  # SAGE's two products share theirs
        model.zero_grad()
        out.square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert counter.frame_count == 1


def test_a_block_length_of_its_own_choice_compiles() -> None:
    layer, x = QLinear(K, M, config=QConfig(save=Blocks(2, projection=8))), torch.randn(N, K, requires_grad=True)
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (x, x[1:]):
        grads = []
        for function in (run, layer):
            out = after(5, lambda function=function, rows=rows: function(rows))
            grads.append(torch.autograd.grad(out.sum(), layer.weight)[0])
        assert torch.equal(*grads)


def test_a_model_that_packs_hidden_rows_can_be_exported() -> None:
    model, x = nn.Sequential(nn.Linear(K, K), QLinear(K, M, config=QConfig(save=PROJECTED))).eval(), torch.randn(N, K)
    rows = torch.export.Dim("rows", min=32, max=2**30)  # at least two blocks: a size of one is special to a compiler
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    assert any(node.target == torch.ops.qgnn.blocks_pack.default for node in program.graph.nodes)
    for given in (x, x[5:]):
        assert torch.equal(program.module()(given), model(given))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("save", [INT2, PROJECTED], ids=str)
def test_what_is_recomputed_is_packed_by_the_same_seed(save: Blocks, reentrant: bool) -> None:
    model, x = Model(save), torch.randn(N, K)
    grads = []
    for run in (model, lambda *args: checkpoint(model, *args, use_reentrant=reentrant)):
        model.zero_grad()
        rows = x.clone().requires_grad_()
        after(3, lambda run=run, rows=rows: run(rows, EDGES)).square().sum().backward()
        grads.append({"x": rows.grad} | {k: p.grad.clone() for k, p in model.named_parameters()})
    assert_equal_pass(*grads)


def test_bins_that_inference_has_seen_serve_training() -> None:
    blocks = Blocks(2, 136, bins="optimal")  # a length that no other test has asked for
    with torch.inference_mode():
        functional.compress(torch.randn(9, K), 2, 136, "optimal")
    layer, x = QLinear(K, M, config=QConfig(save=blocks)), torch.randn(N, K, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_copies_keep_the_config() -> None:
    layer, x = QGCNConv(K, M, config=QConfig(save=PROJECTED)), torch.randn(N, K)
    expected = after(2, lambda: passes(layer, x, EDGES))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.config == layer.config
        assert_equal_pass(after(2, lambda other=other: passes(other, x, EDGES)), expected)
    assert repr(PROJECTED) in repr(layer.config)


def test_one_seed_draws_the_same_blocks_and_another_others() -> None:
    layer, x = QLinear(K, M, config=QConfig(rounding="nearest", save=PROJECTED)), torch.randn(N, K)
    first, again, other = (after(seed, lambda: passes(layer, x)) for seed in (1, 1, 2))
    assert_equal_pass(first, again)
    assert torch.equal(first["dx"], other["dx"])
    assert not torch.equal(first["dweight"], other["dweight"])


def test_autocast_and_leading_dimensions() -> None:
    layer, x = QLinear(K, M, config=QConfig(save=PROJECTED)), torch.randn(3, 5, K)
    flat = after(2, lambda: passes(layer, x.view(15, K)))
    whole = after(2, lambda: passes(layer, x))
    assert torch.equal(flat["out"], whole["out"].view(15, M))
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_pass(after(2, lambda: passes(layer, x)), whole)


def test_bytes_of_one_product() -> None:
    layer, x = QLinear(K, M, config=QConfig(save=INT2)), torch.randn(N, K, requires_grad=True)
    num_blocks = -(-N * K // 64)
    assert kept_bytes(lambda: layer(x), ignore=tuple(layer.parameters())) == num_blocks * (16 + 2 * 2) + 8
