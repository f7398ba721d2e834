"""``qgnn info``: versions, devices, and backends found by running the ops."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compilers import rejecting, write_compiler
from qgnn.cli import info, main
from qgnn.cli.errors import UsageError
from qgnn.cli.train import write_json


def test_info_writes_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info", "--json", str(tmp_path / "info.json")]) == 0
    out, err = capsys.readouterr()
    result = json.loads((tmp_path / "info.json").read_text())
    assert set(result) == {"versions", "devices", "c_kernels", "ops"}
    packages = {"python", "qgnn", "torch", "torch_geometric", "triton", "numpy"}
    assert set(result["versions"]) == packages | ({"cuda"} if torch.version.cuda else set())
    assert result["versions"]["torch"] in out
    assert result["devices"][0]["device"] == "cpu"
    for op in ("quantize", "matmul", "spmm", "sddmm", "softmax", "attention", "blocks"):
        assert op in out
        entry = result["ops"][op]["cpu"]
        assert entry["backend"] == "c" if op != "matmul" else entry["backend"].startswith("c/")
        assert entry["why"].startswith("C kernels, compiled at the first call: /")
        assert set(result["ops"][op]) == {"cpu", "cuda"}
    assert "\x1b" not in out
    assert "…" not in out, "paths are whole"
    assert err == ""


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """Also where a link leads to it."""
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        for each in (path, link):
            with pytest.raises(UsageError, match=r"--json: .* could not be written after training \(File too large\)"):
                write_json(each, {"runs": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [link, path]
    write_json(link, {"runs": []})
    assert (json.loads(path.read_text()), link.is_symlink()) == ({"runs": []}, True)


def test_what_cannot_be_replaced_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, and a file in a folder of someone else, or that is mounted by itself."""
    pipe, path = tmp_path / "pipe", tmp_path / "out.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, {"runs": [1]})
    assert json.loads(os.read(reader, 1000)) == {"runs": [1]}
    os.close(reader)
    assert pipe.is_fifo()
    path.write_text("old")
    before = path.stat().st_ino

    def refuse(*_: Any) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(Path, "replace", refuse)
    write_json(path, {"runs": [1]})
    assert (json.loads(path.read_text()), path.stat().st_ino) == ({"runs": [1]}, before)
    with pytest.raises(UsageError, match=r"could not be written after training \(busy\)"):
        write_json(tmp_path / "new.json", {"runs": [1]})
    assert sorted(tmp_path.iterdir()) == [path, pipe]


@pytest.mark.parametrize("redirected", ["pipe", "file"])
def test_json_goes_where_the_rest_goes(tmp_path: Path, redirected: str) -> None:
    """To standard output, be it a pipe or a regular file, in front of what follows."""
    script = "from pathlib import Path; from qgnn.cli.train import write_json; print('before'); "
    script += "write_json(Path('/dev/stdout'), {'runs': []}); print('behind')"
    with (tmp_path / "out").open("w+") as file:
        stdout = subprocess.PIPE if redirected == "pipe" else file
        done = subprocess.run([sys.executable, "-c", script], stdout=stdout, text=True, check=True, timeout=300)
    text = done.stdout if redirected == "pipe" else (tmp_path / "out").read_text()
    assert text == 'before\n{\n  "runs": []\n}\nbehind\n'


