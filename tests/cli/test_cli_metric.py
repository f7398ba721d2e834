"""The score of a task: ROC-AUC and RMSE by their definitions, the epoch that they choose, and where they are shown."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from molecules import read_chains, write_freesolv
from qgnn.cli import main, report
from qgnn.cli import train as train_module
from qgnn.cli.metric import METRICS, roc_auc
from qgnn.cli.plot import write_plot
from qgnn.cli.recipe import Recipe
from qgnn.cli.report import cells, plus_minus, to_json
from qgnn.cli.run import train_run
from qgnn.cli.sampled import SampledNodeTask, Sampling
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import GraphTask, NodeTask, make_task
from qgnn.cli.training import Training
from qgnn.data import GraphSet, load_graphs

CPU = torch.device("cpu")
RECIPE = Recipe(hidden=8, layers=2, epochs=4, weight_decay=0.0)


def pairs(score: list[float], y: list[int]) -> float:
    """The definition: over all pairs of a one and a zero."""
    ones, zeros = ([s for s, label in zip(score, y, strict=True) if label == of] for of in (1, 0))
    return sum((one > zero) + (one == zero) / 2 for one in ones for zero in zeros) / (len(ones) * len(zeros))


@pytest.mark.parametrize("values", [1, 2, 7, 1000])
@pytest.mark.parametrize("rare", [0.5, 0.03])
def test_roc_auc_is_the_fraction_of_pairs(values: int, rare: float) -> None:
    """To the last bit, whatever is equal: two hundred scores of so many values, and what both logits have in common."""
    generator = torch.Generator().manual_seed(values)
    y = (torch.rand(200, generator=generator) < rare).long()
    y[0] = 1
    score = torch.randint(values, (200,), generator=generator).float() - values // 2
    shift = torch.randint(100, (200,), generator=generator).float()
    out = torch.stack([shift, shift + score], dim=1)
    assert roc_auc(out, y) == pytest.approx(pairs(score.tolist(), y.tolist()), rel=1e-14)
    assert roc_auc(out.bfloat16().float(), y) + roc_auc(out.bfloat16().float().flip(1), y) == pytest.approx(
        1, rel=1e-14
    )


def test_roc_auc_at_its_ends() -> None:
    y = torch.tensor([0, 0, 1, 1])
    ranked = torch.tensor([[0.0, -3.0], [0.0, -1e-30], [0.0, 0.0], [0.0, 1e30]])
    assert (roc_auc(ranked, y), roc_auc(ranked, 1 - y), roc_auc(torch.ones(4, 2), y)) == (1.0, 0.0, 0.5)
    assert roc_auc(ranked[:2], y[:2]) != roc_auc(ranked[:2], y[:2]), "of one class there is none"
    assert roc_auc(ranked / 0, y) != roc_auc(ranked / 0, y), "nor of what is no number"


def test_metrics_say_how_they_are_shown() -> None:
    assert {name: (m.heading, m.text(0.5)) for name, m in METRICS.items()} == {
        "accuracy": ("test accuracy %", "50.00"),
        "micro_f1": ("test micro-F1 %", "50.00"),
        "roc_auc": ("test ROC-AUC %", "50.00"),
        "rmse": ("test RMSE", "0.500"),
    }


@pytest.fixture
def binary(tiny: Data, monkeypatch: pytest.MonkeyPatch) -> Data:
    """The tiny data set with two classes, and what Minesweeper has beside them."""
    data = tiny.clone()
    data.y, data.metric = tiny.y % 2, "roc_auc"
    monkeypatch.setattr(train_module, "load", lambda name, root: data.clone())
    return data


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with forty molecules under the name of FreeSolv."""
    read_chains(monkeypatch)
    write_freesolv(tmp_path / "freesolv" / "raw", 40)
    return tmp_path


