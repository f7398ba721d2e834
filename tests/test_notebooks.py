"""Every notebook is stored as it ran, and runs from top to bottom on tiny settings."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbformat import NotebookNode

import qgnn
from house import ROOT

# Values of the cell tagged `parameters`.
TINY: dict[str, dict[str, Any]] = {
    "01_quickstart": {"num_nodes": 1000, "num_epochs": 2, "num_seeds": 1},
    "02_stochastic_rounding": {"num_nodes": 256, "num_features": 16, "num_seeds": 50},
    "03_compressed_activations": {"scale": 0.005, "hidden": 32, "num_epochs": 2, "num_repeats": 4},
    "04_how_few_bits": {"scale": 0.005, "num_epochs": 4, "num_seeds": 1},
    "05_sampled_and_distributed": {"scale": 0.005, "num_steps": 2, "num_epochs": 3},
    "06_your_own_layer": {"num_features": 16, "num_repeats": 16, "scale": 0.01, "num_epochs": 2},
    "activation_distribution": {"num_nodes": 2000, "num_steps": 3, "block_size": 64},
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def outputs_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def has_picture(notebook: NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def test_every_notebook_has_tiny_settings() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(TINY)


@each_notebook
def test_notebook_is_stored_as_it_ran(path: Path) -> None:
    """Once, in order, without errors and warnings, and without traces of whose machine it was."""
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        shows = "print(" in cell.source or "plt.show()" in cell.source
        assert cell.outputs or not shows, cell.source
        assert set(cell.metadata) <= {"tags"}, "times of an execution"
    assert not [o for o in outputs_of(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    assert has_picture(notebook)
    text = path.read_text()
    assert len(text) <= MAX_BYTES
    for private in ("/home/", "/root/", "/Users/", "/tmp/", "site-packages", " at 0x"):
        assert private not in text


def anchors_of(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_notebook
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links, "where to go on"
    for link in links:
        file, _, anchor = link.partition("#")
        assert (path.parent / file).exists(), link
        assert not anchor or anchor in anchors_of(path.parent / file), link


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookClient]:
    """One process for all notebooks: what they import is loaded once."""
    folder = tmp_path_factory.mktemp("kernel")
    environment = {
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": str(folder),  # no settings of whoever runs the tests
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=300,
        kernel_name="python3",
        shutdown_kernel="immediate",
        resources={"metadata": {"path": folder}},
    )
    with client.setup_kernel(env=environment):
        yield client


@each_notebook
def test_notebook_runs(path: Path, client: NotebookClient) -> None:
    notebook = read(path)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    names = {line.partition(" = ")[0] for line in parameters.source.splitlines()}
    assert set(TINY[path.stem]) == names
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in TINY[path.stem].items())
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # names of the notebook before
    client.nb = notebook
    client.execute(cleanup_kc=False)
    assert has_picture(notebook)
    # A warning about a line of the notebook; what others say while they are imported depends on the machine.
    assert not [o for o in outputs_of(notebook) if o.get("name") == "stderr" and "ipykernel_" in o.text]


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
