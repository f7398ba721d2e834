"""Gradients averaged in int8: right in expectation, equal everywhere, four times smaller, the same after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_parallel import run
from int8_gradients import RANKS, SIZES, STEPS, exchange, train, values_of
from qgnn.distributed import Int8State
from qgnn.distributed._messages import decode, encode, seed_of

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("exchange")
    run(exchange, str(folder), RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("train")
    run(train, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def mean_of(size: int) -> Tensor:
    return torch.stack([values_of(rank, size) for rank in range(RANKS)]).double().mean(0)


def step_of(values: Tensor, block_size: int) -> Tensor:
    """The distance of codes, of each value's block."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % block_size)).view(-1, block_size)
    return (blocks.abs().amax(1) / 127).repeat_interleave(block_size)[: len(values)]


@pytest.mark.parametrize("size", SIZES)
def test_all_processes_get_the_mean_within_the_rounding(exchanged: Found, size: int) -> None:
    """Each value is rounded once a process and once more as a mean, by less than the distance of codes each time."""
    block_size = -(-size // (RANKS * -(-size // (RANKS * 1024))))
    means = [found["once"][size] for found in exchanged]
    assert all(torch.equal(mean, means[0]) for mean in means)
    steps = sum(step_of(values_of(rank, size), block_size) for rank in range(RANKS)) / RANKS
    bound = steps + step_of(mean_of(size).float(), block_size) + steps / 127  # the last: of a mean that is off itself
    assert ((means[0] - mean_of(size)).abs() <= bound * (1 + 1e-5)).all()


def test_means_are_unbiased(exchanged: Found) -> None:
    """A rounding deviates by half the distance of codes at most, and there are two independent ones."""
    mean = exchanged[0]["without_feedback"] / STEPS
    largest = max(float(step_of(values_of(rank, 20), 20).max()) for rank in range(RANKS))
    assert ((mean - mean_of(20)).abs() < 5 * (2 * 0.25) ** 0.5 * largest / STEPS**0.5).all()


def test_feedback_makes_up_for_all_earlier_roundings(exchanged: Found) -> None:
    """What is missing after any number of steps is what the last ones left."""
    total = exchanged[0]["with_feedback"].double()
    largest = max(float(step_of(values_of(rank, 20), 20).max()) for rank in range(RANKS))
    missing = (total - STEPS * mean_of(20)).abs()
    assert (missing < 4 * largest).all()
    assert missing.max() > 0
    without = (exchanged[0]["without_feedback"].double() - STEPS * mean_of(20)).abs()
    assert without.max() > 4 * largest, "it grows with the root of the number of steps"


def test_an_infinity_is_seen_by_all(exchanged: Found) -> None:
    """In the block that it is in, and no other; at the next step, with what this one left, by none."""
    for found in exchanged:
        isnan = found["poisoned"].isnan()
        assert isnan[:12].all()  # of 100 values in 3 * 3 blocks
        assert not isnan[12:].any()
        assert found["behind"].isfinite().all()


def test_bytes_are_those_of_the_messages(exchanged: Found) -> None:
    """20 values of 3 processes: 7 a part, one block of 7 codes and a scale, out to 2 others and as a mean again."""
    sent, full = exchanged[0]["bytes"]
    assert sent == STEPS * 2 * 2 * (7 + 4)
    assert full == STEPS * (2 * 2 * 4 * 20 // 3)


@pytest.mark.parametrize("name", ["int8", "feedback"])
def test_models_train_as_with_full_gradients(trained: Found, name: str) -> None:
    for rank, found in enumerate(trained):
        assert torch.equal(found[name][1], trained[0][name][1])
        losses, full = torch.tensor(found[name][0]), torch.tensor(found["fp32"][0])
        assert losses[-1] < 0.75 * losses[0]
        assert (losses - full).abs().mean() < 0.1 * full[0], rank


def test_messages_are_a_quarter(trained: Found) -> None:
    for name in ("int8_bytes", "feedback_bytes"):
        sent, full = trained[0][name]
        assert 3.9 < full / sent <= 4


def test_no_size_has_a_block_more_than_it_needs(exchanged: Found) -> None:
    for size, (sent, full) in exchanged[0]["sizes"].items():
        assert size == 1 or full / sent > 3.9, size


def test_buckets_change_nothing(trained: Found) -> None:
    for found in trained:
        assert found["cut"][0] == found["whole"][0]
        assert torch.equal(found["cut"][1], found["whole"][1])


def test_a_resumed_training_is_the_undisturbed_one(trained: Found) -> None:
    for found in trained:
        assert found["resumed"][0] == found["undisturbed"][0]
        assert torch.equal(found["resumed"][1], found["undisturbed"][1])
        assert found["resumed_bytes"] == found["undisturbed_bytes"]


def test_sums_in_fp32_do_not_go_by_buckets(exchanged: Found) -> None:
    """Of three processes: two add up to the same in any order."""
    (undisturbed, whole), (resumed, anew) = exchanged[0]["three"]
    assert whole != anew, "otherwise there is nothing to see"
    assert torch.equal(resumed, undisturbed)
    for found in exchanged:
        assert torch.equal(found["three"][0][0], undisturbed)


def test_one_process_has_its_own_gradient(tmp_path: Path) -> None:
    from qgnn.distributed.gradients import _exchange

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        x = torch.randn(10)
        assert torch.equal(_exchange(Int8State(), x), x)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("seed", [None, 3])
def test_messages_are_codes_and_scales(seed: int | None) -> None:
    from qgnn import ops

    rows = torch.randn(5, 7)
    key = None if seed is None else seed_of(torch.device("cpu"), seed)
    codes, scale = ops.quantize(rows, key, 8, "row", 1)
    message = encode(rows, key)
    assert message.shape == (5, 11)
    assert torch.equal(decode(message), codes * scale[:, None])


def test_seeds_differ_by_every_number() -> None:
    device = torch.device("cpu")
    seeds = {
        int(seed_of(device, *numbers)) for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0), (2**63, 0))
    }
    assert len(seeds) == 6


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"'block_size' of at least 1 \(got 0\)"):
        Int8State(block_size=0)
    for name, value in {"block_size": 16, "seed": 1, "error_feedback": True}.items():
        with pytest.raises(ValueError, match=rf"'Int8State' has {name}={value} \(got the state of one with"):
            Int8State(**{name: value}).load_state_dict(Int8State().state_dict())
    Int8State(error_feedback=True).load_state_dict(Int8State(error_feedback=True).state_dict())
