"""What each process of the tests of partitioned graphs does: processes import it by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import MLP, GCN2Conv

import qgnn
from data_parallel import join, leave
from graphs import GRAPHS
from qgnn.distributed import Int8State, PartitionedGraph, int8_hook, mean_loss, save_partitions
from qgnn.distributed.halo_exchange import _Message
from qgnn.nn import QAPPNP, QGATConv, QGCN2Conv, QGCNConv, QGINConv, QGraphConv, QSAGEConv, QSGConv
from qgnn.ops._backends import Backend

RANKS, F, STEPS = 3, 9, 50
NAMES = ("no_nodes", "isolated", "self_loops", "duplicates", "hub", "power_law")

Layer = tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]
WEIGHTED: dict[str, Layer] = {
    "gcn": (QGCNConv, (F, 5), {}),
    "gcn_improved": (QGCNConv, (F, 5), {"improved": True}),
    "gcn_mean": (QGCNConv, (F, 5), {"aggr": "mean"}),
    "gcn_plain": (QGCNConv, (F, 5), {"normalize": False}),
    "gcn2": (QGCN2Conv, (F, 0.2, 0.5, 2), {}),
    "sg": (QSGConv, (F, 5), {"K": 2, "cached": True}),
    "appnp": (QAPPNP, (3, 0.1), {}),
    "graph": (QGraphConv, (F, 5), {}),
    "graph_wide": (QGraphConv, (F, 2 * F), {"aggr": "mean"}),
}
UNWEIGHTED: dict[str, Layer] = {
    "gcn": (QGCNConv, (F, 5), {}),
    "gcn_mean": (QGCNConv, (F, 5), {"aggr": "mean", "normalize": False}),
    "sage": (QSAGEConv, (F, 5), {}),
    "sage_sum": (QSAGEConv, (F, 2 * F), {"aggr": "sum", "project": True, "normalize": True}),
    "gin": (QGINConv, (MLP([F, 8, 5], norm=None),), {"train_eps": True}),
}


def parts_of(name: str) -> Tensor:
    """Parts of two kinds: of one the last process has isolated nodes alone, of the other nothing."""
    num_nodes = GRAPHS[name][1]
    if name == "isolated":
        linked = GRAPHS[name][0].unique()
        return torch.full((num_nodes,), 2).index_fill(0, linked, 0).index_fill(0, linked[::2], 1)
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(2 if name == "duplicates" else RANKS, (num_nodes,), generator=generator)


def weight_of(name: str) -> Tensor:
    return torch.rand(GRAPHS[name][0].shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1


def values(num_rows: int, num_columns: int = F, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(layer: Layer, pyg: bool = False) -> nn.Module:
    """A layer in full precision, or PyG's with the same weights."""
    cls, args, kwargs = deepcopy(layer)
    torch.manual_seed(3)
    return (cls.pyg(*args, **kwargs) if pyg else cls(*args, **kwargs, config=None)).double()


def run_layer(conv: nn.Module, x: Tensor, edges: Any, rows: Tensor, *weight: Tensor) -> tuple[Tensor, ...]:
    """Output, the gradient of ``x`` and those of the parameters, of the loss that weighs outputs by :func:`values`."""
    x = x.clone().requires_grad_()
    first = (x, values(10**3, F, 7)[rows]) if isinstance(conv, GCN2Conv) else (x,)
    out = conv(*first, edges, *weight)
    out.backward(values(10**3, out.shape[1], 1)[rows])
    return out.detach(), x.grad, *(p.grad for p in conv.parameters())


def several(rank: int, folder: str) -> None:
    join(rank, folder, RANKS)
    found = {**layers(), **messages(rank, folder), **calls(), "errors": errors(rank, folder)}
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


