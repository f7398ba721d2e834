"""The sdist and the wheel hold every file they should and nothing else, and work outside the checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from house import ROOT

TOPS = ("qgnn", "kernels", "tests", "bench", "docs", "notebooks", ".ci")
TOP_FILES = ("*.md", "*.toml", "LICENSE", "MANIFEST.in", ".pre-commit-config.yaml")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints", "results")
NOT_SHIPPED = (".md",)  # notes beside a kernel


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_NO_INPUT": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout


def shipped(root: Path) -> set[str]:
    """The tree's code and data files by the name under which they are installed."""
    files = set()
    for top, package in (("qgnn", "qgnn"), ("kernels", "qgnn/kernels")):
        for path in (root / top).rglob("*"):
            if path.is_file() and path.suffix not in NOT_SHIPPED:
                files.add(f"{package}/{path.relative_to(root / top).as_posix()}")
    return files


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without leftovers of earlier builds and runs."""
    copy = tmp_path_factory.mktemp("tree")
    for top in filter(lambda name: (ROOT / name).is_dir(), TOPS):
        shutil.copytree(ROOT / top, copy / top, ignore=LEFTOVERS)
    for path in (path for pattern in TOP_FILES for path in ROOT.glob(pattern)):
        shutil.copy(path, copy)
    # Device code in C joins the package without a line in pyproject.
    (copy / "kernels" / "planted.c").write_text("int planted(void) { return 1; }\n")
    return copy


@pytest.fixture(scope="session")
def built(tree: Path) -> tuple[Path, Path, str]:
    """The sdist, the wheel built from it, and what the build printed."""
    output = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree, cwd=tree.parent)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    (wheel,) = (tree / "dist").glob("*.whl")
    return sdist, wheel, output


@pytest.fixture(scope="session")
def installed(built: tuple[Path, Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", target, built[1], cwd=target)
    return target


def test_wheel_equals_the_tree(tree: Path, built: tuple[Path, Path, str]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == shipped(tree)
    assert {"qgnn/kernels/planted.c", "qgnn/py.typed", "qgnn/data/wordnet/wordnet.npz"} <= packaged
    licenses = {name.split(".dist-info/licenses/")[-1] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "qgnn/data/wordnet/LICENSE"}


def test_sdist_equals_the_tree(tree: Path, built: tuple[Path, Path, str]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"} | {name for name in names if name.startswith("qgnn.egg-info/")}
    files = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    files = {name for name in files if not name.startswith(("dist/", "qgnn.egg-info/"))}
    assert names - generated == files


def test_build_has_no_warning_about_packages(built: tuple[Path, Path, str]) -> None:
    for complaint in ("Deprecat", "absent from", "importable", "would be ignored"):
        assert complaint not in built[2]


def test_metadata_names_license_and_command(built: tuple[Path, Path, str]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        texts = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if "dist-info" in name}
    assert "License-Expression: MIT AND LicenseRef-WordNet\n" in texts["METADATA"]
    assert "qgnn = qgnn.cli:main" in texts["entry_points.txt"]
    for extra in ("test", "bench", "ogb", "molecules", "optim", "docs", "notebooks", "lint", "dev"):
        assert f"Provides-Extra: {extra}\n" in texts["METADATA"]


# Run in a folder far from the checkout. An editable install's finder would lend the checkout's files to a wheel
# that lacks them, so it is taken out, and every loaded module has to lie in the folder of the wheel.
SCRIPT = """
import os, pkgutil, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import torch
import qgnn
from qgnn.nn import QLinear

for module in pkgutil.walk_packages(qgnn.__path__, "qgnn."):
    if not module.name.endswith("__main__"):
        __import__(module.name)

home = os.environ["QGNN_HOME"]
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "qgnn"]
strangers = [module.__name__ for module in ours if not module.__file__.startswith(home)]
assert not strangers, strangers
assert "qgnn.kernels.spmm" in sys.modules, "the kernels are missing"

data = qgnn.data.wordnet()
assert (data.num_nodes, data.num_edges) == (117_791, 368_166), data

torch.manual_seed(0)
layer = QLinear(24, 8)
x = torch.randn(16, 24, requires_grad=True)
out = layer(x)
out.square().sum().backward()
exact = x @ layer.weight.t() + layer.bias
assert (out - exact).norm() < 0.05 * exact.norm()
assert x.grad.isfinite().all() and layer.weight.grad.abs().sum() > 0 and layer.bias.grad is not None
print("works from", qgnn.__file__)
"""


def test_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installed), "QGNN_HOME": str(installed), "TRITON_INTERPRET": "1"}
    output = run(sys.executable, "-c", SCRIPT, cwd=tmp_path, **environment)
    assert f"works from {installed}" in output


def test_script_notices_an_incomplete_wheel(installed: Path, tmp_path: Path) -> None:
    """The check above must not be satisfied by the checkout that these tests run in."""
    broken = tmp_path / "broken"
    shutil.copytree(installed, broken)
    shutil.rmtree(broken / "qgnn" / "kernels")
    environment = {"PYTHONPATH": str(broken), "QGNN_HOME": str(broken), "TRITON_INTERPRET": "1"}
    with pytest.raises(AssertionError, match="the kernels are missing"):
        run(sys.executable, "-c", SCRIPT, cwd=tmp_path, **environment)
