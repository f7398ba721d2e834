"""``qgnn info``: versions, devices, and backends found by running the ops."""

import json
from pathlib import Path

import pytest
import torch

from qgnn.cli import info, main


def test_info_writes_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info", "--json", str(tmp_path / "info.json")]) == 0
    out, err = capsys.readouterr()
    result = json.loads((tmp_path / "info.json").read_text())
    assert set(result) == {"versions", "devices", "ops"}
    assert set(result["versions"]) == {"python", "qgnn", "torch", "torch_geometric", "triton", "numpy"}
    assert result["versions"]["torch"] in out
    assert result["devices"][0]["device"] == "cpu"
    for op in ("quantize", "matmul", "spmm", "sddmm"):
        assert op in out
        entry = result["ops"][op]["cpu"]
        assert entry["backend"] == "c" if op != "matmul" else entry["backend"].startswith("c/")
        assert entry["why"].startswith("C kernels, compiled at the first call: /")
        assert set(result["ops"][op]) == {"cpu", "cuda"}
    assert "\x1b" not in out
    assert err == ""


def test_info_says_why_the_cpu_runs_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "c_kernels", lambda: (False, "no C compiler: none of cc, gcc, clang is on the path"))
    monkeypatch.setattr(info, "probe", lambda device: {"spmm": "torch"})
    why = "plain PyTorch: no C compiler: none of cc, gcc, clang is on the path"
    assert info.backends()["spmm"]["cpu"] == {"backend": "torch", "why": why}


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
