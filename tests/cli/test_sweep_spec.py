"""The specification of a sweep: which runs a file names, what identifies them, and what is wrong with a wrong one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import soak_files
from qgnn.cli import main
from qgnn.cli.errors import UsageError
from qgnn.cli.sweep.run_spec import RunSpec
from qgnn.cli.sweep.spec import Spec, read_spec
from soak_draw import Draw

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_text(text: str) -> Spec:
        (tmp_path / "s.toml").write_text(text)
        return read_spec(tmp_path / "s.toml")

    return read_text


def test_the_command_prints_a_specification_to_start_from(read: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--example"]) == 0
    text = capsys.readouterr().out
    runs = read(text).runs
    assert {run.dataset for run in runs} == {"wordnet"}, "embedded"
    assert f"? {len(runs)} runs.\n" in text


def test_a_grid_is_a_product_with_one_baseline_a_data_set_model_and_seed(read: Any) -> None:
    spec = read(
        """
        [sweep]
        datasets = ["Cora", "pubmed"]
        models = ["gcn", "sage", "gat"]
        formats = ["fp32", "int4", "msfp12"]
        components = ["all", "weights"]
        schedules = ["none", "sdq[2, 4]"]
        rounding = ["stochastic", "nearest"]
        seeds = 5
        """
    )
    assert len(spec.runs) == 2 * 3 * 5 * (1 + 2 * 2 * 2 * 2)
    baselines = [run for run in spec.runs if run.format == "fp32"]
    assert len(baselines) == 2 * 3 * 5
    assert {(run.component, run.schedule, run.rounding) for run in baselines} == {("none", "none", "none")}
    assert {run.schedule for run in spec.runs} == {"none", "sdq[2,4]"}
    assert {run.dataset for run in spec.runs} == {"cora", "pubmed"}
    assert {run.seed for run in spec.runs} == set(range(5))
    assert all(run.baseline in baselines for run in spec.runs)
    assert spec.name == "s"


def test_grids_override_the_sweep_and_common_runs_are_run_once(read: Any) -> None:
    spec = read(
        """
        [sweep]
        name = "two"
        datasets = "cora"
        formats = ["fp32", "int8"]
        seeds = [3, 1]
        epochs = 100
        [[grid]]
        models = ["gcn", "sage"]
        [[grid]]
        name = "second"
        formats = ["int8", "int4"]
        [[grid]]
        epochs = 7
        lr = 1
        """
    )
    assert [(grid.name, len(grid.runs)) for grid in spec.grids] == [("[[grid]] 1", 8), ("second", 4), ("[[grid]] 3", 4)]
    assert len(spec.runs) == 8 + 2 + 4
    assert {run.recipe for run in spec.runs} == {(("epochs", 100),), (("epochs", 7), ("lr", 1.0))}
    assert [run.seed for run in spec.runs[:2]] == [3, 1]


@pytest.mark.parametrize(
    ("name", "number"),
    [("formats", 2 * 5 * (1 + 10 * 7)), ("schedules", 2 * 5 * (7 + 3 * 3)), ("eight_bits", 7 * (3 * 10 + 10 + 30))],
)
def test_examples_are_sweeps(name: str, number: int) -> None:
    spec = read_spec(EXAMPLES / f"{name}.toml")
    assert spec.name == name
    assert len(spec.runs) == number
    assert f" {number} runs." in (EXAMPLES / f"{name}.toml").read_text().partition("\n")[0]


def test_a_key_is_the_hash_of_the_canonical_json() -> None:
    """Known answers: a journal of today is that of the same runs tomorrow."""
    run = RunSpec("cora", "gcn", "msfp12", "weights", "adq[2,8]", "stochastic", 3, (("epochs", 100), ("lr", 0.01)))
    assert run.canonical == (
        '{"component":"weights","dataset":"cora","format":"msfp12","model":"gcn","recipe":{"epochs":100,"lr":0.01},'
        '"rounding":"stochastic","schedule":"adq[2,8]","seed":3,"version":2}'
    )
    assert run.key == "9f300617efc36be7ea69bb5ca1ef1854220a4331134ab6b4057dc34edc31f598"
    assert str(run) == "gcn on cora, msfp12, weights, adq[2,8], stochastic, epochs 100, lr 0.01, seed 3"
    assert json.loads(run.canonical) == {"version": 2, **run.fields}


def test_the_width_of_a_format_with_a_schedule_is_that_of_the_schedule(read: Any) -> None:
    spec = read(
        "sweep = {datasets='cora', formats=['int8', 'int2', 'msfp11', 'bf16'], schedules=['sdq[4, 6]', 'none']}"
    )
    names = [(run.format, run.component, run.schedule) for run in spec.runs]
    assert names == [
        ("int6", "all", "sdq[4,6]"),
        ("int8", "all", "none"),
        ("int2", "all", "none"),
        ("msfp14", "all", "sdq[4,6]"),
        ("msfp11", "all", "none"),
        ("bf16", "none", "none"),
    ]


def test_spellings_of_a_run_have_one_key(read: Any) -> None:
    one = read(
        'sweep = {datasets = ["CORA"], models = ["GCN"], formats = ["INT04"], schedules = ["SDQ[2, 4]"]}\n'
        "[[grid]]\nlr = 1\nepochs = 5"
    )
    two = read('[sweep]\nepochs = 5\nlr = 1.0\ndatasets = "cora"\nformats = "int8"\nschedules = "sdq[2,4]"\n[[grid]]\n')
    assert [run.key for run in one.runs] == [run.key for run in two.runs]
    assert one.digest == two.digest
    assert one.digest != read('sweep = {datasets = ["cora"], formats = ["int8"]}').digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sweep", "expected TOML (Expected"),
        ("[sweeps]", "expected one of sweep, grid (got 'sweeps'); did you mean 'sweep'?"),
        ("[Sweep]", "expected one of sweep, grid (got 'Sweep'); did you mean 'sweep'?"),
        ("[sweep]\nDatasets = 'cora'", "(got 'Datasets'); did you mean 'datasets'?"),
        ("grid = 1", "expected tables [[grid]], with two brackets (got 1)"),
        ("[grid]", "expected tables [[grid]], with two brackets"),
        ("[sweep]\nmodle = 'gcn'", "[sweep], modle: expected one of name, root,"),
        ("[sweep]\nmodle = 'gcn'", "did you mean 'models'?"),
        ("[[grid]]\nroot = 'x'", "[[grid]] 1, root: expected one of name, datasets,"),
        ("[[grid]]\nformats = ['int8']", "[[grid]] 1: expected a list 'datasets', here or in [sweep]"),
        ("[sweep]\ndatasets = ['cora']", "[[grid]] 1: expected a list 'formats'"),
        ("[sweep]\ndatasets = ['coraa']", "[sweep], datasets: expected one of wordnet, cora,"),
        ("[sweep]\ndatasets = ['coraa']", "(got 'coraa'); did you mean 'cora'?"),
        ("[sweep]\ndatasets = [1]", "[sweep], datasets: expected text (got 1)"),
        (
            "[sweep]\nmodels = ['gnc']",
            "[sweep], models: expected one of gcn, sage, gat, gin, gcn2 (got 'gnc'); did you",
        ),
        ("[sweep]\nmodels = []", "[sweep], models: expected at least one value (got none)"),
        (
            "[sweep]\ndatasets='cora'\n[[grid]]\nformats='int8'\n[[grid]]\nformats='mxfp5'",
            "[[grid]] 2, formats: expected fp32, bf16 or a number format (got 'mxfp5'): 'parse' expects",
        ),
        ("[sweep]\nformats = ['mxfp5']", "did you mean 'mxfp4'?"),
        ("[sweep]\nformats = ['int9']", "'parse' expects int2 to int8 (also with -affine) (got 'int9')"),
        ("[sweep]\ncomponents = ['weight']", "(got 'weight'); did you mean 'weights'?"),
        ("[sweep]\nschedules = ['adq[8,2]']", "[sweep], schedules: expected a schedule such as sdq[2,4,6,8]"),
        ("[sweep]\nrounding = ['up']", "[sweep], rounding: expected one of stochastic, nearest (got 'up')"),
        ("[sweep]\nseeds = 0", "[sweep], seeds: expected a whole number from 1 to 10000 (got 0)"),
        ("[sweep]\nseeds = 9999999999", "[sweep], seeds: expected a whole number from 1 to 10000 (got 9999999999)"),
        ("[sweep]\nseeds = [0, -1]", "[sweep], seeds: expected a whole number from 0 to 18446744073709551615 (got -1)"),
        ("[sweep]\nepochs = true", "[sweep], epochs: expected a whole number from 1 to 2147483647 (got True)"),
        ("[sweep]\nlayers = 1001", "[sweep], layers: expected a whole number from 1 to 1000 (got 1001)"),
        ("[sweep]\nlr = 0", "[sweep], lr: expected a number in (0, 100] (got 0)"),
        ("[sweep]\ndropout = nan", "[sweep], dropout: expected a number in [0, 1) (got nan)"),
        ("[sweep]\ndevice = 'gpu'", "[sweep], device: expected one of cpu, cuda (got 'gpu'); did you mean 'cpu'?"),
        ("[sweep]\nname = 'a/b'", "[sweep], name: expected a name for a folder (got 'a/b')"),
        ('[sweep]\nname = "a\\u0000"', "[sweep], name: expected a name for a folder (got 'a\\x00')"),
        ("[sweep]\nname = " + "[" * 100_000, "expected TOML ("),
    ],
)
def test_an_error_says_where_and_what_was_expected(read: Any, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert "s.toml: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("formats='mxfp4'\nschedules='sdq[2,4]'", "[[grid]] 1: mxfp4 with the schedule sdq[2,4]: "),
        ("formats='int8'\nschedules='sdq[4,9]'", "int8 with the schedule sdq[4,9]: 'Int' expects 'bits' from 2 to 8"),
        (
            "formats='int8'\nmodels='gat'\nhidden=10",
            "gat expects a hidden width that is a multiple of 4, its number of heads (got",
        ),
        (
            "formats='int8'\nmodels='gcn2'\nlayers=2",
            "gcn2 expects at least 3 layers (got 2), since the first and the last",
        ),
        ("formats='int8'\nlayers=1", "int8 expects at least 2 layers (got 1)"),
        (
            "formats='int8'\ncomponents=['attention']",
            "a component that the model has: of gcn with 2 layers, these are fe",
        ),
        (
            "formats='int8'\ncomponents='activations'",
            "of gcn with 2 layers, these are features, weights, messages, out",
        ),
        ("formats='int8'\nschedules='sdq[2,4,6]'\nepochs=2", "expects at least 3 epochs, one a width (got 2)"),
        (
            "formats='int8'\nseeds=[18446744073709551616]",
            "seeds: expected a whole number from 0 to 18446744073709551615",
        ),
        (
            "formats='int8'\nmodels='gcn2'\ndatasets='mutag'",
            "gcn2 expects a data set with classes of nodes (got one of many graphs)",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_found(read: Any, settings: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(f"[sweep]\ndatasets='cora'\n[[grid]]\n{settings}")
    assert expected in str(caught.value)


@settings(max_examples=30)
@given(st.integers(0, 2**63))
def test_whatever_is_damaged_is_one_line(seed: int) -> None:
    soak_files.spec(Draw(seed))


def test_a_file_that_is_missing_or_no_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"SPEC expects a file that can be read \(got .*none.toml.: No such file"):
        read_spec(tmp_path / "none.toml")
    (tmp_path / "s.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="expected TOML"):
        read_spec(tmp_path / "s.toml")
