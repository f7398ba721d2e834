"""Arguments that each operator takes, for tests that go through all of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import qgnn.ops.activation
import qgnn.ops.adjacency
import qgnn.ops.attention
import qgnn.ops.attention_dot
import qgnn.ops.attention_gatv2
import qgnn.ops.codes
import qgnn.ops.graph_linear
import qgnn.ops.matmul
import qgnn.ops.quantize_grid
import qgnn.ops.sddmm
import qgnn.ops.softmax
import qgnn.ops.spmm
import qgnn.ops.spmm_extremum
import qgnn.ops.spmm_incidence  # noqa: F401  the backward operators are registered by these
from qgnn import Graph
from qgnn.rounding import Grid

S, T, E, F, H, K = 5, 4, 7, 6, 3, 2
GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 4, 4, 0], [0, 0, 1, 3, 3, 3, 3]]), (S, T))


def codes(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def exponents(*shape: int) -> Tensor:
    return torch.randint(100, 150, shape, dtype=torch.uint8)


def both_orders() -> dict[str, Tensor]:
    csr, csc = GRAPH.csr, GRAPH.csc
    tensors = {"indptr": csr.indptr, "index": csr.index, "indptr_t": csc.indptr, "index_t": csc.index}
    return {name: t.clone() for name, t in (tensors | {"order_t": csc.order}).items()}


def rounding() -> dict[str, Any]:
    return {"seed": torch.tensor([1]), "bits": 8, "granularity": "row"}


def on_grid(grid: Grid) -> dict[str, Any]:
    return {"seed": torch.tensor([1]), "stream": 2, **grid._asdict()}


def weights(prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}weight": torch.rand(E), f"{prefix}weight_t": torch.rand(E), "row_factor": torch.rand(T)}


def attention_options(rows: int) -> dict[str, Any]:
    """What the attention operators share but for their operands: features of edges, of so many columns each, too."""
    edges = {"edge_attr": torch.randn(E, K), "edge_weight": torch.randn(rows, K), "edge_order": GRAPH.csr.order.clone()}
    seeds = {"seed": torch.tensor([1]), "bits": 8, "threshold": 9, "dropout_seed": torch.tensor([2])}
    return {**edges, **both_orders(), **seeds}


def arguments_of(name: str) -> dict[str, Any]:
    """Arguments that the operator takes."""
    pairs = {"x_target": torch.randn(T, F), "target_scale": None, "x_source": torch.randn(S, F), "source_scale": None}
    scores = {"score_target": torch.randn(T, H), "score_source": torch.randn(S, H)}
    no_index_t = {k: v for k, v in both_orders().items() if k != "index_t"}
    rows, kept = {"x": torch.randn(S, F), "x_scale": None}, {"x": codes(S, F), "x_scale": torch.rand(S)}
    needs_edges = {"needs_dattr": True, "needs_dweight": True}
    both = {"needs_dx": True, "needs_dweight": True}
    epilogue = {"relu": True, "threshold": 9, "dropout_seed": torch.tensor([2]), "keep_mask": True}
    blocks = {"packed": torch.ones(2, 4, dtype=torch.uint8), "low": torch.rand(2), "step": torch.rand(2).bfloat16()}
    blocks |= {"edges": torch.tensor([0, 1.25, 1.75, 3]), "packed_seed": torch.tensor([3])}
    packed = {**blocks, "packed_bits": 2, "projection": 4}
    product = {**epilogue, **packed, "x_float": None}
    no_relu = {name: epilogue[name] for name in ("threshold", "dropout_seed")}
    behind = {"mask": torch.zeros(T, 1, dtype=torch.uint8), "threshold": 9, "needs_db": True}
    csr = {"indptr": GRAPH.csr.indptr.clone(), "index": GRAPH.csr.index.clone()}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "activation": lambda: {
            **{"x": torch.randn(S, F), "bias": torch.rand(F), "residual": torch.randn(S, F), "seed": torch.tensor([1])},
            **{"kind": "elu", "slope": 1.5, "keep_codes": True, **no_relu, "keep": True},
        },
        "activation_backward": lambda: {
            **{"grad": torch.randn(S, F), "mask": torch.zeros(S, 1, dtype=torch.uint8), "derivative": None},
            **{"kind": "leaky_relu", "slope": 0.1, "needs_db": True, "threshold": 9, "dropout_seed": torch.tensor([2])},
        },
        "adjacency_filter": lambda: {
            **{**csr, "order": GRAPH.csr.order.clone(), "keep": torch.arange(E) % 3 > 0, "weight": torch.rand(E)},
            **{"number": torch.arange(S).flip(0), "num_kept": 4},
        },
        "adjacency_merge": lambda: {
            **{**csr, "order": GRAPH.csr.order.clone(), "weight": torch.rand(E), "new_row": torch.tensor([0, 3, 3])},
            **{"new_index": torch.tensor([4, 0, 0]), "new_order": torch.arange(E, E + 3), "new_weight": torch.rand(3)},
        },
        "codes_pack": lambda: {"codes": torch.randint(-4, 4, (S, F), dtype=torch.int8), "bits": 3},
        "codes_unpack": lambda: {
            **{"stored": torch.randint(256, (S, 3), dtype=torch.uint8), "bits": 3, "num_codes": F, "signed": True},
        },
        "quantize": lambda: {"x": torch.randn(S, F), **rounding(), "block_size": 4},
        "quantize_dequantize": lambda: {"x": torch.randn(S, F), **on_grid(Grid(4, False, 2, 0, 1, 0, -6, 6, False))},
        "quantize_shared": lambda: {"x": torch.randn(S, F), **on_grid(Grid(4, True, 0, 3, 3, 3, -7, 7, False))},
        "matmul_codes": lambda: {
            **{"x": codes(S, F), "x_scale": torch.rand(S), "weight": codes(H, F), "weight_scale": torch.rand(H)},
            **{"bias": torch.randn(H), "pass_": "forward", "format_name": "int4"},
        },
        "matmul_codes_dw": lambda: {
            **{"grad": codes(S, H), "grad_scale": torch.rand(S), "x": codes(S, F), "x_scale": torch.rand(S)},
            "format_name": "int4",
        },
        "matmul_shared": lambda: {
            **{
                "x": codes(S, F),
                "x_exponent": exponents(S, 2),
                "weight": codes(H, F),
                "weight_exponent": exponents(H, 2),
            },
            **{
                "bias": torch.randn(H),
                "block_size": 4,
                "fraction_bits": 6,
                "pass_": "forward",
                "format_name": "msfp12",
            },
        },
        "matmul": lambda: {
            **{**rows, "weight": torch.randn(H, F), "bias": torch.randn(H)},
            **{**rounding(), "keep_codes": True, **product},
        },
        "matmul_backward": lambda: {
            **{"grad": torch.randn(S, H), **kept, "weight": torch.randn(H, F)},
            **{**rounding(), "needs_dx": True, "needs_dw": True, **behind, **packed},
            "mask": torch.zeros(S, 1, dtype=torch.uint8),
        },
        "spmm": lambda: {
            **{**rows, **weights(), "bias": torch.rand(F), **both_orders(), **rounding(), "keep_codes": True},
            **{**epilogue, "x_float": None},
        },
        "spmm_backward": lambda: {
            "grad": torch.randn(T, F),
            **kept,
            **weights(),
            **both_orders(),
            **rounding(),
            **both,
            **behind,
        },
        "spmm_extremum": lambda: {
            **{**rows, "weight": torch.rand(E), **csr},
            **{**rounding(), "largest": True, "keep_codes": True, "x_float": None},
        },
        "spmm_extremum_backward": lambda: {
            **{"grad": torch.randn(T, F), "arg": torch.randint(E, (T, F)).int(), **kept, "weight": torch.rand(E)},
            **{"index": csr["index"], "num_sources": S, **both},
        },
        "sddmm": lambda: {**pairs, **both_orders(), **rounding(), "op": "dot", "heads": H, "keep_codes": True},
        "sddmm_backward": lambda: {
            **{"grad": torch.randn(E, H), "x_target": codes(T, F), "target_scale": torch.rand(T, H)},
            **{"x_source": codes(S, F), "source_scale": torch.rand(1), **both_orders()},
            **{"bits": 8, "op": "dot", "heads": H, "needs_dtarget": True, "needs_dsource": True},
        },
        "softmax": lambda: {"scores": torch.randn(E, H), "indptr": csr["indptr"]},
        "softmax_backward": lambda: {"grad": torch.randn(E, H), "out": torch.rand(E, H), "indptr": csr["indptr"]},
        "attention": lambda: {**rows, **scores, **attention_options(H), "negative_slope": 0.2, "keep": True},
        "attention_backward": lambda: {
            **{**kept, **scores, "grad": torch.randn(T, F), "x_scale": torch.rand(S, H) / 127, "lse": torch.rand(T, H)},
            **{**attention_options(H), "negative_slope": 0.2, **needs_edges},
        },
        "attention_gatv2": lambda: {
            **{**pairs, "att": torch.randn(H, F // H), **attention_options(F), "negative_slope": 0.2, "keep": True},
        },
        "attention_gatv2_backward": lambda: {
            **{"grad": torch.randn(T, F), "x_target": codes(T, F), "target_scale": torch.rand(T, H) / 127},
            **{"x_source": codes(S, F), "source_scale": torch.rand(S, H) / 127, "lse": torch.rand(T, H)},
            **{"att": torch.randn(H, F // H), **attention_options(F), "negative_slope": 0.2, **needs_edges},
        },
        "attention_dot": lambda: {
            **{"query": torch.randn(T, F), "query_scale": None, "key": torch.randn(S, F), "key_scale": None},
            **{"value": torch.randn(S, F), "value_scale": None, **attention_options(F), "heads": H, "keep": True},
        },
        "attention_dot_backward": lambda: {
            **{
                "grad": torch.randn(T, F),
                "query": codes(T, F),
                "query_scale": torch.rand(T, H) / 127,
                "key": codes(S, F),
            },
            **{"key_scale": torch.rand(S, H) / 127, "value": codes(S, F), "value_scale": torch.rand(S, H) / 127},
            **{"lse": torch.rand(T, H), **attention_options(F), **needs_edges},
        },
        "attention_scores": lambda: {**scores, **no_index_t, "negative_slope": 0.2},
        "attention_scores_backward": lambda: {
            **{"grad": torch.randn(E, H), "out": torch.rand(E, H), **scores, **no_index_t, "negative_slope": 0.2},
        },
        "graph_linear": lambda: {
            **{**rows, "weight": torch.randn(H, F), "bias": torch.randn(H), **weights("edge_")},
            **{**both_orders(), **rounding(), "keep_codes": True, "keep_hidden": True, **product},
        },
        "graph_linear_backward": lambda: {
            **{"grad": torch.randn(T, H), **kept, "weight": torch.randn(H, F), "hidden": codes(S, H)},
            **{"hidden_scale": torch.rand(S), **weights("edge_"), **both_orders(), **rounding()},
            **{"needs_dx": True, "needs_dw": True, "needs_dedge": True, **behind, **packed},
        },
        "incidence_sum": lambda: {
            **{"edge_x": torch.randn(E, F), "indptr": csr["indptr"], "order": GRAPH.csr.order.clone()},
            **{"node": GRAPH.incidence("target")[2].clone(), **rounding()},
        },
        "incidence_sum_backward": lambda: {
            **{"grad": torch.randn(T, F), "node": GRAPH.incidence("target")[2].clone()},
        },
        "blocks_pack": lambda: {
            **{"x": torch.randn(S, F), "seed": torch.tensor([1]), "bits": 2, "block_size": 16},
            **{"metadata_dtype": torch.float32, "edges": torch.tensor([0, 1.25, 1.75, 3])},
            **{"projection": 8, "projection_seed": torch.tensor([3])},
        },
        "blocks_unpack": lambda: {
            **{"packed": torch.zeros(3, 4, dtype=torch.uint8), "low": torch.ones(3), "step": torch.ones(3)},
            **{"bits": 2, "size": 40, "dtype": torch.float32, "edges": torch.tensor([0, 1.25, 1.75, 3])},
            **{"projection": 8, "projection_seed": torch.tensor([3]), "num_columns": F, "first_row": 0},
        },
    }
    return made[name]()


OPERATORS = sorted(
    name.removeprefix("qgnn::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("qgnn::") and "." not in name
)
