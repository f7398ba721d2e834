"""Layers and training steps as lists of the passes that they make over memory, each with its floor (bench/roofline.py).

Three ways to make each: ``eager``, torch's kernels in fp32 on TF32 tensor cores, one a PyTorch operation, with CSR
matrices prepared for both directions; ``unfused``, int8 products and aggregations that hand rows to each other, with
torch's fp32 kernels between layers; ``fused``, quantization, bias, ReLU, dropout and their gradients inside them too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from . import roofline as r
from .roofline import FLOAT, MACHINES, SECTOR, Step, Traffic, elementwise

WAYS = ("eager", "unfused", "fused")
MODELS = {  # hidden widths as in the suite `train`, and in the usual examples of the larger graphs
    "arxiv": (256, 256),
    "products": (256, 256),
    "reddit": (256,),
    "pubmed": (64,),
    "cora": (64,),
}
WIDTHS = (64, 128, 256)
LAYER, ON = "arxiv/gcn-layer/256", "H100"  # the layer and the machine of the table that compares the ways pass by pass

# What the passes of a GCN layer are for, whichever way it is made.
PURPOSES = {
    "quantize": ("quantize.forward",),
    "product": ("linear", "matmul.forward", "quantize_matmul.forward"),
    "aggregation": ("spmm.forward",),
    "bias, ReLU, dropout": ("bias", "relu", "dropout"),
    "backward of bias, ReLU, dropout": ("dropout backward", "relu backward", "bias backward"),
    "quantize, backward": ("quantize_grad.backward", "quantize.backward"),
    "transposed aggregation": ("spmm.backward",),
    "gradient of x": ("linear dx", "matmul.backward_dx"),
    "gradient of the weight": ("linear dw", "matmul.backward_dw"),
}
HEADS = 4
ATTENTION = (r.attention, r.attention_targets, r.attention_sources)

Steps = list[Step]


def _elementwise_tail(N: int, M: int) -> Steps:
    """ReLU and dropout, whose mask has a byte a value."""
    rows, mask = N * M * FLOAT, N * M
    return [Step("relu", elementwise(rows, rows)), Step("dropout", elementwise(rows, rows, mask))]


def _elementwise_tail_backward(N: int, M: int) -> Steps:
    rows, mask = N * M * FLOAT, N * M
    return [
        Step("dropout backward", elementwise(rows, mask, rows)),
        Step("relu backward", elementwise(rows, rows, rows)),
    ]


def _bias_backward(N: int, M: int) -> Step:
    return Step("bias backward", elementwise(N * M * FLOAT, M * FLOAT))


def gcn_eager(N: int, E: int, K: int, M: int, *, tail: bool = True, needs_dx: bool = True) -> Steps:
    """``dropout(relu(A x W^T + b))``, forward and backward."""
    rows = N * M * FLOAT
    forward = [
        Step("linear", r.linear(N, K, M, bias=False)),
        Step("spmm.forward", r.spmm(N, E, M, FLOAT)),
        Step("bias", elementwise(rows, M * FLOAT, rows)),
        *(_elementwise_tail(N, M) if tail else []),
    ]
    backward = [
        *(_elementwise_tail_backward(N, M) if tail else []),
        _bias_backward(N, M),
        Step("spmm.backward", r.spmm(N, E, M, FLOAT)),
        Step("linear dw", r.linear_dw(N, K, M)),
        *([Step("linear dx", r.linear(N, M, K, bias=False))] if needs_dx else []),
    ]
    return forward + backward


def _int8_backward(N: int, E: int, K: int, M: int, needs_dx: bool) -> Steps:
    """From the codes of the gradient behind the aggregation."""
    dx = [Step("quantize.backward", r.quantize(K, M)), Step("matmul.backward_dx", r.matmul(N, M, K, bias=False))]
    return [
        Step("spmm.backward", r.spmm(N, E, M, requantize=True)),
        *(dx if needs_dx else []),
        Step("matmul.backward_dw", r.matmul_dw(N, K, M)),
    ]


def gcn_unfused(N: int, E: int, K: int, M: int, *, tail: bool = True, needs_dx: bool = True) -> Steps:
    """A kernel a primitive, and torch's between the layers; constant features (no ``needs_dx``) are codes already."""
    forward = [
        *([Step("quantize.forward", r.quantize(N, K))] if needs_dx else []),
        Step("quantize.forward", r.quantize(M, K)),
        Step("matmul.forward", r.matmul_requantize(N, K, M)),
        Step("spmm.forward", r.spmm(N, E, M, bias=True)),
        *(_elementwise_tail(N, M) if tail else []),
    ]
    backward = [
        *(_elementwise_tail_backward(N, M) if tail else []),
        _bias_backward(N, M),
        Step("quantize.backward", r.quantize(N, M)),
        *_int8_backward(N, E, K, M, needs_dx),
    ]
    return forward + backward


