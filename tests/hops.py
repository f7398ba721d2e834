"""A sampler for PyG's loaders that needs none of its extensions."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import k_hop_subgraph


class Hops(BaseSampler):
    """All neighbors of two hops, the seeds first."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def sample_from_nodes(self, inputs: NodeSamplerInput, **_: Any) -> SamplerOutput:
        return self._around(inputs.node, (inputs.input_id, inputs.time))

    def sample_from_edges(self, inputs: EdgeSamplerInput, **_: Any) -> SamplerOutput:
        seeds, ends = torch.stack([inputs.row, inputs.col]).unique(return_inverse=True)
        return self._around(seeds, (inputs.input_id, ends, inputs.label, inputs.time))

    def _around(self, seeds: Tensor, metadata: tuple[Any, ...]) -> SamplerOutput:
        nodes, _, _, edges = k_hop_subgraph(seeds, 2, self.data.edge_index, num_nodes=self.data.num_nodes)
        nodes = torch.cat([seeds, nodes[~torch.isin(nodes, seeds)]])
        place = torch.full((self.data.num_nodes,), -1).scatter(0, nodes, torch.arange(len(nodes)))
        row, col = place[self.data.edge_index[:, edges]]
        return SamplerOutput(nodes, row, col, edges.nonzero().view(-1), metadata=metadata)
