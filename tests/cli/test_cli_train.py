"""``qgnn train`` from end to end on a tiny graph: the table, the JSON, the plot, and equal seeds giving equal runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from qgnn import summary
from qgnn.cli import provenance, report
from qgnn.cli import train as train_module
from qgnn.cli.args import MODELS, build_parser
from qgnn.cli.errors import UsageError
from qgnn.cli.metric import METRICS
from qgnn.cli.model import make_model, train_features
from qgnn.cli.recipe import GRAPHS, MOLECULES, PLANETOID, WORDNET, Recipe, recipe_for, usual_recipe
from qgnn.cli.run import train_run
from qgnn.cli.scheme import Scheme, parse_scheme
from qgnn.cli.task import make_task
from qgnn.nn import QGCNConv

CPU = torch.device("cpu")
PROVENANCE_KEYS = {"command", "utc", "machine", "commit", "dirty", "versions"}
STEP_KEYS = {"sampling", "processes", "gradients"}
MIB_KEYS = {"saved_mib", "original_mib", "features_mib", "peak_mib"}
BYTES_KEYS = {"sent_bytes", "full_bytes"}
SCHEDULE_KEYS = {"mean_bits", "widths"}
RUN_KEYS = (
    {"precision", "compress", "seed", "test_acc", "final_loss", "best_epoch", "epoch_ms", "losses", "ops"}
    | SCHEDULE_KEYS
    | MIB_KEYS
    | BYTES_KEYS
)


@pytest.fixture
def result(qgnn_train: Callable[..., int], tmp_path: Path) -> dict[str, Any]:
    assert qgnn_train("--seeds", "2", "--seed", "5", "--json", str(tmp_path / "out.json")) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_json_has_the_promised_keys(result: dict[str, Any]) -> None:
    assert set(result) == PROVENANCE_KEYS | {"dataset", "metric", "model", "device", "recipe", "runs"} | STEP_KEYS
    assert [result[name] for name in ("dataset", "metric", "model", "device")] == ["photo", "accuracy", "gcn", "cpu"]
    assert [(run["precision"], run["seed"]) for run in result["runs"]] == [
        ("fp32", 5),
        ("fp32", 6),
        ("int8", 5),
        ("int8", 6),
    ]
    for run in result["runs"]:
        assert set(run) == RUN_KEYS
        assert run["compress"] == "none"
        assert 0 <= run["test_acc"] <= 1
        assert run["epoch_ms"] > 0
        assert len(run["losses"]) == 4
        assert run["losses"][-1] == run["final_loss"] < run["losses"][0]
        assert run["sent_bytes"] is run["full_bytes"] is None, "of a process on its own"
        assert run["saved_mib"] == run["original_mib"] > run["features_mib"] > 0
        assert run["peak_mib"] is None or run["peak_mib"] > 10


def test_json_says_what_its_numbers_belong_to(result: dict[str, Any], tmp_path: Path) -> None:
    options = "--device cpu --dataset photo --epochs 4 --hidden 8 --seeds 2 --seed 5"
    assert result["command"] == f"qgnn train {options} --json {tmp_path / 'out.json'}"
    assert result["recipe"] == asdict(Recipe(epochs=4, hidden=8))
    assert result["machine"] == f"{provenance.cpu_name()}, 1 threads"
    assert (result["commit"], result["dirty"]) == provenance.commit()
    assert result["versions"] == provenance.versions()
    assert set(result["versions"]) >= {"python", "qgnn", "torch", "torch_geometric", "triton", "numpy"}
    age = datetime.now(timezone.utc) - datetime.fromisoformat(result["utc"])
    assert timedelta() < age < timedelta(hours=1)


def test_json_of_a_checkout_that_changed_meanwhile_is_dirty(
    qgnn_train: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commits = iter([("a" * 40, False), ("b" * 40, False)])
    monkeypatch.setattr(provenance, "commit", lambda: next(commits))
    assert qgnn_train("--seeds", "1", "--json", str(tmp_path / "out.json")) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["commit"], result["dirty"]) == ("a" * 40, True)


def test_the_table_is_printed_where_the_json_fails(
    qgnn_train: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(path: Path, result: dict[str, Any]) -> None:
        raise UsageError("--json: no space")

    monkeypatch.setattr(train_module, "write_json", fail)
    assert qgnn_train("--precision", "fp32", "--json", str(tmp_path / "out.json")) == 2
    out, err = capsys.readouterr()
    assert "fp32" in out
    assert "--json: no space" in err


def test_json_shows_int8_forward_and_backward(result: dict[str, Any]) -> None:
    ops = {run["precision"]: run["ops"] for run in result["runs"]}
    assert ops["fp32"] == {}, "PyG's own layers run none of our ops"
    for name in ("matmul.forward", "matmul.backward_dw", "spmm.forward", "spmm.backward"):
        assert set(ops["int8"][name]) == {"calls", "format", "backend"}
        assert "int8" in ops["int8"][name]["format"], name
        assert ops["int8"][name]["calls"] >= 1
        assert any(part.startswith("c") for part in ops["int8"][name]["backend"].split("+")), "beside the last layer's"


def test_int8_keeps_fewer_bytes(tiny: Data) -> None:
    """The input, as features or as codes, exists between steps too and counts for neither."""
    recipe = Recipe(hidden=64, epochs=1)
    saved = {
        name: train_run(make_task(tiny, CPU), recipe, parse_scheme(name), 0, CPU).saved_mib for name in ("fp32", "int8")
    }
    # The hidden rows in fp32 as input of ReLU and of the last product, or of the last product alone; never the input.
    rows = 64 * 4 * tiny.num_nodes
    assert 2 * rows < saved["fp32"] * 2**20 < 2 * rows + 250_000
    assert rows < saved["int8"] * 2**20 < rows + 50_000


def test_table_has_a_row_for_each_precision(qgnn_train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert qgnn_train("--seeds", "2", "--precision", "fp32,bf16,int4") == 0
    out, err = capsys.readouterr()
    for heading in ("precision", "accuracy", "ms per", "kept", "peak", "PyG fp32"):
        assert heading in out
    for name in ("fp32", "bf16", "int4"):
        assert any(name in line and "x" in line for line in out.splitlines())
        assert f"{name}, seed 0: test accuracy" in err, "a log has one line a run in place of the bar"
    assert "1.00x" in out
    assert "\x1b" not in out + err, "no terminal, no control characters"
    assert "\r" not in out + err


def test_table_summarizes_over_seeds() -> None:
    run = {"compress": "none", "saved_mib": 2.0, "peak_mib": None, "ops": {}}
    runs = [
        {**run, "precision": "fp32", "seed": 0, "test_acc": 0.80, "epoch_ms": 30.0},
        {**run, "precision": "fp32", "seed": 1, "test_acc": 0.82, "epoch_ms": 40.0},
        {**run, "precision": "int8", "seed": 0, "test_acc": 0.79, "epoch_ms": 14.0},
    ]
    fp32 = report.summarize(runs[:2])
    assert fp32["acc"] == pytest.approx(81.0)
    assert fp32["acc_dev"] == pytest.approx(2**0.5)
    columns = [list(column.cells) for column in report.table(runs).columns]
    assert columns[0] == ["fp32", "int8"]
    assert columns[1] == [f"81.00 {report.plus_minus()} 1.41", "79.00"]
    assert columns[4] == ["-", "-"], "an unknown peak is no number"
    assert columns[5] == ["1.00x", "2.50x"]
    assert list(report.table(runs[2:]).columns[5].cells) == ["-"], "no fp32 run, no ratio"


@pytest.mark.parametrize("name", ["fp32", "int8", "int2"])
def test_equal_seeds_give_equal_runs(tiny: Data, name: str) -> None:
    recipe, scheme = Recipe(hidden=8, epochs=6), parse_scheme(name)
    models: list[torch.nn.Module] = []

    def spy(*arguments: Any) -> torch.nn.Module:
        models.append(make_model(*arguments))
        return models[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qgnn.cli.training.make_model", spy)
        runs = [train_run(make_task(tiny, CPU), recipe, scheme, seed, CPU) for seed in (1, 1, 2)]
    first, again, other = ([p.detach() for p in model.parameters()] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert runs[0].test_acc == runs[1].test_acc


def test_all_precisions_start_from_the_same_weights() -> None:
    for model in MODELS:
        states = []
        for name in ("fp32", "int8"):
            torch.manual_seed(3)
            states.append(make_model(model, 5, 2, Recipe(hidden=16, layers=3), parse_scheme(name)).state_dict())
        fp32, int8 = states
        assert fp32.keys() == int8.keys()
        assert all(torch.equal(value, int8[key]) for key, value in fp32.items()), model


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_of_the_logits_alone_stays_in_full_precision(name: str) -> None:
    rows = summary(make_model(name, 16, 4, Recipe(hidden=16, layers=4), parse_scheme("int8")))
    last = "last" if name == "gcn2" else "convs.3"
    layers = rows.kept + rows.converted
    assert rows.kept == [layer for layer in layers if layer.split(".nn")[0] == last] != []
    assert {layer.split(".nn")[0] for layer in rows.converted} >= {"convs.0", "convs.1"}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_in_int8(tiny: Data, model: str) -> None:
    run = train_run(make_task(tiny, CPU), Recipe(hidden=16, layers=3, epochs=2), parse_scheme("int8"), 0, CPU, model)
    assert "int8" in run.ops["matmul.backward_dw"]["format"]
    assert 0 <= run.test_acc <= 1


def test_the_features_drop_where_the_recipe_says_so() -> None:
    x = torch.cat([torch.ones(100, 20), torch.zeros(100, 20)], dim=1)
    assert train_features(x, Recipe())() is x
    draw = train_features(x, Recipe(input_dropout=True, dropout=0.25))
    first, second = draw(), draw()
    assert not torch.equal(first, second), "drawn anew"
    assert first[:, 20:].count_nonzero() == 0
    assert set(first[:, :20].unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert 0.2 < (first[:, :20] == 0).float().mean() < 0.3  # 2,000 draws at 0.25: five deviations
    assert torch.equal(x[:, :20], torch.ones(100, 20)), "the features stay what they are"


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_training_learns(tiny: Data, name: str) -> None:
    """Seven unequal classes, the largest a quarter of the nodes."""
    data = tiny.clone()
    data.train_mask, data.val_mask = ~data.test_mask, data.test_mask
    largest = float(torch.bincount(data.y[data.test_mask]).max() / data.test_mask.sum())
    assert (
        train_run(make_task(data, CPU), Recipe(hidden=32, epochs=30), parse_scheme(name), 0, CPU).test_acc
        > largest + 0.1
    )


def test_test_accuracy_is_that_of_the_best_validation_epoch(tiny: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([(0.3, 0.1), (0.5, 0.2), (0.5, 0.9), (0.4, 0.8)])
    monkeypatch.setattr("qgnn.cli.task.NodeTask.evaluate", lambda *_: next(scores))
    assert train_run(make_task(tiny, CPU), Recipe(hidden=4, epochs=4), Scheme("fp32"), 0, CPU).test_acc == 0.2


def test_large_graphs_are_evaluated_seldom(tiny: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("qgnn.cli.task.NodeTask.evaluate", lambda *_: (calls.append(1), (0.0, 0.0))[1])
    train_run(make_task(tiny, CPU), Recipe(hidden=4, epochs=7, eval_every=3), Scheme("fp32"), 0, CPU)
    assert len(calls) == 3, "epochs 3, 6 and the last"


def test_precisions_choose_the_layers() -> None:
    recipe = Recipe(hidden=8, layers=3)
    fp32, int4 = (make_model("gcn", 5, 2, recipe, parse_scheme(name)) for name in ("fp32", "int4"))
    assert [type(conv) for conv in fp32.convs] == [GCNConv] * 3
    assert [type(conv) for conv in int4.convs] == [QGCNConv] * 3
    assert [conv.config and conv.config.bits for conv in int4.convs] == [4, 4, None]


def test_recipes_follow_the_data_set_and_the_options(tiny: Data) -> None:
    def recipe(*arguments: str) -> Recipe:
        return recipe_for(build_parser().parse_args(["train", *arguments]), tiny.num_edges)

    assert recipe() == WORDNET
    assert recipe("--dataset", "Cora") == PLANETOID
    assert recipe("--dataset", "photo") == Recipe()
    assert (usual_recipe("MUTAG", "gcn", None), usual_recipe("ESOL", "gcn", None)) == (GRAPHS, MOLECULES)
    assert recipe("--model", "gcn2").layers == 8
    of_gcn2 = recipe("--model", "gcn2", "--dataset", "citeseer")
    assert (of_gcn2.layers, of_gcn2.hidden, of_gcn2.dropout, of_gcn2.inner_weight_decay) == (8, 64, 0.6, 0.01)
    assert of_gcn2.normalize
    assert not recipe("--model", "gcn2", "--dataset", "photo").inner_weight_decay
    assert recipe("--model", "gcn2", "--layers", "4").layers == 4
    given = recipe("--layers", "3", "--dropout", "0", "--weight-decay", "0", "--lr", "0.5", "--epochs", "7")
    assert (given.layers, given.dropout, given.weight_decay, given.lr, given.epochs) == (3, 0.0, 0.0, 0.5, 7)
    assert given.hidden == WORDNET.hidden


def test_weight_decay_is_that_of_the_first_layer(tiny: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda params, lr: adam(groups.extend(params) or groups, lr=lr))
    train_run(make_task(tiny, CPU), Recipe(hidden=4, epochs=1, weight_decay=0.25), Scheme("fp32"), 0, CPU)
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


def test_planetoid_features_are_normalized(qgnn_train: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def is_normalized(x: torch.Tensor) -> bool:
        return bool(((x.sum(1) - 1).abs() < 1e-4).all())

    monkeypatch.setattr(train_module, "train_all", lambda task, *_: seen.append(is_normalized(task.features[0])) or [])
    monkeypatch.setattr(report, "table", lambda *_: "")
    tiny_x = torch.rand(271, 64)
    monkeypatch.setattr(
        train_module, "load", lambda *_: Data(x=tiny_x, edge_index=torch.zeros(2, 0).long(), y=torch.zeros(271).long())
    )
    qgnn_train("--dataset", "cora")
    qgnn_train("--dataset", "photo")
    assert seen == [True, False]


def test_multi_label_sets_are_scored_by_micro_f1(tiny: Data) -> None:
    out = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert METRICS["micro_f1"].of(out, y) == pytest.approx(2 * 2 / (3 + 3))
    data = tiny.clone()
    data.y = torch.nn.functional.one_hot(tiny.y).float()
    assert make_task(data, CPU).metric.name == "micro_f1"
    assert 0 <= train_run(make_task(data, CPU), Recipe(hidden=4, epochs=2), parse_scheme("int8"), 0, CPU).test_acc <= 1


def test_plot_is_drawn(qgnn_train: Callable[..., int], tmp_path: Path) -> None:
    assert qgnn_train("--seeds", "1", "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert qgnn_train("--seeds", "2", "--plot", str(tmp_path / "a.svg")) == 0
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text


def test_module_runs_as_a_program_outside_the_checkout(tmp_path: Path) -> None:
    """A whole process, on the embedded graph, with a pipe for a terminal."""
    arguments = ["train", "--epochs", "1", "--seeds", "1", "--hidden", "4", "--precision", "fp32", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "qgnn.cli", *arguments, "--json", "out.json"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "wordnet: 117,791 nodes, 368,166 directed edges" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["runs"]) == 1
    assert result["command"] == f"qgnn {' '.join(arguments)} --json out.json", "neither the interpreter nor a path"