@pytest.fixture
def molecules(root: Path) -> GraphSet:
    return load_graphs("freesolv", root)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_nodes_are_scored_by_the_metric_of_their_set(binary: Data, is_sampled: bool) -> None:
    task = SampledNodeTask(binary, Sampling((3, 3), 64, 0), CPU) if is_sampled else make_task(binary, CPU)
    assert isinstance(task, NodeTask)
    out = torch.randint(3, (len(binary.y), 2), generator=torch.Generator().manual_seed(0)).float()
    expected = [
        pairs((out[mask, 1] - out[mask, 0]).tolist(), binary.y[mask].tolist())
        for mask in (binary.val_mask, binary.test_mask)
    ]
    assert list(task.evaluate(lambda *_: out, task.features)) == pytest.approx(expected, rel=1e-14)
    assert (task.num_outputs, task.metric.name) == (2, "roc_auc")


def test_molecules_are_learned_in_deviations_and_scored_in_their_own_unit(molecules: GraphSet) -> None:
    task = make_task(molecules, CPU)
    assert isinstance(task, GraphTask)
    assert (task.num_outputs, task.metric.name) == (1, "rmse")
    raw = [torch.cat([graph.y for graph in molecules.graphs(split)]).double() for split in ("train", "val", "test")]
    mean, deviation = raw[0].mean(), raw[0].std(correction=0)

    def two(x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor, size: int) -> torch.Tensor:
        return torch.full((size, 1), 2.0)

    expected = [float((mean + 2 * deviation - y).square().mean().sqrt()) for y in raw[1:]]
    assert task.evaluate(two, task.features) == pytest.approx(expected, rel=1e-5)
    # Of standardized numbers the mean square distance from two is one and the square of two.
    assert float(task.loss(two, task.features[0])) == pytest.approx(5, rel=1e-5)


@pytest.mark.parametrize(("name", "compress"), [("fp32", "none"), ("int8", "none"), ("int8", "int8")])
def test_molecules_are_learned(molecules: GraphSet, name: str, compress: str) -> None:
    """Each is a linear function of the mean of its atoms; the mean of all numbers is off by 0.9."""
    recipe = Recipe(hidden=16, layers=1, epochs=40, lr=0.05, dropout=0.0, weight_decay=0.0)
    run = train_run(make_task(molecules, CPU), recipe, Scheme.from_parts(name, compress=compress), 0, CPU)
    assert run.test_acc < 0.3
    assert ("int8" in run.ops["spmm.forward"]["format"]) if name == "int8" else not run.ops


SCORES = [(0.3, 0.1), (0.5, 0.2), (0.2, 0.9), (0.2, 0.7)]


@pytest.mark.parametrize(("metric", "best"), [("accuracy", (2, 0.2)), ("roc_auc", (2, 0.2)), ("rmse", (3, 0.9))])
def test_the_best_validation_is_the_largest_or_the_smallest(
    tiny: Data, monkeypatch: pytest.MonkeyPatch, metric: str, best: tuple[int, float]
) -> None:
    """Also of a training that goes on from a state in between."""
    tiny.metric = metric
    scores: Iterator[tuple[float, float]] = iter(SCORES)
    monkeypatch.setattr(NodeTask, "evaluate", lambda *_: next(scores))
    task, scheme = make_task(tiny, CPU), Scheme("fp32")
    first = Training(task, RECIPE, scheme, 0, CPU)
    for _ in range(3):
        first.run_epoch()
    other = Training(task, RECIPE, scheme, 0, CPU)
    other.load_state_dict(first.state_dict())
    other.run_epoch()
    assert (other.best_epoch, other.test_acc) == best


