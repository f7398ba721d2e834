"""``qgnn train --compress``: the runs, the bytes that they keep, and how both are shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from qgnn.cli import report
from qgnn.cli.args import MODELS, build_parser
from qgnn.cli.compression import NO_COMPRESSION, Compression, parse_compression
from qgnn.cli.model import make_model, train_features
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import inspect_step, train_run
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import make_task
from qgnn.cli.training import forward_of, model_input
from qgnn.formats import Blocks
from qgnn.memory import MIB

CPU = torch.device("cpu")
NAMES = ("none", "int8", "int2-rp8-vm-g64")


def test_names_are_those_of_the_formats() -> None:
    assert parse_compression(" NONE") == NO_COMPRESSION == Compression("none", None)
    assert parse_compression("INT2-rp08-VM") == Compression("int2-rp8-vm", Blocks(2, None, 8, "optimal"))
    options = build_parser().parse_args(["train", "--compress", "int2,none,int02-rp8-g16,int2"])
    assert [compress.name for compress in options.compress] == ["int2", "none", "int2-rp8-g16"]
    assert build_parser().parse_args(["train"]).compress == [NO_COMPRESSION]


@pytest.fixture
def shown(
    qgnn_train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[list[dict[str, Any]], str, str]:
    """The runs, output and log of two precisions with three compressions each."""
    arguments = (
        "--epochs",
        "2",
        "--layers",
        "3",
        "--seeds",
        "2",
        "--precision",
        "fp32,int8",
        "--compress",
        ",".join(NAMES),
    )
    assert qgnn_train(*arguments, "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")) == 0
    out, err = capsys.readouterr()
    assert "int2-rp8-vm-g64" in (tmp_path / "out.svg").read_text()
    return json.loads((tmp_path / "out.json").read_text())["runs"], out, err


def test_each_precision_is_trained_with_each_compression(shown: tuple[list[dict[str, Any]], str, str]) -> None:
    runs, out, err = shown
    rows = [(run["precision"], run["compress"], run["seed"]) for run in runs]
    assert rows == [(precision, name, seed) for precision in ("fp32", "int8") for name in NAMES for seed in (0, 1)]
    assert list(report.by_precision(runs))[:3] == ["fp32", "fp32 + int8", "fp32 + int2-rp8-vm-g64"]
    for name in report.by_precision(runs):
        assert f"\n{name}, seed 1: test accuracy " in f"\n{err}"
    assert all(heading in out for heading in ("without", "features"))
    pairs = [(run, plain[run["seed"]]) for plain in (runs[:2], runs[6:8]) for run in runs if run["compress"] != "none"]
    pairs = [(run, plain) for run, plain in pairs if run["precision"] == plain["precision"]]
    assert len(pairs) == 8
    for compressed, plain in pairs:
        assert compressed["original_mib"] == plain["original_mib"] == plain["saved_mib"]
        assert compressed["features_mib"] == plain["features_mib"] > 0
        assert compressed["saved_mib"] < plain["saved_mib"]
        assert compressed["ops"]["blocks.pack"]["backend"] == "c"
        assert "blocks.pack" not in plain["ops"]
    kept = [runs[n]["saved_mib"] - runs[n]["features_mib"] for n in (0, 2, 4)]
    assert [cells[4] for cells in report.cells(runs)][:3] == [f"{mib:.2f}" for mib in kept]
    assert kept[0] > kept[1] > kept[2]


CASES = [("gcn", "fp32", False), ("gcn", "fp32", True), ("gcn", "int8", False), ("sage", "fp32", False)]
CASES += [("gat", "fp32", False), ("gcn2", "fp32", False)]


@pytest.mark.parametrize(("model_name", "name", "input_dropout"), CASES)
def test_both_counts_are_of_the_same_tensors(tiny: Data, model_name: str, name: str, input_dropout: bool) -> None:
    """The meter's bytes without compression, less the features, are those that a compression's report finds."""
    scheme, task = Scheme.from_parts(name, compress="int2"), make_task(tiny, CPU)
    recipe = Recipe(hidden=16, layers=3, input_dropout=input_dropout)
    model = make_model(model_name, tiny.num_features, task.num_outputs, recipe, scheme)
    x, forward = model_input(tiny.x, recipe, scheme), forward_of(model, scheme, CPU)
    task.loss(forward, x)  # prepares the graph
    with scheme.compression.context() as counted:
        task.loss(forward, train_features(x, recipe)())
    saved_mib, original_mib, features_mib, _ = inspect_step(model, next(task.steps(x, recipe, 0)(1)), scheme, CPU)
    assert counted is not None
    if scheme.config is None:  # layers in int8 pack what they keep themselves, which the report cannot see
        assert counted.original_bytes == round((original_mib - features_mib) * MIB)
    assert counted.saved_bytes == round((saved_mib - features_mib) * MIB) < counted.original_bytes / 2
    features = {"fp32": tiny.x.nbytes, "int8": tiny.x.numel() + 4 * tiny.num_nodes}[name]
    assert features_mib * MIB == (0 if input_dropout else features)


def test_training_steps_are_compressed(tiny: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout nothing but the codes' rounding tells one training from another; equal seeds round equally."""
    models: list[torch.nn.Module] = []

    def spy(*arguments: Any) -> torch.nn.Module:
        models.append(make_model(*arguments))
        return models[-1]

    monkeypatch.setattr("qgnn.cli.training.make_model", spy)
    recipe, task = Recipe(hidden=16, dropout=0.0, epochs=3), make_task(tiny, CPU)
    for name in ("none", "int2-rp8", "int2-rp8"):
        train_run(task, recipe, Scheme.from_parts(compress=name), 1, CPU)
    plain, compressed, again = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(compressed, again)
    assert not torch.equal(compressed, plain)