def gcn_fused(N: int, E: int, K: int, M: int, *, tail: bool = True, needs_dx: bool = True) -> Steps:
    """As ``functional.graph_linear`` runs: kernels of products and aggregations, and one that rounds the gradient."""
    product = r.quantize_matmul(N, K, M) if needs_dx else r.matmul_requantize(N, K, M)
    forward = [
        Step("quantize.forward", r.quantize(M, K)),
        Step("quantize_matmul.forward" if needs_dx else "matmul.forward", product),
        Step("spmm.forward", r.spmm(N, E, M, bias=True, mask=tail)),
    ]
    gradient = Step("quantize_grad.backward", r.quantize_grad(N, M, mask=tail))
    return [*forward, gradient, *_int8_backward(N, E, K, M, needs_dx)]


def _gat_ends(N: int, K: int, M: int, way: str, tail: bool, needs_dx: bool) -> tuple[Steps, Steps]:
    """What comes before and after the aggregation of a layer with attention, in both directions: the GCN layer's."""
    layer = GCN[way](N, 0, K, M, tail=tail, needs_dx=needs_dx)
    names = [step.name for step in layer]
    forward, backward = names.index("spmm.forward"), names.index("spmm.backward")
    return layer[:forward] + layer[backward + 1 :], layer[forward + 1 : backward]


def gat_eager(N: int, E: int, K: int, M: int, *, H: int = HEADS, tail: bool = True, needs_dx: bool = True) -> Steps:
    """``dropout(relu(attention(x W^T) + b))`` with H heads and M values in all, as PyG's GATConv: a message an edge."""
    before, after = _gat_ends(N, K, M, "eager", tail, needs_dx)
    rows, messages, weights = N * M * FLOAT, E * M * FLOAT, E * H * FLOAT
    gathered = Traffic(rows + messages, r.gather(E, M, FLOAT, False) + messages)
    return [
        *before,
        _node_scores(N, M, H),
        Step("edge scores, softmax", r.sums_by_edge(N, E, 8 * H, 6 * H)),
        Step("gather messages", gathered),
        Step("times weights", elementwise(messages, weights, messages)),
        Step("scatter messages", elementwise(messages, rows)),
        *after,
        Step("scatter backward", gathered),
        Step("times weights backward", elementwise(6 * messages, 2 * weights)),
        Step("gather backward", elementwise(messages, rows)),
        Step("softmax, edge scores backward", r.sums_by_edge(N, E, 8 * H, 6 * H)),
        _node_scores_backward(N, M, H),
    ]


def gat_unfused(N: int, E: int, K: int, M: int, *, H: int = HEADS, tail: bool = True, needs_dx: bool = True) -> Steps:
    """Attention as the primitives that it is made of: a weight an edge and head is written, no message."""
    before, after = _gat_ends(N, K, M, "unfused", tail, needs_dx)
    return [
        *before,
        _node_scores(N, M, H),
        Step("attention_scores.forward", r.sums_by_edge(N, E, 2 * H, H)),
        Step("spmm.forward", r.spmm(N, E, M, heads=H)),
        *after,
        Step("sddmm.backward", r.sddmm(N, E, M, heads=H)),
        Step("attention_scores.backward", r.sums_by_edge(N, E, 2 * H, 3 * H)),
        Step("spmm.backward", r.spmm(N, E, M, heads=H, requantize=True)),
        _node_scores_backward(N, M, H),
    ]


