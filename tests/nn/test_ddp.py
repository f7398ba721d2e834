"""Data parallel training in two processes on one machine, over gloo."""

from pathlib import Path

import torch

from data_parallel import RANKS, gradients_alone, one_step, run, train


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    run(train, str(tmp_path))
    (losses, state, gradients), (other_losses, other_state, other_gradients) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)
    )
    for ours, theirs in zip((*state, *gradients), (*other_state, *other_gradients), strict=True):
        assert torch.equal(ours, theirs)
    for history in (losses, other_losses):
        assert history[-1] < 0.7 * history[0]


def test_gradients_of_two_processes_are_the_mean_of_each_alone(tmp_path: Path) -> None:
    """With rounding to nearest nothing depends on the process: DDP's gradients are known."""
    run(one_step, str(tmp_path))
    expected = [
        torch.stack(pair).mean(0) for pair in zip(*(gradients_alone(rank) for rank in range(RANKS)), strict=True)
    ]
    for rank in range(RANKS):
        for actual, mean in zip(torch.load(tmp_path / f"{rank}.pt", weights_only=True), expected, strict=True):
            torch.testing.assert_close(actual, mean, rtol=1e-6, atol=1e-7)
