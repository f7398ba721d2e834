"""``qgnn train --sampler neighbor``: the same training in batches, from features that stay codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from qgnn import QTensor
from qgnn.cli.args import MODELS, build_parser
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import paired_run, train_run
from qgnn.cli.sampled import SampledNodeTask, Sampling
from qgnn.cli.scheme import Scheme, parse_scheme
from qgnn.cli.task import make_task
from qgnn.cli.training import model_input

CPU = torch.device("cpu")
Train = Callable[..., int]


def task_of(data: Data, fanout: tuple[int, ...] = (5, 3), batch_size: int = 16, workers: int = 0) -> SampledNodeTask:
    return SampledNodeTask(data, Sampling(fanout, batch_size, workers), CPU)


def test_the_command_trains_on_batches(qgnn_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert qgnn_train("--sampler", "neighbor", "--batch-size", "32", "--seeds", "1", "--json", str(path)) == 0
    result = json.loads(path.read_text())
    assert result["sampling"] == {"fanout": [15, 10], "batch_size": 32, "workers": 0}
    assert [run["precision"] for run in result["runs"]] == ["fp32", "int8"]
    products = {name: op["format"] for name, op in result["runs"][1]["ops"].items() if name.startswith("matmul")}
    assert products.pop("matmul.backward_dx") == "float32", "of the last layer alone"
    assert len(products) == 2
    assert all("int8" in fmt for fmt in products.values()), "beside float32, of the last layer"
    assert "batches of 32, fanout 15,10" in " ".join(capsys.readouterr().out.split())


def test_the_whole_graph_is_the_default(qgnn_train: Train, tmp_path: Path) -> None:
    assert qgnn_train("--seeds", "1", "--json", str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text())["sampling"] is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_an_epoch_sees_each_node_to_train_on_once(tiny: Data, name: str, workers: int) -> None:
    """With the features in the form that the first layer takes: of the store, not made anew."""
    x = model_input(tiny.x, Recipe(), parse_scheme(name))
    epoch, num_train = task_of(tiny, workers=workers).steps(x, Recipe(), 0), int(tiny.train_mask.sum())
    for number in (1, 2):
        steps = list(epoch(number))
        assert all(isinstance(step.features, QTensor if name == "int8" else torch.Tensor) for step in steps)
        assert sum(step.size for step in steps) == num_train
        assert [step.size for step in steps[:-1]] == [16] * (len(steps) - 1)


def test_all_neighbors_of_all_nodes_are_the_whole_graph(tiny: Data) -> None:
    """Means over neighbors do not depend on what else a step sees: one batch of all nodes trains as the graph does."""
    recipe, scheme = Recipe(hidden=8, epochs=4, dropout=0.0), Scheme("fp32")
    whole = train_run(make_task(tiny, CPU), recipe, scheme, 0, CPU, "sage")
    batch = train_run(task_of(tiny, (-1, -1), 10**6), recipe, scheme, 0, CPU, "sage")
    assert batch.final_loss == pytest.approx(whole.final_loss, rel=1e-5)
    assert batch.test_acc == whole.test_acc


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_on_batches(tiny: Data, model: str) -> None:
    layers, hops = (4, 2) if model == "gcn2" else (2, 2)
    recipe = Recipe(hidden=16, layers=layers, epochs=2)
    run = train_run(task_of(tiny, (4,) * hops), recipe, parse_scheme("int8"), 0, CPU, model)
    assert torch.isfinite(torch.tensor(run.final_loss))
    assert any("spmm" in name or "attention" in name for name in run.ops)


@pytest.mark.parametrize("name", ["fp32", "int8", "msfp12"])
def test_batches_are_learned(tiny: Data, name: str) -> None:
    """Seven unequal classes, the largest a quarter of the nodes."""
    tiny.train_mask, tiny.val_mask = ~tiny.test_mask, tiny.test_mask
    largest = float(tiny.y[tiny.test_mask].bincount().max() / tiny.test_mask.sum())
    recipe = Recipe(hidden=32, epochs=10)
    assert train_run(task_of(tiny), recipe, parse_scheme(name), 0, CPU).test_acc > largest + 0.1


def test_equal_seeds_give_equal_runs(tiny: Data) -> None:
    recipe, int4 = Recipe(hidden=8, epochs=2), parse_scheme("int4")
    first, again, other = (paired_run(task_of(tiny), recipe, int4, seed, CPU, "gcn").final_loss for seed in (0, 0, 1))
    assert first == again != other


def test_batches_differ_from_epoch_to_epoch(tiny: Data) -> None:
    epoch = task_of(tiny).steps(tiny.x, Recipe(), 0)
    first, second = (next(epoch(number)).features for number in (1, 2))
    assert first.shape != second.shape or not torch.equal(first, second)


def test_features_are_dropped_where_the_recipe_says_so(tiny: Data) -> None:
    step = next(task_of(tiny).steps(tiny.x, Recipe(input_dropout=True, dropout=0.9), 0)(1))
    seen = []
    step.loss(lambda features, edge_index: seen.append(features) or torch.zeros(len(features), 7))
    kept = seen[0] != 0
    assert kept.sum() < 0.2 * (step.features != 0).sum()
    torch.testing.assert_close(seen[0][kept], 10 * step.features[kept])


def test_compression_and_schedules_follow_batches(tiny: Data) -> None:
    compressed = Scheme.from_parts("fp32", compress="int2")
    run = train_run(task_of(tiny), Recipe(hidden=16, epochs=2), compressed, 0, CPU)
    assert run.saved_mib < run.original_mib
    run = train_run(task_of(tiny), Recipe(hidden=8, epochs=4), parse_scheme("int8:sdq[2,8]"), 0, CPU)
    assert run.widths == (2, 2, 8, 8)


def test_all_neighbors_have_a_name() -> None:
    options = build_parser().parse_args(["train", "--sampler", "neighbor", "--fanout", "all,3"])
    assert options.fanout == (-1, 3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fanout", "5,5"], "--fanout expects --sampler neighbor"),
        (["--batch-size", "5"], "--batch-size expects --sampler neighbor"),
        (["--workers", "0"], "--workers expects --sampler neighbor"),
        (["--sampler", "neighbor", "--fanout", "5"], "for each layer that sees neighbors, 2 (got 1: 5)"),
        (["--sampler", "neighbor", "--fanout", "5,0"], "from 1 to 2147483647, or all (got 0)"),
        (["--sampler", "neighbor", "--fanout", "5,x"], "from 1 to 2147483647, or all (got 'x')"),
        (["--sampler", "cluster"], "--sampler: invalid choice: 'cluster'"),
        (
            ["--sampler", "neighbor", "--batch-size", "0"],
            "--batch-size: expected a whole number from 1 to 2147483647 (got 0)",
        ),
        (["--sampler", "neighbor", "--dataset", "mutag"], "expects a data set with classes of nodes (got one of many"),
    ],
)
def test_what_does_not_fit_is_one_line(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert qgnn_train(*arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
