"""The house holds: floors, cycles, file sizes and names; and each checker finds a violation planted in a copy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import house

STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources in a folder of their own, to be spoiled."""
    for top in ("qgnn", "kernels", "tests", "bench"):
        shutil.copytree(house.ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return tmp_path


def plant(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n" + code + "\n")


def test_imports_go_only_down() -> None:
    assert house.upward_imports(house.ROOT) == []


def test_imports_from_outside_are_the_declared_ones() -> None:
    assert house.outside_imports(house.ROOT, STANDARD_LIBRARY) == []


def test_modules_have_no_import_cycles() -> None:
    assert house.cycles(house.ROOT) == []


def test_files_stay_small() -> None:
    assert house.long_files(house.ROOT) == []


def test_no_result_has_the_default_type() -> None:
    assert house.default_types(house.ROOT) == []


def test_primitives_have_the_same_name_in_every_room() -> None:
    assert house.missing_rooms(house.ROOT) == []


def test_the_reader_sees_the_whole_house() -> None:
    """A checker that reads nothing finds nothing."""
    names = house.modules(house.ROOT)
    rooms = {house.room(name) for name in names}
    assert {"", "kernels", "ops", "nn", "data", "cli", "config", "functional", "reference"} <= rooms
    edges = {(found.source, found.target) for found in house.imports(house.ROOT)}
    assert any(house.room(source) == "ops" and house.room(target) == "kernels" for source, target in edges)
    assert any(house.room(source) == "nn" and target == "qgnn.functional" for source, target in edges)


def test_the_guide_shows_the_same_floors() -> None:
    """CONTRIBUTING.md lists the floors, one a line, lowest first, as the checker has them."""
    guide = (house.ROOT / "CONTRIBUTING.md").read_text()
    listed = [re.findall(r"`(\w+)`", line.split("|")[2]) for line in re.findall(r"^\| \d+ \|.*$", guide, re.MULTILINE)]
    expected = [[name or "qgnn" for name in rooms if name != "__main__"] for rooms in house.FLOORS]
    assert listed == expected


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("qgnn/config.py", "from qgnn.functional import linear"),
        ("qgnn/config.py", "def late():\n    from . import nn"),
        ("qgnn/rng.py", "import qgnn"),
        ("qgnn/reference/sparse.py", "from qgnn.ops import spmm"),
        ("qgnn/functional/dense.py", "from ..nn import QLinear"),
        ("qgnn/graph.py", "import qgnn.cli"),
        ("kernels/planted.py", "from ..config import QConfig"),
        ("kernels/planted.py", "from qgnn import rng"),
        ("kernels/cpu/planted.py", "from qgnn import rng"),
        ("qgnn/ops/planted.py", "from ..kernels import spmm"),
        ("qgnn/nn/planted.py", "def late():\n    from qgnn.kernels import spmm"),
    ],
)
def test_an_import_from_above_is_found(copy: Path, file: str, code: str) -> None:
    plant(copy, file, code)
    found = house.upward_imports(copy)
    assert len(found) == 1
    assert found[0].startswith(f"qgnn.{file.removeprefix('qgnn/').removesuffix('.py').replace('/', '.')}:")


def test_an_op_may_import_kernels_inside_a_function(copy: Path) -> None:
    plant(
        copy,
        "qgnn/ops/planted.py",
        "def launch():\n    from ..kernels import spmm\n    from qgnn.kernels.spmm import x",
    )
    assert house.upward_imports(copy) == []


def test_a_module_without_a_floor_is_found(copy: Path) -> None:
    plant(copy, "qgnn/planted.py", "from qgnn import rng")
    with pytest.raises(KeyError, match=r"qgnn\.planted is on no floor"):
        house.upward_imports(copy)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("qgnn/config.py", "import triton"),
        ("qgnn/ops/planted.py", "from torch_geometric.nn import GCNConv"),
        ("qgnn/cli/planted.py", "import matplotlib.pyplot as plt"),
        ("qgnn/functional/dense.py", "def late():\n    import requests"),
        ("kernels/planted.py", "import numpy as np"),
    ],
)
def test_a_foreign_import_is_found(copy: Path, file: str, code: str) -> None:
    plant(copy, file, code)
    assert len(house.outside_imports(copy, STANDARD_LIBRARY)) == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_cycle_is_found(copy: Path, late: bool) -> None:
    plant(copy, "qgnn/nn/planted_a.py", "from . import planted_b")
    plant(
        copy, "qgnn/nn/planted_b.py", "def f():\n    from .planted_a import x" if late else "from .planted_a import x"
    )
    assert house.cycles(copy) == ["qgnn.nn.planted_a -> qgnn.nn.planted_b -> qgnn.nn.planted_a"]


def test_an_import_for_typing_makes_no_cycle(copy: Path) -> None:
    plant(copy, "qgnn/nn/planted_a.py", "from . import planted_b")
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .planted_a import x"
    plant(copy, "qgnn/nn/planted_b.py", guarded)
    assert house.cycles(copy) == []


def test_a_long_file_is_found(copy: Path) -> None:
    plant(copy, "kernels/cpu/planted.c", "int x;\n" * house.MAX_LINES)
    plant(copy, "tests/nn/planted.py", "x = 1\n" * house.MAX_LINES)
    found = house.long_files(copy)
    assert [line.split()[0] for line in found] == ["kernels/cpu/planted.c", "tests/nn/planted.py"]


