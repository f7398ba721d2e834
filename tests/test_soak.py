"""The soak test itself: it runs, it finds a fault that is planted, and a case can be run again."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import soak
import soak_leak
from qgnn.ops import _backends
from soak_cases import is_house_error
from soak_draw import Draw
from soak_files import damaged


@pytest.mark.parametrize("kind", soak.KINDS)
def test_some_cases_of_each_kind(kind: str) -> None:
    for case in range(4):
        soak.run_case(case, kind)


def test_a_summary_says_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seed", "3", "--seconds", "1", "--kinds", "format", "compressed", "--json", str(tmp_path / "s.json")]
    assert soak.main(arguments) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["seed"] == 3
    assert summary["cases"] == sum(summary["kinds"].values()) > 0
    assert summary["kinds"].keys() <= {"format", "compressed"}
    assert summary["failures"] == []
    assert summary["versions"]["torch"] == torch.__version__
    assert f"{summary['cases']} cases in" in capsys.readouterr().out


def _off_by_one(primitive: str) -> Callable[..., Any]:
    """The kernel with its first result, or that of a tuple, one off at one place."""
    backend = _backends.c_backend()
    assert backend is not None
    kernel = backend._primitives[primitive]

    def wrong(*operands: Any, **options: Any) -> Any:
        results = kernel(*operands, **options)
        first = results[0] if isinstance(results, tuple) else results
        if first.numel():
            first.view(-1)[-1] += 1
        return results

    return wrong


@pytest.mark.parametrize(
    ("primitive", "kind"),
    [
        *(("spmm", "function"), ("attention", "function"), ("quantize", "function")),
        *(("blocks_pack", "compressed"), ("quantize_dequantize", "format")),
    ],
)
def test_a_planted_fault_is_found_and_found_again(
    primitive: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = _backends.c_backend()
    assert backend is not None
    monkeypatch.setitem(backend._primitives, primitive, _off_by_one(primitive))
    result = soak.soak(0, 600, most_failures=1, kinds=[kind])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"FAILED {kind}"))
    found = re.search(rf"{primitive}\[.*again with: python tests/soak.py --case (\d+)$", line)
    assert found is not None, line
    assert int(found.group(1)) == result["failures"][0]["case"]
    assert soak.main(["--case", found.group(1)]) == 1
    assert f"AssertionError: {primitive}[" in capsys.readouterr().err
    monkeypatch.undo()
    assert soak.main(["--case", found.group(1)]) == 0


def test_a_case_is_a_function_of_its_seed() -> None:
    first, second = Draw(5), Draw(5)
    assert [first.random() for _ in range(3)] == [second.random() for _ in range(3)]
    assert torch.equal(*(torch.randn(3) for _ in map(Draw, (7, 7))))
    assert damaged(Draw(1), bytes(100)) == damaged(Draw(1), bytes(100))
    assert len({damaged(Draw(seed), bytes(100)) for seed in range(30)}) > 15


def test_warnings_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(draw: Draw) -> None:
        import warnings

        warnings.warn("of what nobody should see", RuntimeWarning, stacklevel=1)

    monkeypatch.setitem(soak.KINDS, "format", warn)
    assert [f["reason"] for f in soak.soak(0, 600, most_failures=1, kinds=["format"])["failures"]] == [
        "RuntimeWarning: of what nobody should see"
    ]


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (ValueError("'spmm' expects 'x' with 64 columns (got 32)"), True),
        (RuntimeError("'spmm' expects 'x' with 64 columns (got 32)"), False),
        (ValueError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("'spmm' expects\n'x' (got 32)"), False),
    ],
)
def test_errors_of_the_house(error: Exception, is_ours: bool) -> None:
    assert is_house_error(error) == is_ours


# --- memory


@pytest.mark.parametrize("kind", soak_leak.KINDS)
def test_steps_keep_no_tensor_and_no_graph(kind: str) -> None:
    """Numbers of objects, which no allocator rounds."""
    step = soak_leak.training(kind)
    for _ in range(5):
        step()
    before = soak_leak.living()
    for _ in range(25):
        step()
    after = soak_leak.living()
    assert {name: after[name] - number for name, number in before.items()} == dict.fromkeys(before, 0)


def test_a_planted_leak_is_found() -> None:
    step, kept = soak_leak.training("int8"), []

    def leaking() -> None:
        step()
        kept.append(torch.zeros(1000))

    found = soak_leak.measure(leaking, 24)
    assert found["more"]["tensors"] == 16
    grows = soak_leak.leaks(found)
    assert grows[0] == "16 more tensors"
    assert any("python_bytes a step" in reason for reason in grows)
    assert soak_leak.leaks({"python_bytes": 1.0, "rss_bytes": -3.0, "more": {"tensors": 0}}) == []


def test_a_slope_is_that_of_the_line() -> None:
    assert soak_leak.slope([5.0, 25.0, 45.0, 65.0], 10) == pytest.approx(2.0)
