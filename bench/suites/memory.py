"""What a step takes of memory, of a GCN, of layers with attention and of GraphSAGE under the compressor of activations:
each provider in a process of its own. And in number formats, of small graphs: bytes of tensors, in this process."""

from collections.abc import Iterator
from functools import partial

from ..harness import Case
from . import formats, layer, process, sage, train
from .inputs import Setting

# Every child takes seconds to import what it needs.
QUICK: dict[str, tuple[str, ...]] = {
    "gcn": ("qgnn int8", "pyg coo fp32"),
    "sage": ("qgnn pyg csr int2-rp8 rows1", "pyg csr fp32"),
    "sage budget": ("qgnn pyg csr rp8 20 MB redrawn", "pyg csr fp32"),
}
PROBLEMS: process.Problems = {
    "gcn": partial(train.Problem, "arxiv"),
    "sage": sage.Problem,
    "sage budget": sage.Budgets,
    **{kind: partial(layer.Problem, kind, "arxiv") for kind in layer.ATTENTION},
}


def cases(setting: Setting) -> Iterator[Case]:
    for name, make in PROBLEMS.items():
        if setting.quick and name not in QUICK:
            continue
        yield process.case("memory", name, make(setting), setting, QUICK[name] if setting.quick else None)
    yield from formats.cases(setting)