@pytest.fixture
def qgnn_info(tmp_path: Path) -> Callable[..., tuple[dict, str, str]]:
    """``qgnn info`` as a command, on a machine where nothing is compiled yet: its JSON, output and errors."""

    def run(faults: str = "") -> tuple[dict, str, str]:
        script = write_compiler(tmp_path / "compiler", f'{faults}\nset -- "$@" -O0')  # a fast one
        variables = {"CC": str(script), "QGNN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "default"}
        command = [sys.executable, "-m", "qgnn.cli", "info", "--json", str(tmp_path / "info.json")]
        environment = {**os.environ, **variables}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads((tmp_path / "info.json").read_text())["c_kernels"], result.stdout, result.stderr

    return run


@pytest.mark.parametrize("missing", [(), ("-fopenmp",), ("-march=native",)])
def test_info_says_how_the_c_kernels_were_compiled(
    qgnn_info: Callable[..., tuple[dict, str, str]], tmp_path: Path, missing: tuple[str, ...]
) -> None:
    found, out, err = qgnn_info(rejecting(*missing) if missing else "")
    (path,) = (tmp_path / "cache").iterdir()
    openmp, native = "-fopenmp" not in missing, "-march=native" not in missing
    assert found == {"path": str(path), "openmp": openmp, "native": native, "not_kept": None, "missing": None}
    lines = [line.rstrip() for line in out.splitlines()]
    start = lines.index("C kernels")
    assert lines[start + 1 : start + 5] == [
        f"  library: {path}",
        "  OpenMP: yes" if openmp else "  OpenMP: no, each call runs on one thread",
        "  compiled for: this CPU (-march=native)" if native else "  compiled for: the baseline of its architecture",
        "which backend serves each op",
    ]
    assert "each process compiles" not in err


def test_info_says_why_the_c_kernels_are_not_kept(
    qgnn_info: Callable[..., tuple[dict, str, str]], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o775)
    found, out, err = qgnn_info()
    assert found["not_kept"] == f"others can write to {cache} (to end that: chmod go-w {cache})"
    assert f"  compiled anew by each process: {found['not_kept']}\n" in out
    warning = f"each process compiles qgnn's CPU kernels anew, as they cannot be kept: {found['not_kept']}; repair this"
    assert err.count(warning) == 1
    assert list(cache.iterdir()) == []


def test_info_says_why_the_cpu_runs_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "c_kernels", lambda: (False, {"path": None, "missing": "no C compiler"}))
    monkeypatch.setattr(info, "probe", lambda device: {"spmm": "torch"})
    assert info.backends()["spmm"]["cpu"] == {"backend": "torch", "why": "plain PyTorch: no C compiler"}
    assert info.describe({"path": None, "missing": "no C compiler"}) == ["none: no C compiler"]


def test_info_says_why_the_gpu_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert info.backends()["spmm"]["cuda"] == {"backend": None, "why": "torch was built without CUDA"}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert info.backends()["spmm"]["cuda"] == {"backend": None, "why": "torch finds no CUDA device"}


def test_info_reports_what_the_gpu_ran_or_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(device: str) -> dict[str, str]:
        return {"quantize": "torch", "spmm": "torch"} if device == "cpu" else {"spmm": "triton"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info, "probe", probe)
    served = info.backends()
    assert served["spmm"]["cuda"]["backend"] == "triton"
    assert served["quantize"]["cuda"]["backend"] is None

    def broken(device: str) -> dict[str, str]:
        if device == "cuda":
            raise RuntimeError("no kernel image\nfor this device")
        return {"spmm": "torch"}

    monkeypatch.setattr(info, "probe", broken)
    entry = info.backends()["spmm"]["cuda"]
    assert entry == {"backend": None, "why": "the probe failed: RuntimeError: no kernel image for this device"}


def test_info_names_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    assert info.backends()["spmm"]["cuda"] == {"backend": None, "why": "Triton is not installed: pip install triton"}


def test_info_rejects_an_unwritable_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info", "--json", str(tmp_path / "no" / "info.json")]) == 2
    assert "qgnn info: error: --json expects a file that can be written" in capsys.readouterr().err


def test_info_prints_reasons_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What looks like markup to the table is part of a linker's message."""
    served = {"spmm": {"cuda": {"backend": None, "why": "[/usr/bin/ld] failed"}}}
    monkeypatch.setattr(info, "backends", lambda: served)
    assert main(["info"]) == 0
    assert "[/usr/bin/ld] failed" in capsys.readouterr().out
