"""A pass with gradients draws as many random numbers as one without: a reentrant checkpoint runs both, and what models
draw behind a layer, as for dropout, has to be the same."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv

from graphs import GRAPHS
from layers import LAYERS, K
from qgnn import QConfig
from qgnn.formats import Blocks
from qgnn.nn import QGATConv

EDGES, N = GRAPHS["power_law"]
CONFIGS = {
    "int8": QConfig(),
    "fp32 kept": QConfig(save="fp32"),
    "blocks": QConfig(save=Blocks(2)),
    "nearest, blocks": QConfig(save=Blocks(2), rounding="nearest"),
    "msfp12": QConfig(fmt="msfp12"),
    "full precision": None,
}
# What hops inside these layers make are constants to a pass without gradients, if rows are rounded to nearest.
OTHER = [("sg", "nearest, blocks"), ("cheb", "nearest, blocks"), ("cheb/weighted", "nearest, blocks")]
CASES = [(name, config) for name in LAYERS for config in CONFIGS if (name, config) not in OTHER]


@pytest.mark.parametrize("learned", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_a_pass_draws_the_same_with_and_without_gradients(name: str, config: str, learned: bool) -> None:
    layer = LAYERS[name].ours(CONFIGS[config])
    x, args = torch.randn(N, K, requires_grad=learned), LAYERS[name].args(EDGES, N)

    def state_behind() -> Tensor:
        torch.manual_seed(3)
        layer(x, EDGES, *args)
        return torch.get_rng_state()

    with torch.no_grad():
        without = state_behind()
    assert torch.equal(state_behind(), without)


@pytest.mark.parametrize("conv", [GATConv(K, 8), QGATConv(K, 8), QGATConv(K, 8, config=QConfig(save="fp32"))])
def test_dropout_behind_a_layer_has_one_mask(conv: torch.nn.Module) -> None:
    x, masks = torch.randn(N, K), []

    def segment(_: Tensor) -> Tensor:
        out = conv(x, EDGES)
        masks.append(torch.nn.functional.dropout(torch.ones_like(out), 0.5))
        return out * masks[-1]

    checkpoint(segment, torch.ones(1, requires_grad=True), use_reentrant=True).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)


@pytest.mark.parametrize("config", ["int8", "msfp12"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_constants_have_one_rounding_with_and_without_gradients(name: str, config: str) -> None:
    """From the second step on, of constants that the function of a checkpoint reads from around it."""
    layer, x = LAYERS[name].ours(CONFIGS[config]), torch.randn(N, K)
    args, found = LAYERS[name].args(EDGES, N), []

    def segment(factor: Tensor) -> Tensor:
        out = layer(x, EDGES, *args)
        found.append(out.detach())
        return out * factor

    for _ in range(2):
        found.clear()
        checkpoint(segment, torch.ones(1, requires_grad=True), use_reentrant=True).sum().backward()
    assert torch.equal(*found)
