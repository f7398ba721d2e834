"""What a run of a sweep trains: the scheme that it names, beside a baseline that differs in its formats alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from qgnn.cli.model import components_of
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import paired_run, train_run
from qgnn.cli.scheme import UNQUANTIZED, Scheme
from qgnn.cli.sweep.run_spec import scheme_of
from qgnn.cli.task import GraphTask, Task, make_task
from qgnn.config import COMPONENTS, QConfig
from qgnn.data import load_graphs
from qgnn.formats import MSFP, Int
from tu_files import write_tu

CPU = torch.device("cpu")
RECIPE = Recipe(hidden=8, layers=3, epochs=3, dropout=0.5, input_dropout=True)


@pytest.fixture
def task(tiny: Data) -> Task:
    return make_task(tiny, CPU)


def test_a_run_becomes_the_config_that_it_names() -> None:
    assert scheme_of("fp32", "none", "none", "none") is UNQUANTIZED
    assert scheme_of("bf16", "none", "none", "none").bf16
    assert scheme_of("int4", "all", "none", "stochastic").config == QConfig(fmt=Int(4))
    assert scheme_of("msfp12", "weights", "none", "stochastic").config == QConfig.only(weights=MSFP(3))
    assert scheme_of("int8", "all", "sdq[2,4]", "stochastic").schedule == "sdq[2,4]"
    assert scheme_of("int8", "all", "none", "nearest").config == QConfig(fmt=Int(8), rounding="nearest")


SCHEMES = [
    UNQUANTIZED,
    *(scheme_of(name, "all", "none", "stochastic") for name in ("int8", "int4-affine", "msfp12", "mxfp4")),
    scheme_of("int8", "all", "none", "nearest"),
    scheme_of("fixed4", "weights", "none", "stochastic"),
    scheme_of("int4", "output_gradient", "none", "stochastic"),
    scheme_of("int8", "aggregation", "none", "stochastic"),
]


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gin", "gcn2"])
def test_runs_of_one_seed_draw_the_same_numbers_whatever_is_rounded(task: Task, model: str) -> None:
    """Initialization and dropout are then the same, so that a difference in accuracy is that of the formats."""

    def state_behind(train: Any, scheme: Scheme) -> bytes:
        train(task, RECIPE, scheme, 3, CPU, model)
        return bytes(torch.get_rng_state().tolist())

    assert len({state_behind(paired_run, scheme) for scheme in SCHEMES}) == 1
    alone = {state_behind(train_run, scheme) for scheme in SCHEMES}
    assert len(alone) > 1  # else the test above could not fail


def test_rounding_follows_from_the_seed(task: Task) -> None:
    int4 = scheme_of("int4", "all", "none", "stochastic")
    first, again, other = (paired_run(task, RECIPE, int4, seed, CPU, "gcn").final_loss for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("model", "layers"), [("gcn", 2), ("gcn", 3), ("sage", 3), ("gat", 2), ("gin", 2), ("gin", 3), ("gcn2", 4)]
)
def test_a_component_changes_a_model_that_has_it_and_no_other(task: Task, model: str, layers: int) -> None:
    check_components(task, model, layers)


@pytest.mark.parametrize(("model", "layers"), [("gcn", 1), ("gcn", 2), ("gat", 1), ("gin", 1)])
def test_a_component_changes_a_model_of_graphs_that_has_it(tmp_path: Path, model: str, layers: int) -> None:
    write_tu(tmp_path / "MUTAG" / "raw", "MUTAG", [1] * 30 + [-1] * 20)
    task = make_task(load_graphs("mutag", tmp_path), CPU)
    assert isinstance(task, GraphTask)
    for part in task.parts:
        part.x = torch.rand(part.x.shape)  # in place of zeros and ones, which any format holds
    check_components(task, model, layers)


def check_components(task: Task, model: str, layers: int) -> None:
    recipe = replace(RECIPE, layers=layers, dropout=0.0)
    exact = paired_run(task, recipe, UNQUANTIZED, 0, CPU, model).final_loss
    changing = {
        component
        for component in COMPONENTS
        if paired_run(task, recipe, scheme_of("int2", component, "none", "nearest"), 0, CPU, model).final_loss != exact
    }
    assert changing == components_of(model, recipe, task.by_graph)
