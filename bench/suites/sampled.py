"""Training on sampled neighborhoods: a step with the sampling of its batch and the gathering of its features, and these
two alone. Everyone has the same batches, of qgnn's sampler; where its library is there, PyG's own stands beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.nn import SAGEConv

from qgnn.data import NeighborSampler, QuantizedFeatureStore
from qgnn.nn import Epilogue, QSAGEConv
from qgnn.qtensor import QTensor

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import OURS, Setting, graph, graph_name, package
from .step import LEARNING_RATE, TOLERANCE, Context, autocast_bf16, gradients_of
from .train import Convolutions

FANOUT, BATCH_SIZE, HIDDEN = (15, 10), 1024, 256

Loader = Callable[[], Any]


class Problem:
    """A GraphSAGE of two layers, its first weights, and the nodes to train on.

    Args:
        setting: Where it runs; the graph stays in the memory of the host.
    """

    def __init__(self, setting: Setting) -> None:
        data = graph("arxiv", Setting(torch.device("cpu"), setting.quick))
        self.setting, self.x = setting, data.x
        self.data = Data(edge_index=data.edge_index, y=data.y, train_mask=data.train_mask, num_nodes=data.num_nodes)
        self.widths = (data.num_features, HIDDEN, int(data.y.max()) + 1)
        sizes = f"{'-'.join(map(str, self.widths))}/fanout{'-'.join(map(str, FANOUT))}/batch{BATCH_SIZE}"
        self.name = f"{graph_name('arxiv', setting)}/sage/{sizes}"
        torch.manual_seed(0)
        self.state = Convolutions(SAGEConv, self.widths).state_dict()

    def loader(self, features: Tensor | QTensor | None, **options: Any) -> Any:
        """Batches from a store with these features, as codes or as they are; ``None``: as codes made by the store."""
        store = QuantizedFeatureStore(quantized=("x",) if features is None else ())
        store[None, "x", None] = self.x if features is None else features
        store[None, "y", None] = self.data.y
        return NodeLoader((store, self.data), NeighborSampler(self.data, FANOUT), **self.options, **options)

    def pyg_loader(self) -> Any:
        for name in ("pyg_lib", "torch_sparse"):
            try:
                package(name)
            except UnavailableError:
                continue
            data = Data(x=self.x, edge_index=self.data.edge_index, y=self.data.y)
            return NeighborLoader(data, FANOUT, **self.options)
        raise UnavailableError("PyG's sampler needs pyg-lib or torch-sparse")

    @property
    def options(self) -> dict[str, Any]:
        nodes = self.data.train_mask.nonzero().view(-1)
        pinned = {"pin_memory": True} if self.setting.is_cuda else {}
        return {"input_nodes": nodes, "batch_size": BATCH_SIZE, "shuffle": True, **pinned}

    def first(self, loader: Any) -> Data:
        """The same batch for everyone with the same sampler."""
        torch.manual_seed(0)
        return next(iter(loader)).to(self.setting.device)

    def batches(self, loader: Any) -> Iterator[Data]:
        while True:
            for batch in loader:
                yield batch.to(self.setting.device, non_blocking=True)

    def model(self, make_conv: Callable[[int, int], torch.nn.Module]) -> Convolutions:
        model = Convolutions(make_conv, self.widths).to(self.setting.device)
        model.load_state_dict(self.state)
        return model

    def work(
        self, make_conv: Callable[[int, int], torch.nn.Module], make_loader: Loader, autocast: Context = nullcontext
    ) -> Work:
        loader, model = make_loader(), self.model(make_conv)
        optimizer, batches = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), self.batches(loader)

        def backward(network: Convolutions, batch: Data) -> Tensor:
            network.zero_grad()
            with autocast():
                out = network(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out.to(torch.promote_types(out.dtype, torch.float32)), batch.y[: len(out)]).backward()
            return out.detach()

        def step() -> None:
            backward(model, next(batches))
            optimizer.step()

        def check() -> Sequence[Tensor]:
            other = self.model(make_conv)
            return [backward(other, self.first(loader)), *gradients_of(other, None)]

        return Work(step, check)

    def ours(self, precision: str) -> Work:
        make_conv = partial(QSAGEConv, config=OURS[precision], epilogue=Epilogue("relu"))
        return self.work(make_conv, partial(self.loader, None if precision == "int8" else self.x))

    def bf16(self) -> Work:
        return self.work(SAGEConv, partial(self.loader, self.x), autocast_bf16(self.setting))

    def exact(self) -> Sequence[Tensor]:
        """In float64, on the batch that all see."""
        work = self.work(lambda *widths: SAGEConv(*widths).double(), partial(self.loader, self.x.double()))
        assert work.check is not None
        return work.check()

    def case(self) -> Case:
        providers = [Provider(f"qgnn {name}", partial(self.ours, name), TOLERANCE[name]) for name in OURS]
        rival = partial(self.work, SAGEConv, partial(self.loader, self.x))
        providers.append(Provider("pyg coo fp32", rival, TOLERANCE["fp32"]))
        providers.append(Provider("pyg coo bf16", self.bf16, TOLERANCE["bf16"]))
        return Case(self.name, "step", self.exact, providers)

    def sampling(self) -> Case:
        """Batches alone: the gate looks at the features of the seeds, which are the same whoever samples."""

        def work(make_loader: Loader) -> Work:
            loader = make_loader()
            batches = self.batches(loader)

            def check() -> Sequence[Tensor]:
                x = self.first(loader).x
                return [(x.dequantize() if isinstance(x, QTensor) else x)[:BATCH_SIZE]]

            return Work(lambda: next(batches), check)

        def exact() -> Sequence[Tensor]:
            return [self.first(self.loader(self.x.double())).x[:BATCH_SIZE]]

        ours, rows = partial(self.loader, None), partial(self.loader, self.x)
        makers: dict[str, Loader] = {"qgnn int8": ours, "torch fp32": rows, "pyg NeighborLoader fp32": self.pyg_loader}
        providers = [Provider(name, partial(work, make), TOLERANCE[name[-4:]]) for name, make in makers.items()]
        return Case(f"{self.name}/batches", "forward", exact, providers)


def cases(setting: Setting) -> Iterator[Case]:
    problem = Problem(setting)
    yield problem.case()
    yield problem.sampling()
