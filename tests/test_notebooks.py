"""Every notebook runs from top to bottom, on tiny settings, and is stored without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import qgnn
from house import ROOT

# Values of the cell tagged `parameters`.
TINY = {"activation_distribution": {"num_nodes": 2000, "num_steps": 3, "block_size": 64}}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_every_notebook_has_tiny_settings() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(TINY)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert str(Path.home()) not in path.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    names = {line.partition(" = ")[0] for line in parameters.source.splitlines()}
    assert set(TINY[path.stem]) == names
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in TINY[path.stem].items())
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # no settings of whoever runs the tests
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "2"))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    # A warning about a line of the notebook; what others say while they are imported depends on the machine.
    assert not [output for output in outputs if output.get("name") == "stderr" and "ipykernel_" in output.text]


def test_tables_are_text_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would show a table itself there, and leave nothing to print; kernels ask for colors."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with qgnn.compress_activations() as report:
        model(torch.randn(64, 64)).sum().backward()
    with qgnn.trace() as trace:
        qgnn.quantize_(model, qgnn.QConfig())(torch.randn(64, 64)).sum().backward()
    texts = [str(report), str(trace), str(qgnn.summary(model))]
    for text, word in zip(texts, ("1 bit", "matmul.forward", "QLinear"), strict=True):
        assert word in text
        assert "\x1b" not in text
