"""The prediction for graphs over several GPUs: rows and bytes counted by hand, and orders that it may not break."""

import importlib
import sys

import pytest
import torch

from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
cluster = importlib.import_module("bench.cluster")
roofline = importlib.import_module("bench.roofline")

SMALL = cluster.Graph("small", 1000, 8000, 16, 4)


def test_rows_that_are_sent_are_those_of_a_random_spread() -> None:
    """Every node has 8 neighbors on GPUs drawn at random: how many others than its own these are, in the mean."""
    num_gpus, num_nodes = 4, 40_000
    owners = torch.randint(num_gpus, (num_nodes, 8), generator=torch.Generator().manual_seed(0))
    asked = torch.nn.functional.one_hot(owners, num_gpus).amax(1)[:, 1:].sum(1).double()  # of a node of the first GPU
    error = float(asked.std()) / num_nodes**0.5
    assert cluster.sent_rows(SMALL, num_gpus, None) == pytest.approx(250 * float(asked.mean()), abs=4 * 250 * error)


def test_a_cut_bounds_the_rows() -> None:
    assert cluster.sent_rows(SMALL, 4, 0.1) == 200  # a tenth of the 2000 edges into the nodes of a GPU
    assert cluster.sent_rows(SMALL, 4, 1.0) == cluster.sent_rows(SMALL, 4, None) < 2000


def test_seconds_on_the_wire_counted_by_hand() -> None:
    waits = 6 * (20e-6 + 3 * 1e-6)  # three layers, forward and backward
    rate = 0.8 * 450e9
    assert cluster.exchange_s(SMALL, 4, 0.1, "fp32") == pytest.approx(waits + 2 * 200 * 4 * (256 + 256 + 4) / rate)
    assert cluster.exchange_s(SMALL, 4, 0.1, "int8") == pytest.approx(waits + 2 * 200 * (260 + 260 + 8) / rate)
    assert cluster.exchange_s(SMALL, 4, 0.1, "int2") == pytest.approx(waits + 2 * 200 * (68 + 68 + 5) / rate)
    over_network = cluster.exchange_s(SMALL, 16, 0.1, "int8") - 6 * (20e-6 + 15 * 1e-6)
    assert over_network == pytest.approx(2 * 50 * (260 + 260 + 8) / (0.8 * 50e9))


def test_rows_beyond_the_cache_are_gathered_from_memory() -> None:
    machine = roofline.Machine(1e12 / roofline.MEMORY_SHARE, 1e13, {"tf32": 1e15})
    small, large = (cluster.Step("", roofline.Traffic(int(size), int(size * 20))) for size in (4e7, 6e7))
    assert cluster.step_floor_s(small, machine) == pytest.approx(8e-5)
    assert cluster.step_floor_s(large, machine) == pytest.approx(1.2e-3)


def test_no_prediction_breaks_the_order_of_its_parts() -> None:
    found = list(cluster.rows())
    assert len(found) == len(cluster.GRAPHS) * len(cluster.GPUS) * 2
    for row in found:
        eager, int8, *sent, full, quantized = map(float, row[4:11])
        assert int8 < eager
        assert sent == sorted(sent, reverse=True)
        assert (full, quantized) == (max(eager, sent[0]), max(int8, sent[2]))
    by_spread = zip(found[::2], found[1::2], strict=True)
    assert all(float(few[6]) <= float(random[6]) and float(few[3]) <= float(random[3]) for random, few in by_spread)
    for graph in cluster.GRAPHS:
        gib = [float(row[3]) for row in found if row[0] == graph.name and row[2] == "random"]
        assert gib == sorted(gib, reverse=True)
