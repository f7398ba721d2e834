"""What the random cases of ``tests/soak.py`` are drawn from: graphs, formats, values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from layer_cases import assert_equal_pass
from qgnn import Graph, QConfig, formats
from qgnn.config import COMPONENTS
from qgnn.formats.names import NAMES
from soak_oracle import watched

_T = TypeVar("_T")

WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 130)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Draw(random.Random):
    """Choices of one case; torch's generator begins with the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)

    def any_of(self, choices: Sequence[_T]) -> _T:
        return choices[self.randrange(len(choices))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def rounding_seed(self) -> int:
        return self.randrange(2**64)

    def size(self, most: int) -> int:
        """From 0 on, small ones as often as large ones."""
        return min(most, int(2 ** (self.random() * (most + 1).bit_length())) - 1)


def draw_edges(draw: Draw, num_sources: int, num_targets: int) -> Tensor:
    """Edges of one of the kinds that break kernels, or of several, in any order."""
    parts = [torch.empty(2, 0, dtype=torch.int64)]
    if num_sources and num_targets:
        for _ in range(draw.randrange(4)):
            E = draw.size(600)
            source, target = torch.randint(num_sources, (E,)), torch.randint(num_targets, (E,))
            kind = draw.any_of(("uniform", "power_law", "hub", "broadcast", "copies", "loops"))
            if kind == "power_law":
                source, target = (torch.rand(2, E).pow(3) * torch.tensor([[num_sources], [num_targets]])).long()
            elif kind == "hub":
                target = target[:1].expand(E)
            elif kind == "broadcast":
                source = source[:1].expand(E)
            elif kind == "copies":
                source, target = source[:1].expand(E), target[:1].expand(E)
            elif kind == "loops":
                source = target = torch.arange(min(num_sources, num_targets))
            parts.append(torch.stack([source, target]))
    edges = torch.cat(parts, dim=1)
    if draw.chance(0.7):
        edges = edges[:, torch.randperm(edges.shape[1])]
    return edges


def draw_graph(draw: Draw, *, square: bool = True) -> tuple[Tensor, int, int]:
    """``(edge_index, num_sources, num_targets)``."""
    num_sources = draw.size(300)
    num_targets = num_sources if square else draw.size(300)
    return draw_edges(draw, num_sources, num_targets), num_sources, num_targets


def draw_form(draw: Draw, edges: Tensor, num_sources: int, num_targets: int) -> Any:
    """The same edges in another form, in the same order."""
    form = draw.any_of(("coo", "coo", "strided", "EdgeIndex", "Graph"))
    if form == "strided":
        return torch.stack([edges, edges + 1], dim=2)[:, :, 0]
    if form == "EdgeIndex":
        return EdgeIndex(edges, sparse_size=(num_sources, num_targets))
    return Graph.from_edge_index(edges, (num_sources, num_targets)) if form == "Graph" else edges


def draw_config(draw: Draw) -> QConfig | None:
    """Full precision, integers of every width, other formats, or formats by component."""
    options: dict[str, Any] = {
        "granularity": draw.any_of(("row", "row", "tensor")),
        "rounding": draw.any_of(("stochastic", "nearest")),
        "save": draw.any_of(("int8", "int8", "fp32")),
    }
    kind = draw.any_of(("none", "int", "int", "int", "packed", "format", "components"))
    if kind == "none":
        return None
    if kind == "int":
        return QConfig(bits=draw.randint(2, 8), **options)
    if kind == "packed":
        return QConfig(**options | {"save": draw_blocks(draw)})
    if kind == "format":
        return QConfig(fmt=draw.any_of(NAMES), **options)
    chosen = draw.sample(COMPONENTS, draw.randint(1, len(COMPONENTS)))
    return QConfig(components={name: draw.any_of((None, *NAMES)) for name in chosen}, **options)


def by_row(config: QConfig | None) -> QConfig | None:
    """The same for attention, whose heads have a scale each."""
    return config and replace(config, granularity="row")


def draw_blocks(draw: Draw) -> formats.Blocks:
    bits = draw.any_of((1, 2, 4, 8))
    sizes = (None, 8, 24, 128, 1000, 4096)
    return formats.Blocks(
        bits=bits,
        block_size=draw.any_of(sizes),
        projection=draw.any_of((None, None, 2, 3, 8)),
        bins=draw.any_of(("uniform", "optimal")) if bits in (2, 4) else "uniform",
        metadata_dtype=draw.any_of((torch.float32, torch.bfloat16, torch.float16)),
    )


def draw_values(draw: Draw, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian rows of different sizes, some of them 0, dense or sparse; of half types of one size."""
    x = torch.randn(shape)
    if dtype in (torch.float32, torch.float64) and x.dim() > 1 and draw.chance(0.5):
        x = x * 10.0 ** torch.randint(-3, 3, (shape[0], *[1] * (len(shape) - 1)))
    if draw.chance(0.3):
        x = x * (torch.rand(shape) < 0.1)
    return x.to(dtype)


def assert_finite(results: dict[str, Tensor]) -> None:
    for name, value in results.items():
        assert value.isfinite().all(), f"{name} is not finite"


def repeated(run: Callable[[], dict[str, Tensor]], seed: int) -> dict[str, Tensor]:
    """The results of a run whose kernels are watched; once more, unwatched, they are the same in every bit."""
    torch.manual_seed(seed)
    with watched():
        results = run()
    torch.manual_seed(seed)
    assert_equal_pass(run(), results)
    return results
