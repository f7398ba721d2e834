"""One split per data set: the public one, the first of several, or a drawn one."""

import torch
from torch import Tensor
from torch_geometric.data import Data

SPLITS = ("train_mask", "val_mask", "test_mask")
TRAIN_PER_CLASS, VAL_PER_CLASS = 20, 30


def with_single_split(data: Data) -> Data:
    """Leave exactly one boolean mask of shape [N] for train, val and test on the data, which is changed in place.

    Given masks are kept; of masks of shape [N, S], S splits, the first is. Missing ones are drawn by
    :func:`draw_split`. Nodes with a negative label belong to no mask.
    """
    labeled = data.y >= 0 if data.y.dim() == 1 else torch.ones(len(data.y), dtype=torch.bool)
    if all(getattr(data, split, None) is not None for split in SPLITS):
        for split in SPLITS:
            mask = data[split]
            data[split] = (mask[:, 0] if mask.dim() == 2 else mask).bool() & labeled
        return data
    for split, mask in zip(SPLITS, draw_split(data.y), strict=True):
        data[split] = mask
    return data


def draw_split(y: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw 20 nodes a class to train and 30 to validate; the rest is the test set.

    A class of fewer than 60 nodes gives a third to each. The draw depends on the labels and the seed alone, not on
    torch's global generator.

    Args:
        y: [N] int64 labels, negative where unknown.
        seed: Selects the draw.

    Returns:
        The three masks, [N] bool each.
    """
    if y.dim() != 1:
        raise ValueError(f"'draw_split' expects one label a node (got 'y' of shape {list(y.shape)})")
    generator = torch.Generator().manual_seed(seed)
    train, val = torch.zeros_like(y, dtype=torch.bool), torch.zeros_like(y, dtype=torch.bool)
    for c in y[y >= 0].unique().tolist():
        nodes = (y == c).nonzero().view(-1)
        nodes = nodes[torch.randperm(len(nodes), generator=generator)]
        third = max(len(nodes) // 3, 1)
        first = min(TRAIN_PER_CLASS, third)
        second = first + (VAL_PER_CLASS if len(nodes) >= 60 else third)
        train[nodes[:first]] = True
        val[nodes[first:second]] = True
    return train, val, ~(train | val) & (y >= 0)