@pytest.mark.parametrize(
    ("call", "is_wrong"),
    [
        ("torch.empty((3, 4))", True),
        ("torch.zeros(n, device=x.device)", True),
        ("torch.full((n,), 0.5)", True),
        ("torch.full((n,), value)", True),
        ("torch.tensor([1, 0.5])", True),
        ("torch.tensor([])", True),
        ("torch.where(x > 0, 1.0, -1.0)", True),
        ("torch.zeros(n, dtype=x.dtype)", False),
        ("torch.full((n,), -1)", False),
        ("torch.tensor([[0, -1], [2, 3]])", False),
        ("torch.where(x > 0, x, -1.0)", False),
        ("torch.where(x > 0)", False),
        ("x.new_zeros(n)", False),
    ],
)
def test_a_default_type_is_found(tmp_path: Path, call: str, is_wrong: bool) -> None:
    for top in ("qgnn", "kernels"):
        plant(tmp_path, f"{top}/__init__.py", f"def planted(x, n, value):\n    return {call}")
    expected = [f"{top}/__init__.py:3 {call}: give it a 'dtype'" for top in ("qgnn", "kernels")]
    assert house.default_types(tmp_path) == expected * is_wrong


def test_a_primitive_without_a_room_is_found(copy: Path) -> None:
    for path in [*(copy / "kernels").glob("spmm*.py"), *(copy / "kernels" / "cpu").glob("spmm*.c")]:
        path.rename(path.with_stem(path.stem.replace("spmm", "aggregate")))
    for path in copy.rglob("*attention*.*"):
        path.unlink()
    plant(copy, "kernels/cpu/gather.c", "")
    for path in (copy / "tests").rglob("test_softmax*.py"):
        path.unlink()
    reference = copy / "qgnn" / "reference" / "edges.py"
    reference.write_text(reference.read_text().replace("def softmax(", "def smooth("))
    assert set(house.missing_rooms(copy)) >= {
        "kernels/aggregate_rows.py is named after no primitive",
        "kernels/cpu/gather.c is named after no primitive",
        "'spmm' has no kernels/spmm.py and no kernels/cpu/spmm.c",
        "'softmax' has no tests/ops/test_softmax.py",
        "'softmax' has no function in qgnn/reference",
        "'softmax' has no tests/kernels/test_softmax.py",
        "'softmax' has no tests/kernels/cpu/test_softmax.py",
    }


def test_a_kernel_in_either_language_serves_an_op(copy: Path) -> None:
    """What is written in C alone has no Triton kernel yet, and the reverse."""
    kernels = {
        "*.py": list((copy / "kernels").glob("softmax*.py")),
        "*.c": list((copy / "kernels/cpu").glob("softmax*.c")),
    }
    for paths in kernels.values():
        kept = {path: path.read_text() for path in paths}
        for path in paths:
            path.unlink()
        assert not [line for line in house.missing_rooms(copy) if "'softmax' has no kernels" in line]
        for path, text in kept.items():
            path.write_text(text)
    for paths in kernels.values():
        for path in paths:
            path.unlink()
    assert [line for line in house.missing_rooms(copy) if "'softmax' has no kernels" in line]


# Prints what `import qgnn` adds on top of torch and PyG: loaded modules, started processes, loaded shared libraries.
# Some versions of PyG load Triton themselves; that qgnn does not is also read from its source, by outside_imports().
PROBE = """
import json, sys
import torch, torch_geometric
before = set(sys.modules)
events = []
watched = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "ctypes.dlopen")
sys.addaudithook(lambda event, args: events.append(f"{event} {args[0]}") if event in watched else None)
import qgnn
print(json.dumps({"file": qgnn.__file__, "modules": sorted(set(sys.modules) - before), "events": events}))
"""


def import_footprint(folder: Path | None = None) -> dict:
    """Runs the probe in a fresh interpreter; ``folder`` holds a qgnn to use in place of the installed one."""
    environment = {**os.environ, "PYTHONPATH": str(folder or "")}
    command = [sys.executable, "-W", "ignore", "-c", PROBE]
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def heavy(modules: list[str]) -> list[str]:
    unwanted = ("triton", "matplotlib", "ogb", "pandas", "sklearn")
    return [name for name in modules if name.split(".")[0] in unwanted or name.startswith("qgnn.kernels")]


def test_import_loads_neither_triton_nor_a_compiler() -> None:
    footprint = import_footprint()
    assert "qgnn.functional" in footprint["modules"]
    assert heavy(footprint["modules"]) == []
    assert footprint["events"] == []


def test_the_import_probe_sees_a_heavy_import(copy: Path) -> None:
    shutil.move(copy / "kernels", copy / "qgnn" / "kernels")
    plant(copy, "qgnn/__init__.py", "import matplotlib, qgnn.kernels.spmm, subprocess\nsubprocess.run(['true'])")
    footprint = import_footprint(copy)
    assert Path(footprint["file"]).is_relative_to(copy)
    assert {"matplotlib", "qgnn.kernels.spmm"} <= set(heavy(footprint["modules"]))
    assert any(event.startswith("subprocess.Popen true") for event in footprint["events"])