def test_layers_in_int8_pack_their_rows(tiny: Data) -> None:
    """Beside what the hooks alone do: rows of the middle layer in 2 bits and half a bit of metadata in place of 8 bits
    and 4 bytes of scale a row. What the first layer reads are constants."""
    recipe, task = Recipe(hidden=64, layers=3, dropout=0.0), make_task(tiny, CPU)
    packed = Scheme.from_parts("int8", compress="int2-g64")
    x = model_input(tiny.x, recipe, packed)
    saved_mib, original_mib = [], []
    for scheme in (packed.with_compression(NO_COMPRESSION), packed):
        model = make_model("gcn", tiny.num_features, task.num_outputs, recipe, scheme)
        save = scheme.compression.blocks or "int8"
        assert [layer.config and layer.config.save for layer in model.convs] == [save] * 2 + [None]
        task.loss(forward_of(model, scheme, CPU), x)  # prepares the graph
        saved, original, _, _ = inspect_step(model, next(task.steps(x, recipe, 0)(1)), packed, CPU)
        saved_mib.append(saved)
        original_mib.append(original)
    assert original_mib[0] == original_mib[1]
    fewer = (saved_mib[0] - saved_mib[1]) * MIB
    assert fewer == pytest.approx(tiny.num_nodes * (64 * (8 - 2.5) / 8 + 4), abs=64)  # a seed, a block in part


@pytest.mark.parametrize(
    ("model_name", "name"), [*((model, "fp32") for model in MODELS), ("gcn", "bf16"), ("sage", "int8")]
)
def test_every_model_trains_compressed(tiny: Data, model_name: str, name: str) -> None:
    recipe, scheme = Recipe(hidden=16, layers=3, epochs=2), Scheme.from_parts(name, compress="int2-rp8-vm")
    run = train_run(make_task(tiny, CPU), recipe, scheme, 0, CPU, model_name)
    assert run.saved_mib is not None
    assert run.original_mib is not None
    assert 0 < run.saved_mib < run.original_mib
    assert 0 <= run.test_acc <= 1


def test_masks_of_dropout_are_the_same_with_any_compression(tiny: Data) -> None:
    states, recipe, task = [], Recipe(hidden=32, epochs=2), make_task(tiny, CPU)
    for name in ("none", "int8", "int2-rp8"):
        train_run(task, recipe, Scheme.from_parts(compress=name), 0, CPU)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_compressed_training_learns(tiny: Data) -> None:
    """Seven unequal classes, the largest a quarter of the nodes."""
    data = tiny.clone()
    data.train_mask, data.val_mask = ~data.test_mask, data.test_mask
    largest = float(torch.bincount(data.y[data.test_mask]).max() / data.test_mask.sum())
    recipe, scheme = Recipe(hidden=32, epochs=30), Scheme.from_parts(compress="int2")
    assert train_run(make_task(data, CPU), recipe, scheme, 0, CPU).test_acc > largest + 0.1