def test_the_command_shows_rmse(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--dataset", "FreeSolv", "--precision", "int8", "--compress", "none,int2", "--seeds", "1"]
    files = ["--json", str(root / "out.json"), "--plot", str(root / "p.svg"), "--root", str(root)]
    assert main(["train", "--device", "cpu", "--epochs", "2", "--hidden", "32", *names, *files]) == 0
    out, err = capsys.readouterr()
    assert "RMSE" in out
    assert "accuracy" not in out + err
    result = json.loads((root / "out.json").read_text())
    assert result["metric"] == "rmse"
    run = result["runs"][0]
    assert f"int8, seed 0: test RMSE {run['test_acc']:.3f}, " in err
    assert f" {run['test_acc']:.3f} " in out
    assert "int8" in run["ops"]["spmm.forward"]["format"]
    assert result["runs"][1]["saved_mib"] < run["saved_mib"]
    assert "test RMSE" in (root / "p.svg").read_text()


def test_the_command_shows_roc_auc(binary: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--device", "cpu", "--dataset", "minesweeper", "--epochs", "2", "--hidden", "8"]
    assert main([*arguments, "--seeds", "1", "--json", str(tmp_path / "out.json")]) == 0
    out, err = capsys.readouterr()
    assert "ROC-AUC %" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["metric"] == "roc_auc"
    assert f"fp32, seed 0: test ROC-AUC {100 * result['runs'][0]['test_acc']:.2f} %, " in err


def test_a_training_that_diverged_takes_none_of_the_others_along(
    qgnn_train: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of int8 both seeds, of fp32 the second: neither row has a mean, and the JSON, which is one, no number."""
    scores = [0.5, math.nan, math.inf, math.nan]
    each = iter([(score, score) for score in scores for _ in range(4)])
    monkeypatch.setattr(NodeTask, "evaluate", lambda *_: next(each))
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "p.svg"))
    assert qgnn_train("--seeds", "2", *files) == 0
    out = capsys.readouterr().out
    assert f" inf {plus_minus()} nan " in out
    assert f" nan {plus_minus()} nan " in out
    text = (tmp_path / "out.json").read_text()
    result = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    runs = result["runs"]
    assert [run["test_acc"] for run in runs] == [0.5, None, None, None]
    assert [row[1] for row in cells(runs)] == ["nan ± nan", "nan ± nan"], "read from JSON"
    assert "accuracy" in (tmp_path / "p.svg").read_text()
    write_plot(tmp_path / "p.svg", result | {"metric": "rmse"})  # whose axis has no end of its own
    assert "RMSE" in (tmp_path / "p.svg").read_text()


def test_what_ran_is_written_before_it_is_shown(
    qgnn_train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(report, "table", fail)
    with pytest.raises(BrokenPipeError):
        qgnn_train("--seeds", "1", "--json", str(tmp_path / "out.json"))
    assert len(json.loads((tmp_path / "out.json").read_text())["runs"]) == 2


def test_losses_that_are_no_numbers_are_null() -> None:
    made = to_json({"losses": (1.0, math.inf, [-math.inf]), "run": {"final": math.nan, "seed": 3, "ops": {}}})
    assert json.loads(made) == {"losses": [1.0, None, [None]], "run": {"final": None, "seed": 3, "ops": {}}}


def test_a_checkpoint_of_another_metric_is_refused(
    binary: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one is that was written when all sets were scored by accuracy."""
    arguments = [
        "train",
        "--device",
        "cpu",
        "--dataset",
        "minesweeper",
        "--epochs",
        "1",
        "--hidden",
        "8",
        "--seeds",
        "1",
    ]
    arguments += ["--precision", "fp32", "--checkpoint", str(tmp_path / "c")]
    with monkeypatch.context() as before:
        before.setattr(train_module, "metric_of", lambda name: None)
        assert main(arguments) == 0
    assert main([*arguments, "--resume"]) == 2
    assert "metric None (got roc_auc)" in capsys.readouterr().err


def test_any_score_is_better_than_none() -> None:
    for metric in METRICS.values():
        assert metric.is_better(0.5, math.nan)
        assert not metric.is_better(math.nan, 0.5)
        assert not metric.is_better(math.nan, math.nan)
        assert not metric.is_better(0.5, 0.5)
        assert metric.is_better(0.6, 0.5) == metric.larger_is_better != metric.is_better(0.5, 0.6)
