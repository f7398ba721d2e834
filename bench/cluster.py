"""What a step on a graph over several GPUs takes at the very least: a prediction, of which nothing was measured, from
the floors of bench/roofline.py and datasheets.

Each GPU has as many nodes as all others and the edges into them. Per layer it sends rows to the GPUs whose nodes they
are neighbors of, and in the backward pass as many gradients come back. How many these are goes by how nodes were
spread: ``random``, or so that one edge in ten joins nodes of different GPUs (``1 in 10``), which is what is assumed of
a good partitioner, no property of these graphs. Communication and products of different nodes overlap, so a step takes
as long as the longer of both.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .roofline import FLOAT, INDEX, MACHINES, MEMORY_SHARE, SCALE, Machine
from .steps import ON, Step, training_step

HIDDEN = (256, 256)
GPUS = (8, 64, 256, 1024)
CUT = 0.1  # of the edges, see above

# Bytes a second that a GPU sends while it receives as many (datasheets: NVLink of 8 GPUs, and one 400 Gb/s adapter a
# GPU), and the share of it that exchanges among all get (assumed).
NODE_SIZE, NVLINK, NETWORK, LINK_SHARE = 8, 450e9, 50e9, 0.8
LATENCY_S, PEER_S = 20e-6, 1e-6  # of an exchange, and of each other GPU in it (assumed)
L2_BYTES = 50e6  # rows beyond it are gathered from memory


class Graph(NamedTuple):
    """A graph, its directed edges counted, and the widths of a GCN for it."""

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.num_features, *HIDDEN, self.num_classes)


GRAPHS = (
    Graph("products", 2_449_029, 123_718_280, 100, 47),
    Graph("papers100M", 111_059_956, 3_231_371_744, 128, 172),  # both directions
    Graph("10^9 edges", 100_000_000, 1_000_000_000, 128, 47),
)

# Bytes of a row of so many values on the wire.
ON_THE_WIRE = {
    "fp32": lambda width: width * FLOAT,
    "int8": lambda width: width + SCALE,
    "int2": lambda width: -(-width // 4) + SCALE,
}


def sent_rows(graph: Graph, num_gpus: int, cut: float | None) -> float:
    """Rows that a GPU sends in a layer, at most.

    A node of degree d has neighbors on ``(P - 1) (1 - (1 - 1/P)^d)`` other GPUs if these are random; of all degrees of
    one mean, equal ones make the most of it. Where few edges are cut, each asks for a row at most.
    """
    nodes, degree = graph.num_nodes / num_gpus, graph.num_edges / graph.num_nodes
    at_random = nodes * (num_gpus - 1) * (1 - (1 - 1 / num_gpus) ** degree)
    return at_random if cut is None else min(at_random, cut * graph.num_edges / num_gpus)


def exchange_s(graph: Graph, num_gpus: int, cut: float | None, form: str) -> float:
    """Seconds of a step's exchanges: two a layer."""
    rows, rate = sent_rows(graph, num_gpus, cut), LINK_SHARE * (NVLINK if num_gpus <= NODE_SIZE else NETWORK)
    layers = [width for _, width in pairwise(graph.widths)]
    waits = 2 * len(layers) * (LATENCY_S + (num_gpus - 1) * PEER_S)
    return waits + sum(2 * rows * ON_THE_WIRE[form](width) for width in layers) / rate


def own_steps(graph: Graph, num_gpus: int, way: str) -> list[Step]:
    """What a GPU does with its nodes and the edges into them, loops included."""
    nodes = -(-graph.num_nodes // num_gpus)
    return training_step("gcn", graph.widths, nodes, -(-graph.num_edges // num_gpus) + nodes, way)


def step_floor_s(step: Step, machine: Machine) -> float:
    """Seconds, with gathers from memory where the rows do not fit the cache."""
    floor = step.traffic.floor_us(machine) / 1e6
    if not step.traffic.gathered or step.traffic.bytes <= L2_BYTES:
        return floor
    return max(floor, step.traffic.gathered / (MEMORY_SHARE * machine.memory))


def work_s(graph: Graph, num_gpus: int, way: str) -> float:
    return sum(step_floor_s(step, MACHINES[ON]) for step in own_steps(graph, num_gpus, way))


def kept_gib(graph: Graph, num_gpus: int, cut: float | None) -> float:
    """What a GPU keeps for the backward pass: the edges in both orders with a weight each, features, and for each layer
    codes of its rows and of those received, the bit that ReLU leaves, and its result in fp32."""
    nodes, edges = graph.num_nodes / num_gpus, graph.num_edges / num_gpus
    received = sent_rows(graph, num_gpus, cut)
    structure = 2 * edges * (2 * INDEX + FLOAT)
    rows = sum((nodes + received) * (width + SCALE) + nodes * width * (FLOAT + 1 / 8) for width in graph.widths[1:])
    return (structure + nodes * (graph.num_features + SCALE) + rows) / 2**30


HEADER = (
    *("graph", "GPUs", "nodes spread", "GiB a GPU", "eager fp32 ms", "int8 ms", "fp32 sent ms", "int8 sent ms"),
    *("int2 sent ms", "step, all fp32", "step, int8 and int2 sent", "times as fast"),
)


def rows() -> Iterator[tuple[str, ...]]:
    for graph in GRAPHS:
        for num_gpus in GPUS:
            for name, cut in (("random", None), ("1 in 10", CUT)):
                yield _row(graph, num_gpus, name, cut)


def _row(graph: Graph, num_gpus: int, name: str, cut: float | None) -> tuple[str, ...]:
    work = [work_s(graph, num_gpus, way) for way in ("eager", "fused")]
    sent = [exchange_s(graph, num_gpus, cut, form) for form in ON_THE_WIRE]
    full, quantized = max(work[0], sent[0]), max(work[1], sent[2])
    times = (f"{1e3 * seconds:.3g}" for seconds in (*work, *sent, full, quantized))
    gib = f"{kept_gib(graph, num_gpus, cut):.1f}"
    return graph.name, str(num_gpus), name, gib, *times, f"{full / quantized:.1f}"


def table() -> tuple[str, Sequence[tuple[str, ...]]]:
    """A title and rows."""
    title = f"A prediction: a step of a GCN ({'-'.join(map(str, HIDDEN))}) over several {ON}, floors and datasheets"
    return title, [HEADER, *rows()]