def gat_fused(
    N: int, E: int, K: int, M: int, *, H: int = HEADS, tail: bool = True, needs_dx: bool = True, itemsize: int = 1
) -> Steps:
    """One pass that makes weights as it aggregates, and two backward, by targets and by sources. A node's scale, scores
    and sum take one sector, and a second one where gradients are gathered. ``itemsize`` 4 is full precision."""
    before, after = _gat_ends(N, K, M, "fused" if itemsize == 1 else "eager", tail, needs_dx)
    rows, values = N * M * FLOAT, N * M * itemsize
    side = N * (1 + 2 * H) * FLOAT
    structure = r.INDEX * (N + 1 + E)
    gathered = r.gather(E, M, itemsize, True) - E * FLOAT  # no weight an edge
    rounded = values if itemsize == 1 else 0  # the first pass backward writes the codes that the second one gathers
    targets = Traffic(structure + values + 2 * side + rows + rounded, gathered + rows + rounded)
    sources = Traffic(structure + 3 * values + 3 * side, gathered + E * SECTOR + values)
    return [
        *before,
        Step("attention.forward", Traffic(structure + values + side + rows, gathered + rows)),
        *[step for step in after if not step.name.startswith("quantize_grad")],
        Step("attention.backward targets", targets),
        Step("attention.backward sources", sources),
    ]


def _node_scores(N: int, M: int, H: int) -> Step:
    """Two products of the rows with a vector a head, summed by head."""
    rows, scores = N * M * FLOAT, N * H * FLOAT
    return Step("node scores", elementwise(2 * rows, 2 * rows, 2 * rows, 2 * scores))


def _node_scores_backward(N: int, M: int, H: int) -> Step:
    rows, scores = N * M * FLOAT, N * H * FLOAT
    return Step("node scores backward", elementwise(2 * rows, 2 * scores, 4 * rows))


GCN: dict[str, Callable[..., Steps]] = {"eager": gcn_eager, "unfused": gcn_unfused, "fused": gcn_fused}
GAT: dict[str, Callable[..., Steps]] = {"eager": gat_eager, "unfused": gat_unfused, "fused": gat_fused}


def training_step(model: str, widths: Sequence[int], N: int, E: int, way: str) -> Steps:
    """All layers, the loss and Adam. What feeds the softmax is in full precision; the features are constant."""
    steps: Steps = []
    for layer, (K, M) in enumerate(pairwise(widths)):
        options: dict[str, Any] = {"needs_dx": layer > 0}
        if layer < len(widths) - 2:
            steps += (GCN if model == "gcn" else GAT)[way](N, E, K, M, **options)
        elif model == "gcn":
            steps += gcn_eager(N, E, K, M, tail=False, **options)
        else:
            exact = gat_eager if way == "eager" else partial(gat_fused, itemsize=FLOAT)
            steps += exact(N, E, K, M, H=1, tail=False, **options)
    logits = N * widths[-1] * FLOAT
    num_parameters = sum((K + 1) * M for K, M in pairwise(widths))
    return [
        *steps,
        Step("loss", elementwise(logits, logits, logits, logits)),
        Step("adam", elementwise(7 * num_parameters * FLOAT)),
    ]


def primitives(N: int, E: int, F: int) -> Steps:
    """Each primitive on rows of F values, square where it is a product."""
    return [
        Step("quantize", r.quantize(N, F)),
        Step("quantize_grad", r.quantize_grad(N, F)),
        Step("linear (fp32)", r.linear(N, F, F)),
        Step("matmul", r.matmul(N, F, F)),
        Step("matmul_requantize", r.matmul_requantize(N, F, F)),
        Step("quantize_matmul", r.quantize_matmul(N, F, F)),
        Step("matmul_dw", r.matmul_dw(N, F, F)),
        Step("spmm (fp32)", r.spmm(N, E, F, FLOAT)),
        Step("spmm", r.spmm(N, E, F)),
        Step("spmm, bias, mask", r.spmm(N, E, F, bias=True, mask=True)),
        Step("spmm_requantize", r.spmm(N, E, F, requantize=True)),
        Step("sddmm", r.sddmm(N, E, F)),
        *(Step(f"{make.__name__} (fp32)", make(N, E, F, HEADS, FLOAT)) for make in ATTENTION),
        *(Step(make.__name__, make(N, E, F, HEADS)) for make in ATTENTION),
    ]


