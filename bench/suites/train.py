"""A whole training step of a GCN: forward, loss, backward, Adam; constant features are quantized once, before."""

from collections.abc import Iterator

from ..harness import Case
from .gcn import Problem
from .inputs import Setting, graph

# The usual model of each data set's size: widths of the hidden layers, dropout.
MODELS = {"arxiv": ((256, 256), 0.0), "pubmed": ((64,), 0.5), "cora": ((64,), 0.5)}


def problem(like: str, setting: Setting) -> Problem:
    data = graph(like, setting)
    hidden, dropout = MODELS[like]
    widths = (data.num_features, *hidden, int(data.y.max()) + 1)
    return Problem(f"gcn/{'-'.join(map(str, widths))}", like, widths, setting, dropout)


def cases(setting: Setting) -> Iterator[Case]:
    for like in setting.shapes(*MODELS):
        gcn = problem(like, setting)
        yield Case(gcn.name, "step", gcn.exact, list(gcn.providers()))