def layers() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in NAMES:
        edge_index, num_nodes = GRAPHS[name]
        for weight in (weight_of(name), None):
            graph = PartitionedGraph.from_edge_index(edge_index, parts_of(name), weight, bits=None)
            for key, layer in (UNWEIGHTED if weight is None else WEIGHTED).items():
                x = values(num_nodes)[graph.nodes]
                found[name, key, weight is not None] = run_layer(made(layer), x, graph, graph.nodes)
        found[name] = graph.nodes
    return found


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def sums(graph: PartitionedGraph, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The sum over neighbors and the gradient of the rows, each added up over steps."""
    total, gradient = torch.zeros(2, *x.shape, dtype=torch.float64)
    for _ in range(steps):
        rows = x.clone().requires_grad_()
        out = qgnn.functional.spmm(graph, rows)
        out.backward(values(10**3, x.shape[1], 1)[graph.nodes].float())
        total += out.detach()
        gradient += rows.grad
    return total, gradient


def messages(rank: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    edge_index, num_nodes = GRAPHS["random"]
    parts, sizes = parts_of("random"), []
    send = dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(sent.nbytes)
        return send(received, sent, *args, **kwargs)

    for bits in (None, 8, 4, 2, 1):
        graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=bits)
        x = values(num_nodes).float()[graph.nodes]
        torch.manual_seed(rank)
        found["unbiased", bits] = sums(graph, x, 1 if bits is None else STEPS)
        for width in (128, 256, 300):
            graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=bits)
            sizes.clear()
            with replaced(dist, "all_to_all_single", counted):
                sums(graph, values(num_nodes, width).float()[graph.nodes], 1)
            found["bytes", bits, width] = graph.sent_bytes, graph.full_bytes, graph.num_exchanges, list(sizes)
        found["runs", bits] = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found["runs", bits].append(sums(graph, x, 1))
    found["rows"] = len(graph._exchange.boundary), len(graph.halo_nodes)
    found["nodes"] = graph.nodes

    graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=2)
    torch.manual_seed(1)
    same = torch.linspace(-1, 1, 256).repeat(len(graph.nodes), 1).requires_grad_()
    found["same rows"] = graph.exchange(same)().detach(), graph.halo_nodes
    with torch.no_grad():
        before = torch.get_rng_state()
        found["nearest"] = graph.exchange(values(num_nodes).float()[graph.nodes])()
        found["drew"] = not torch.equal(before, torch.get_rng_state())
    eight = PartitionedGraph.from_edge_index(edge_index, parts, bits=8)
    q = qgnn.functional.quantize(values(num_nodes).float(), qgnn.QConfig(rounding="nearest"))
    found["codes"] = eight.exchange(q.index_select(0, graph.nodes))(), q.dequantize()[graph.halo_nodes]
    found["decoded"] = graph.exchange(q.index_select(0, graph.nodes), exact=True)(), q.dequantize()[graph.halo_nodes]

    events: list[str] = []
    call, post, wait = Backend.call, _Message.post, _Message.wait

    def called(self: Any, primitive: str, name: str, *args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return call(self, primitive, name, *args, **kwargs)

    exact = PartitionedGraph.from_edge_index(edge_index, parts, bits=None)
    with (
        replaced(Backend, "call", called),
        replaced(_Message, "post", lambda *args: (events.append("post"), post(*args))),
        replaced(_Message, "wait", lambda *args: (events.append("wait"), wait(*args))[1]),
    ):
        sums(exact, values(num_nodes).float()[exact.nodes], 1)
    found["events"] = events
    with qgnn.trace() as t:
        sums(eight, values(num_nodes).float()[graph.nodes], 1)
    found["trace"] = {name: row for name, row in t.ops.items() if name.startswith("halo")}

    if rank == 0:
        save_partitions(f"{folder}/parts", edge_index, parts, weight_of("random"), num_parts=RANKS)
    dist.barrier()
    loaded = PartitionedGraph.load(f"{folder}/parts", bits=None)
    whole = PartitionedGraph.from_edge_index(edge_index, parts, weight_of("random"), bits=None)
    x = values(num_nodes)[whole.nodes]
    found["loaded"], found["whole"] = sums(loaded, x, 1), sums(whole, x, 1)
    return found


def calls() -> dict[Any, Any]:
    """Layers and sums called in other ways than once, on rows of fp32 in full precision."""
    edge_index, num_nodes = GRAPHS["random"]
    parts, spmm = parts_of("random"), qgnn.functional.spmm
    exact, eight = (PartitionedGraph.from_edge_index(edge_index, parts, bits=bits) for bits in (None, 8))
    x = values(num_nodes).float()[exact.nodes]
    mixed = qgnn.QConfig(fmt="msfp12", rounding="nearest")
    found: dict[Any, Any] = {"formats": spmm(exact, x, config=mixed)}
    with torch.no_grad():
        found["int8"] = spmm(eight, x, config=qgnn.QConfig(rounding="nearest"))
        found["no columns"] = spmm(eight, x[:, :0])
    found["moved"] = spmm(exact.to("cpu"), x)
    found["sets"] = QGINConv(nn.Identity(), config=None)(torch.stack([x, 2 * x]), exact)

    rows = x.clone().requires_grad_()
    out = spmm(eight, rows)
    found["again"] = [torch.autograd.grad(out.sum(), rows, retain_graph=True)[0] for _ in range(2)]

    hub, _ = GRAPHS["hub"]
    graph = PartitionedGraph.from_edge_index(hub, parts_of("hub"), bits=None)
    found["half"] = spmm(graph, torch.full((len(graph.nodes), 1), 300.0).half(), reduce="mean"), graph.nodes

    found["exchanges"] = []
    for layer in (QGCNConv(F, 2, config=None), QSGConv(F, 2, K=2, cached=True, config=None)):
        graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=None)
        for _ in range(2):
            layer(x, graph)
            found["exchanges"].append(graph.num_exchanges)

    graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=1)
    found["constant"], found["sent once"] = [], []
    for config in (None, qgnn.QConfig()):
        layer = QSAGEConv(F, 2 * F, config=config)
        for _ in range(2):
            layer(x, graph)
            found["sent once"].append(graph.sent_bytes)
        q = x if config is None else qgnn.nn._common.operand(x, config)
        found["constant"].append((graph.exchange(q)(), q.clone() if config is None else q.dequantize()))
        found["sent once"].append(graph.sent_bytes)
    x.add_(1)
    found["changed"] = [graph.exchange(x)() for _ in range(2)]
    if dist.get_rank() == 1:
        x.mul_(2)
    found["changed by one"] = [graph.exchange(x)() for _ in range(2)]
    with torch.no_grad():
        found["evaluated"] = graph.exchange(x)()
    return found


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(rank: int, folder: str) -> dict[str, str]:
    edge_index, num_nodes = GRAPHS["random"]
    parts = parts_of("random")
    build = PartitionedGraph.from_edge_index
    other_edges = edge_index.flip(1) if rank == 1 else edge_index
    other_parts = parts.roll(1) if rank == 1 else parts
    too_many = parts + 1 if rank == 1 else parts
    graph = build(edge_index, parts)
    x = values(num_nodes).float()[graph.nodes]
    cases: dict[str, Callable[[], Any]] = {
        "edges": lambda: build(other_edges, parts),
        "parts": lambda: build(edge_index, other_parts),
        "weights": lambda: build(edge_index, parts, None if rank else weight_of("random")),
        "bits": lambda: build(edge_index, parts, bits=4 if rank == 2 else 8),
        "block_size": lambda: build(edge_index, parts, bits=4, block_size=64 if rank == 2 else 128),
        "failed": lambda: build(edge_index, too_many),
        "missing": lambda: PartitionedGraph.load(f"{folder}/nothing"),
        "bad bits": lambda: build(edge_index, parts, bits=3),
        "bits as text": lambda: build(edge_index, parts, bits="8" if rank == 2 else 8),
        "adjacency": lambda: PartitionedGraph.from_adjacency(edge_index, num_nodes),
        "bad block_size": lambda: build(edge_index, parts, block_size=12),
        "learned": lambda: build(edge_index, parts, weight_of("random").requires_grad_()),
        "attention": lambda: QGATConv(F, 2)(x, graph),
        "maximum": lambda: QSAGEConv(F, 2, aggr="max")(x, graph),
        "edge_weight": lambda: QGCNConv(F, 2)(x, graph, torch.ones(3)),
        "edge_weight of sum": lambda: qgnn.functional.spmm(graph, x, torch.ones(3)),
        "dropped edges": lambda: QAPPNP(2, 0.1, dropout=0.5)(x, graph),
        "flow": lambda: QGCNConv(F, 2, flow="target_to_source")(x, graph),
        "rows": lambda: QGCNConv(F, 2)(values(num_nodes).float(), graph),
    }
    return {name: message_of(function) for name, function in cases.items()}


class Net(nn.Module):
    def __init__(self, config: qgnn.QConfig | None) -> None:
        super().__init__()
        self.first, self.second = QGCNConv(F, 16, config=config), QGCNConv(16, 4, config=config)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


def curve(edges: Any, nodes: Tensor, config: qgnn.QConfig | None, wrap: Callable[[Net], Any]) -> tuple[Any, Tensor]:
    """Losses of a training on the labels of every third node, and the weights behind it."""
    num_nodes = GRAPHS["power_law"][1]
    x, y = values(num_nodes).float(), values(num_nodes)[:, :4].argmax(1)
    labeled = nodes[nodes % 3 == 0]
    local = torch.searchsorted(nodes, labeled)
    torch.manual_seed(1)
    net = Net(config)
    model = wrap(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    torch.manual_seed(int(nodes[0]))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        terms = nn.functional.cross_entropy(model(x[nodes], edges)[local], y[labeled], reduction="none")
        loss = mean_loss(terms) if dist.is_initialized() else terms.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), nn.utils.parameters_to_vector(net.parameters()).detach()


def example() -> str:
    """What the guide's example prints, of a small graph."""
    edge_index, num_nodes = GRAPHS["power_law"]
    x = values(num_nodes).float()
    mask = torch.arange(num_nodes) % 2 == 0
    data = Data(x, edge_index, y=x.argmax(1), train_mask=mask, test_mask=~mask)
    printed = StringIO()
    with (
        replaced(dist, "init_process_group", lambda backend: None),
        replaced(dist, "destroy_process_group", lambda: None),
        replaced(qgnn.data, "wordnet", lambda: data),
        redirect_stdout(printed),
    ):
        guide = (Path(__file__).parent.parent / "docs" / "guide" / "processes.md").read_text()
        exec(guide.split("<!-- example: partitioned -->\n```python\n")[1].split("```")[0], {})
    return printed.getvalue()


def train(rank: int, folder: str) -> None:
    join(rank, folder)
    edge_index, num_nodes = GRAPHS["power_law"]
    parts = torch.arange(num_nodes) % 2
    found: dict[str, Any] = {}

    def with_hook(net: Net) -> DistributedDataParallel:
        model = DistributedDataParallel(net)
        model.register_comm_hook(Int8State(), int8_hook)
        return model

    cases: dict[str, tuple[Any, ...]] = {
        "fp32": (None, None, DistributedDataParallel),
        "int8": (8, None, DistributedDataParallel),
        "int8 layers and gradients": (8, qgnn.QConfig(), with_hook),
    }
    for name, (bits, config, wrap) in cases.items():
        graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=bits)
        found[name] = curve(graph, graph.nodes, config, wrap)
    lonely = torch.zeros_like(parts)
    graph = PartitionedGraph.from_edge_index(edge_index, lonely, bits=None)
    nodes = graph.nodes
    terms = torch.ones(len(nodes), requires_grad=True)
    loss = mean_loss(terms)
    loss.backward()
    found["mean_loss"] = loss.detach(), terms.grad
    generator = torch.Generator().manual_seed(rank)
    found["uneven"] = [mean_loss(torch.randn(30 + 170 * rank, generator=generator)) for _ in range(20)]
    found["half"] = mean_loss(torch.full((70_000,), 0.25).half())
    found["example"] = example()
    torch.save(found, f"{folder}/{rank}.pt")
    leave()
