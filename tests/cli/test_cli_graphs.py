"""``qgnn train`` on sets of graphs: steps over all of them, one result a graph."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_geometric.loader import DataLoader

from qgnn import summary
from qgnn.cli import main
from qgnn.cli.model import GRAPH_MODELS, GraphPredictor, make_model, parameter_groups
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import train_run
from qgnn.cli.scheme import parse_scheme
from qgnn.cli.task import GraphTask, make_task
from qgnn.cli.training import forward_of
from qgnn.data import GraphSet, load_graphs
from tu_files import write_tu

CPU = torch.device("cpu")
RECIPE = Recipe(hidden=8, layers=2, epochs=4, weight_decay=0.0)
Train = Callable[..., int]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with fifty graphs under the name of MUTAG, whose nodes give their class away."""
    write_tu(tmp_path / "MUTAG" / "raw", "MUTAG", [1] * 30 + [-1] * 20)
    return tmp_path


@pytest.fixture
def graphs(root: Path) -> GraphSet:
    return load_graphs("mutag", root)


@pytest.fixture
def train_mutag(root: Path) -> Train:
    def run(*arguments: str) -> int:
        return main(
            ["train", "--dataset", "MUTAG", "--root", str(root), "--device", "cpu", "--epochs", "2", *arguments]
        )

    return run


def test_the_command_trains_on_graphs(train_mutag: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--precision", "fp32,int8", "--compress", "none,int2", "--seeds", "1", "--hidden", "8"]
    assert train_mutag(*names, "--json", str(tmp_path / "out.json")) == 0
    out = capsys.readouterr().out
    assert "MUTAG: 50 graphs, 223 nodes, 446 directed edges, 2 features; GCN" in " ".join(out.split())
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["precision"], run["compress"]) for run in runs] == [
        ("fp32", "none"),
        ("fp32", "int2"),
        ("int8", "none"),
        ("int8", "int2"),
    ]
    assert "int8" in runs[2]["ops"]["spmm.forward"]["format"]
    assert runs[1]["saved_mib"] < runs[0]["saved_mib"]


@pytest.mark.parametrize("name", GRAPH_MODELS)
def test_every_model_classifies_graphs_in_int8(graphs: GraphSet, name: str) -> None:
    task, scheme = make_task(graphs, CPU), parse_scheme("int8")
    rows = summary(make_model(name, 2, 2, RECIPE, scheme, by_graph=True))
    assert rows.kept == ["last"]
    assert {layer.removesuffix(".nn").split(".nn.")[0] for layer in rows.converted} >= {
        "convolutions.convs.0",
        "convolutions.convs.1",
    }
    run = train_run(task, RECIPE, scheme, 0, CPU, name)
    assert "int8" in run.ops["matmul.backward_dw"]["format"]
    assert 0 <= run.test_acc <= 1


def test_one_step_over_all_graphs_is_the_mean_over_batches(graphs: GraphSet) -> None:
    """No row of a graph meets one of another: in eval mode, logits are those of each graph alone."""
    task = make_task(graphs, CPU)
    assert isinstance(task, GraphTask)
    model = make_model("gcn", 2, 2, RECIPE, parse_scheme("fp32"), by_graph=True).eval()
    forward, part = forward_of(model, parse_scheme("fp32"), CPU), task.parts[0]
    together = forward(part.x, part.edge_index, part.batch, part.num_graphs)
    alone = [forward(g.x, g.edge_index, g.batch, 1) for g in DataLoader(graphs.graphs("train"))]
    torch.testing.assert_close(together, torch.cat(alone))
    expected = torch.nn.functional.cross_entropy(torch.cat(alone), torch.cat([g.y for g in graphs.graphs("train")]))
    torch.testing.assert_close(task.loss(forward, part.x), expected)


def test_each_split_is_scored_on_its_own_graphs(graphs: GraphSet) -> None:
    task = make_task(graphs, CPU)
    seen: list[int] = []

    def first_class(x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor, size: int) -> torch.Tensor:
        seen.append(len(x))
        return torch.tensor([1.0, 0.0]).expand(size, 2)

    assert task.evaluate(first_class, task.features) == (0.4, 0.4), "two of five graphs have the first class"
    assert seen == [len(x) for x in task.features[1:]]


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_graphs_are_learned(graphs: GraphSet, name: str) -> None:
    """The features are the class: nothing but a bug keeps a model from it."""
    recipe = Recipe(hidden=8, layers=2, epochs=30, lr=0.05, dropout=0.0)
    assert train_run(make_task(graphs, CPU), recipe, parse_scheme(name), 0, CPU, measure=False).test_acc == 1


def test_the_first_convolution_decays_alone() -> None:
    model = make_model("gcn", 2, 2, RECIPE, parse_scheme("fp32"), by_graph=True)
    assert isinstance(model, GraphPredictor)
    first, others = parameter_groups(model, 0.25)
    assert {id(p) for p in first["params"]} == {id(p) for p in model.convolutions.convs[0].parameters()}
    assert len(first["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_convolutions_of_gcn2_decay_as_they_are_told_to() -> None:
    model = make_model("gcn2", 4, 3, replace(RECIPE, layers=4), parse_scheme("int8"))
    first, inner, last = parameter_groups(model, 0.25, 0.5)
    assert (first["weight_decay"], inner["weight_decay"], last["weight_decay"]) == (0.25, 0.5, 0)
    for group, module in ((first, model.first), (inner, model.convs), (last, model.last)):
        assert {id(p) for p in group["params"]} == {id(p) for p in module.parameters()}
    (one,) = parameter_groups(model, 0.0)
    assert len(one["params"]) == len(list(model.parameters()))


def test_one_layer_is_enough_where_the_last_is_dense(train_mutag: Train) -> None:
    assert train_mutag("--layers", "1", "--precision", "int8", "--seeds", "1") == 0


def test_a_model_of_nodes_is_refused(train_mutag: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_mutag("--model", "gcn2") == 2
    message = capsys.readouterr().err
    assert "gcn2 expects a data set with classes of nodes (got one of many graphs)" in message
    assert "give one of gcn, sage, gat, gin" in message
