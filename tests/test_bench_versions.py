"""bench/versions.sh: which versions it installs, what it records, and what ends it; nothing is installed here."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# In place of Python: an environment whose pip notes what it is told, and whose Python is the one that runs the tests.
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$*" >> "%s/pip.log"\\n{pip}\\n' "$(dirname "$3")" > "$3/bin/pip"
printf '#!/bin/sh\\nexec {python} "$@"\\n' > "$3/bin/python"
printf '#!/bin/sh\\nexec {python} -P -m pytest "$@"\\n' > "$3/bin/pytest"
chmod +x "$3/bin/pip" "$3/bin/python" "$3/bin/pytest"
"""

TESTS = """
import pytest
def test_passes(): pass
def test_passes_too(): pass
@pytest.mark.skip
def test_is_skipped(): pass
"""


def run(folder: Path, *environments: str, tests: str = TESTS, pip: str = "exit 0") -> subprocess.CompletedProcess:
    (folder / "python").write_text(PYTHON.format(pip=pip, python=sys.executable))
    (folder / "python").chmod(0o700)
    (folder / "test_small.py").write_text(tests)
    variables = {"PYTHON": str(folder / "python"), "FOLDER": str(folder / "made"), "RECORDS": str(folder / "records")}
    environment = {**os.environ, **variables, "TESTS": str(folder / "test_small.py")}
    command = ["bash", str(ROOT / "bench" / "versions.sh"), *environments]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_both_ends_are_installed_and_recorded(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [record["environment"] for record in records] == ["oldest", "newest"]
    for record in records:
        assert (record["passed"], record["failed"], record["skipped"]) == (2, 0, 1)
        assert record["versions"]["torch"] == version("torch")
        assert len(record["commit"]) == 40
        assert record["seconds"] > 0
    installed = (tmp_path / "made" / "pip.log").read_text().splitlines()
    oldest = "torch==2.10 torch_geometric==2.7 triton==3.6 numpy<2.4"  # as pyproject.toml has them
    assert installed[:2] == [f"install -q {oldest} pip", f"install -q -e .[test] {oldest}"]
    assert installed[3] == "install -q -e .[test] torch torch_geometric triton numpy"


def test_a_test_that_fails_is_counted_and_told(tmp_path: Path) -> None:
    result = run(tmp_path, "newest", tests="def test_fails(): assert False\n")
    assert result.returncode == 1
    record = json.loads((tmp_path / "records").read_text())
    assert (record["environment"], record["passed"], record["failed"]) == ("newest", 0, 1)


@pytest.mark.parametrize(
    ("environment", "pip", "message"),
    [
        ("oldest", "echo 'no such version' >&2; exit 1", "oldest: pip could not install torch==2.10"),
        ("older", "exit 0", "'versions.sh' expects oldest or newest (got 'older')"),
    ],
)
def test_an_environment_that_cannot_be_made(tmp_path: Path, environment: str, pip: str, message: str) -> None:
    result = run(tmp_path, environment, pip=pip.replace("'", '"'))
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "records").exists()
