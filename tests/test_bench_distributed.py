"""The suite `distributed`: processes in fp32 go through the losses of one, codes are noise, and bytes are counted."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench_records import rows, write
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
distributed = importlib.import_module("bench.suites.distributed")
harness = importlib.import_module("bench.harness")
inputs = importlib.import_module("bench.suites.inputs")
pages = importlib.import_module("bench.pages")

SETTING = inputs.Setting(torch.device("cpu"), quick=True)


@pytest.fixture
def group(tmp_path: Path) -> None:
    """A group of one process: all of its nodes are its own."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", distributed.WAYS)
def test_losses_of_fp32_are_those_of_one_process(way: str, group: None) -> None:
    problem = distributed.Problem("wordnet", way, 0, SETTING)
    processes = distributed.Processes(store=dist.HashStore())
    train = problem.partitioned if way == "partitioned" else problem.batches
    found = train("fp32", None, processes)
    assert harness.relative_error(found.results, problem.exact()) <= distributed.ORDER_OF_SUMS
    assert found.metrics["sent_mib"] == found.metrics["full_mib"] == 0
    assert found.test_acc == pytest.approx(problem.alone.test_acc, abs=0.01)
    assert 0 < harness.relative_error(train("int8", 8, processes).results, problem.exact()) <= distributed.NOISE
    other = distributed.Problem("wordnet", way, 1, SETTING)
    assert harness.relative_error(other.exact(), problem.exact()) > distributed.ORDER_OF_SUMS


def write_run(
    results: Path, seed: int, provider: str, test_acc: float, error: float, sent: float | None = None
) -> None:
    metrics = {} if sent is None else {"metrics": {"sent_mib": sent, "full_mib": 8.0}}
    case = f"wordnet/gcn/partitioned/seed{seed}"
    write(results, "distributed", case, provider, test_acc=test_acc, error=error, **metrics)


def test_the_table_pairs_seeds_and_divides_bytes(tmp_path: Path) -> None:
    assert "distributed" not in dict(pages.regions(tmp_path))
    for seed in (0, 1):
        write_run(tmp_path, seed, "qgnn one process fp32", 0.70 + 0.1 * seed, 0.0)
        write_run(tmp_path, seed, "qgnn two processes int8", 0.71 + 0.1 * seed, 0.002 + 0.001 * seed, 2.0)
    write_run(tmp_path, 2, "qgnn two processes int8", 0.1, 0.5, 2.0)  # no process of its own to compare with
    found = rows(dict(pages.regions(tmp_path))["distributed"], "partitioned |")
    assert [row[:2] for row in found] == [["wordnet/gcn", "partitioned"]] * 2
    assert [row[2:] for row in found] == [
        ["qgnn one process fp32", "75.00 ± 7.07", "+0.00 ± 0.00", "0", "", "", "2"],
        ["qgnn two processes int8", "76.00 ± 7.07", "+1.00 ± 0.00", "0.003", "2.00", "4.00x", "2"],
    ]