def cases() -> Iterator[tuple[str, Steps]]:
    """By name, as ``arxiv/gcn-layer/256/fused``. The graphs have self-loops."""
    from qgnn.data.generate import SHAPES

    for like, hidden in MODELS.items():
        shape = SHAPES[like]
        N, E = shape.num_nodes, shape.num_edges + shape.num_nodes
        for F in WIDTHS:
            yield f"{like}/primitives/F{F}", primitives(N, E, F)
        widths = (shape.num_features, *hidden, shape.num_classes)
        for way in WAYS:
            yield f"{like}/gcn-layer/{hidden[0]}/{way}", GCN[way](N, E, hidden[0], hidden[0])
        for way in WAYS:
            yield f"{like}/gat-layer/{hidden[0]}/{way}", GAT[way](N, E, hidden[0], hidden[0])
        for model in ("gcn", "gat"):
            for way in WAYS:
                name = f"{like}/{model}/{'-'.join(map(str, widths))}/{way}"
                yield name, training_step(model, widths, N, E, way)


def floors_us(steps: Sequence[Step]) -> dict[str, float]:
    """One pass after the other, by machine."""
    return {name: sum(step.traffic.floor_us(machine) for step in steps) for name, machine in MACHINES.items()}


def total_bytes(steps: Sequence[Step]) -> int:
    return sum(step.traffic.bytes for step in steps)


def records(found: dict[str, Steps]) -> Iterator[dict[str, Any]]:
    for case, steps in found.items():
        for step in steps:
            floor_us = {name: float(f"{us:.4g}") for name, us in floors_us([step]).items()}
            yield {"suite": "roofline", "case": case, "step": step.name, **step.traffic._asdict(), "floor_us": floor_us}


def tables(found: dict[str, Steps]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Titles and rows, the last table the one that compares whole layers and training steps."""
    header = ("MB", "MB of L2", "Gop", *(f"{name} us" for name in MACHINES))
    for case, steps in found.items():
        if "/primitives/" in case:
            yield case, [("pass", *header), *((step.name, *_figures([step])) for step in steps)]
    yield f"{LAYER}, forward and backward: MB, and microseconds of {ON}", by_purpose(found)
    wholes = [(case, *_figures(steps)) for case, steps in found.items() if "/primitives/" not in case]
    yield "Layers and training steps, forward and backward: sums of the passes' floors", [("case", *header), *wholes]


def by_purpose(found: dict[str, Steps]) -> list[tuple[str, ...]]:
    """The three ways to make ``LAYER`` side by side: MB of each, then the floors."""

    def row(title: str, *names: str) -> tuple[str, ...]:
        chosen = [[step for step in found[f"{LAYER}/{way}"] if step.name in names] for way in WAYS]
        figures = [*(total_bytes(steps) / 1e6 for steps in chosen), *(floors_us(steps)[ON] for steps in chosen)]
        return (title, *(f"{figure:.1f}" for figure in figures))

    header = ("purpose", *(f"{way} MB" for way in WAYS), *(f"{way} us" for way in WAYS))
    rows = [row(purpose, *names) for purpose, names in PURPOSES.items()]
    return [header, *rows, row("all", *(name for names in PURPOSES.values() for name in names))]


def _figures(steps: Sequence[Step]) -> tuple[str, ...]:
    traffic = [step.traffic for step in steps]
    sums = (sum(t.bytes for t in traffic) / 1e6, sum(t.gathered for t in traffic) / 1e6)
    operations = sum(t.operations for t in traffic) / 1e9
    return (*(f"{value:.4g}" for value in (*sums, operations)), *(f"{us:.4g}" for us in floors_us(steps).values()))
