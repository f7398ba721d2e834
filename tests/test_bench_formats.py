"""Number formats in the benchmarks: bytes of a step, rounding as others write it, and Error_X beside the accuracy."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from house import ROOT
from qgnn import QConfig
from qgnn import formats as number_formats
from tu_files import write_tu

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
emulation = importlib.import_module("bench.suites.emulation")
formats = importlib.import_module("bench.suites.formats")
harness = importlib.import_module("bench.harness")
inputs = importlib.import_module("bench.suites.inputs")
live = importlib.import_module("bench.live")
main = importlib.import_module("bench.__main__")
numbers = importlib.import_module("bench.numbers")
plots = importlib.import_module("bench.plots")
provenance = importlib.import_module("qgnn.cli.provenance")
pages = importlib.import_module("bench.pages")
records = importlib.import_module("bench.records")
step = importlib.import_module("bench.suites.step")
threshold = importlib.import_module("bench.suites.threshold")

CPU = torch.device("cpu")
QUICK = inputs.Setting(CPU, quick=True)
STAMP = provenance.Stamp("Some CPU, 2 threads", "0123456789abcdef", False, {"torch": "2.0", "triton": None})


def test_live_bytes_are_those_of_tensors() -> None:
    """1 MiB stays; at the peak there are 3 more, one of them a temporary of an expression."""
    size = 2**20 // 4
    before = torch.zeros(size)
    with live.LiveBytes(CPU) as found:
        kept = torch.empty(size)
        other = (before + 1) * torch.empty(size)
        del other
    assert (found.net, found.peak) == (2**20, 2**22)
    with live.LiveBytes(CPU) as found:
        del kept
    assert (found.net, found.peak) == (-(2**20), 0)


@pytest.mark.parametrize("name", [*formats.NAMES, "fixed8-affine", "mxfp8-e5m2"])
def test_the_emulation_rounds_to_the_same_values(name: str) -> None:
    """But for powers of two, of which log2 may be an ulp off, no value differs: int scales have another last bit."""
    fmt = number_formats.parse(name)
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    x[3] = 0
    expected = fmt.quantize(x)
    assert torch.allclose(emulation.rounded(x, fmt), expected, rtol=1e-5, atol=0)


def test_the_emulation_rounds_operands_and_gradient() -> None:
    fmt = number_formats.parse("fixed4")
    layer = torch.nn.Linear(6, 3)
    x, grad = (torch.randn(n, generator=torch.Generator().manual_seed(n)).view(5, -1) for n in (30, 15))
    x.requires_grad_()
    out = emulation.EmulatedLinear(layer, fmt)(x)
    out.backward(grad)
    rows, weight, rounded = (fmt.quantize(t.detach()) for t in (x, layer.weight, grad))
    assert torch.allclose(out, rows @ weight.t() + layer.bias, atol=1e-5)
    assert torch.allclose(x.grad, rounded @ weight, atol=1e-5)
    assert torch.allclose(layer.weight.grad, rounded.t() @ rows, atol=1e-5)


@pytest.fixture(scope="module")
def mutag(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rings of nodes under the name of MUTAG."""
    root = tmp_path_factory.mktemp("root")
    write_tu(root / "TUDataset" / "MUTAG" / "raw", "MUTAG", [0, 1] * 15)
    return inputs.Setting(CPU, root=root)


def measured(case: Any, slack: float = 1.0) -> dict[str, Any]:
    """By provider, each within its bound, or ``slack`` times that."""
    exact = case.reference()
    found = {}
    for provider in case.providers:
        found[provider.name] = provider.setup()
        assert harness.relative_error(found[provider.name].results, exact) <= slack * provider.tolerance, provider.name
    return found


def test_memory_of_graphs_in_every_format(mutag: Any) -> None:
    case = formats.Problem("mutag", mutag).case()
    assert case.name == "mutag/gcn/formats"
    found = measured(case, slack=2.0)  # of few different rows, whose errors do not average
    assert {f"qgnn {name}" for name in formats.NAMES} <= set(found)
    for m in found.values():
        assert m.peak_mib > m.saved_mib > 0
        assert m.peak_mib > m.metrics["features_mib"] + m.metrics["prepared_mib"]


def test_what_a_step_lives_in_follows_from_its_format() -> None:
    """On a synthetic graph; int8 features have a quarter of the bytes and a scale a row, msfp12's codes of rows and of
    columns, of 4.5 bits each."""
    problem = formats.Problem("cora", QUICK)
    found = measured(problem.case())
    N, K = problem.data.x.shape
    bytes_of = {name: m.metrics["features_mib"] * 2**20 for name, m in found.items()}
    assert bytes_of["pyg coo fp32"] == 4 * N * K
    assert bytes_of["qgnn int8"] == N * K + 4 * N
    assert bytes_of["qgnn msfp12"] == N * K // 2 + N * K // 16 + K * -(-N // 2) + K * -(-N // 16)
    assert found["qgnn int8"].peak_mib < found["pyg coo fp32"].peak_mib < found["emulated int8"].peak_mib


def test_the_gate_of_a_format_sees_a_wrong_scale() -> None:
    problem = formats.Problem("cora", QUICK)
    exact = problem.exact()
    for name in ("int8", "msfp16", "mxfp8-e4m3"):
        fmt = number_formats.parse(name)
        out, grad = problem.untrained(problem.ours(fmt), problem.data.x, problem.coo())
        assert harness.relative_error([out, grad], exact) <= step.tolerance_of(fmt)
        assert harness.relative_error([out, 1.5 * grad], exact) > step.tolerance_of(fmt)


def test_operands_of_the_first_step_are_those_of_quantized_layers(mutag: Any) -> None:
    """Of two layers of a model of nodes the first, of graphs all three; each with its gradient."""
    of_nodes = threshold.operands("cora", QUICK)
    assert [name for name, _ in of_nodes] == ["rows", "weights", "messages", "output_gradient"]
    named = dict(of_nodes)
    task, recipe = threshold.load("cora", QUICK)
    N, K = task.features[0].shape
    assert [tuple(t.shape) for _, t in of_nodes] == [(N, K), (16, K), (N, 16), (N, 16)]
    assert torch.allclose(named["messages"], named["rows"] @ named["weights"].t(), atol=1e-4)
    assert recipe.input_dropout
    assert 0.3 < float((named["rows"] == 0).float().mean()) < 0.7
    of_graphs = threshold.operands("mutag", mutag)
    assert len(of_graphs) == 3 * 4
    assert all(bool(t.any()) for _, t in of_graphs)


def test_error_falls_with_the_width_and_is_that_of_select_bits() -> None:
    from qgnn.metrics import error_x

    found = [threshold.errors("cora", threshold.FORMATS["int"](bits), QUICK) for bits in threshold.WIDTHS]
    for name in numbers.RULES:
        values = [errors[name] for errors in found]
        assert values == sorted(values)
    operands = [t for _, t in threshold.operands("cora", QUICK)]
    each = [float(error_x(t, number_formats.Int(4).quantize(t))) for t in operands]
    assert found[4]["error_x"] == pytest.approx(sum(each) / 4)
    assert found[4]["error_x_max"] == pytest.approx(max(each))
    assert found[0]["sqnr"] > 35 > found[-1]["sqnr"]


def test_a_case_trains_both_from_the_same_seeds(monkeypatch: pytest.MonkeyPatch, mutag: Any) -> None:
    seen = []
    run = threshold.paired_run

    def spied(task: Any, recipe: Any, scheme: Any, seed: int, *args: Any, **how: Any) -> Any:
        seen.append((scheme.name, seed))
        return run(task, threshold.replace(recipe, epochs=2), scheme, seed, *args, **how)

    monkeypatch.setattr(threshold, "paired_run", spied)
    monkeypatch.setattr(threshold, "NUM_SEEDS", {"mutag": 2})
    threshold.full_precision.cache_clear()
    case = threshold.Problem("mutag", "msfp", 4, mutag).case()
    assert (case.name, case.providers[0].name) == ("mutag/gcn/msfp/4", "qgnn msfp12")
    (m,) = measured(case).values()
    assert seen == [("msfp12", 0), ("msfp12", 1), ("fp32", 0), ("fp32", 1)]
    assert 0 <= m.test_acc <= 1
    assert m.metrics["seeds"] == 2
    assert QConfig(fmt=threshold.FORMATS["msfp"](4)).bits == m.metrics["bits"] == 4
    threshold.full_precision.cache_clear()


# ---- tables


def write(results: Path, suite: str, *found: dict) -> None:
    base: dict[str, Any] = {"suite": suite, "pass": "step", "median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0}
    base |= {"peak_mib": None, "saved_mib": None, "bytes": None, "error": 0.01, "ok": True}
    utc = "2026-01-01T00:00:00+00:00"
    lines = [records.make_record(STAMP, utc, **{**base, **values}) for values in found]
    records.append(results / STAMP.machine / f"{suite}.jsonl", lines)


def write_point(results: Path, case: str, drop: float, error: float, drop_error: float = 0.003) -> None:
    errors = dict.fromkeys(numbers.RULES, error) | {"sqnr": 20.0, "fp32_acc": 0.8, "bits": 4, "seeds": 2}
    errors["drop_error"] = drop_error
    write(results, "threshold", {"case": case, "provider": "qgnn", "test_acc": 0.8 - drop / 100, "metrics": errors})


def cells(text: str, *start: str) -> list[list[str]]:
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [line for line in found if line[: len(start)] == list(start)]


def test_threshold_tables_count_what_the_rule_says(tmp_path: Path) -> None:
    assert numbers.region(tmp_path, "threshold") == ""
    for dataset, bits, drop, error in (
        ("cora", 8, 0.2, 0.1),
        ("cora", 4, 0.8, 0.4),
        ("pubmed", 8, 2.0, 0.2),
        ("pubmed", 4, 6.0, 0.5),
    ):
        write_point(tmp_path, f"{dataset}/gcn/int/{bits}", drop, error)
    text = dict(pages.regions(tmp_path))["threshold"]
    assert text.endswith("more than 0.5 points: none.")
    no_widths = ["", "", ""]
    assert cells(text, "cora", "int") == [
        ["cora", "int", "+0.20 ± 0.30", *no_widths, "+0.80 ± 0.30", "", "", "2"],
    ]
    assert cells(text, "int", "8") == [["int", "8", "2", "0.150", "0.150", "20.0", "+1.10", "50 %", "50 %"]]
    assert cells(text, "int", "4") == [["int", "4", "2", "0.450", "0.450", "20.0", "+3.40", "100 %", "50 %"]]
    (row,) = cells(text, numbers.RULES["error_x"])
    # Ranks of errors 0 2 1 3, of drops 0 1 2 3: one swap of neighbors.
    assert row[1:] == ["1", "1", "1", "1", "50", "0.80"]
    write_point(tmp_path, "mutag/gcn/int/8", 3.0, 0.1, drop_error=0.02)  # which is no miss
    text = dict(pages.regions(tmp_path))["threshold"]
    assert text.endswith("more than 0.5 points: mutag.")
    assert cells(text, numbers.RULES["error_x"]) == [row]
    assert cells(text, "mutag")[0][2] == "+3.00 ± 2.00"


def test_ranks_of_ties_are_means() -> None:
    assert numbers.spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert numbers.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert numbers.spearman([1, 1, 1], [3, 2, 1]) == 0


def test_formats_have_a_region_of_their_own(tmp_path: Path) -> None:
    case = {"case": "cora/gcn/formats"}
    sizes = {"saved_mib": 1.0, "metrics": {"features_mib": 0.5}}
    write(
        tmp_path,
        "memory",
        {**case, "provider": "pyg coo fp32", "peak_mib": 10.0, **sizes},
        {**case, "provider": "qgnn int8", "peak_mib": 4.0, **sizes},
        {**case, "provider": "qgnn broken", "ok": False},
    )
    case = {"case": "9x8/float32/fake/msfp12", "pass": "forward"}
    times_ms = {"qgnn msfp12": 3.0, "torch eager msfp12": 12.0, "ceiling: torch.round": 1.5}
    write(tmp_path, "quantize", *({**case, "provider": who, "median_ms": ms} for who, ms in times_ms.items()))
    write(tmp_path, "matmul", {"case": "9x8x7/formats", "pass": "backward", "provider": "qgnn mxint8"})
    found = dict(pages.regions(tmp_path))
    text = found["formats"]
    assert cells(text, "cora", "qgnn int8") == [["cora", "qgnn int8", "4.00", "0.40", "1.00", "0.50"]]
    assert cells(text, "cora", "qgnn broken")[0][2] == "failed"
    assert cells(text, "9x8") == [["9x8", "msfp12", "3", "1.5", "2.00x", "12", "4.00x"]]
    assert cells(text, "9x8x7") == [["9x8x7", "backward", "qgnn mxint8", "1", "0.01"]]
    assert "qgnn" not in found["bench"]


def test_the_scatter_is_drawn(tmp_path: Path) -> None:
    for family, bits, drop in (("int", 8, 0.2), ("msfp", 3, 9.0)):
        write_point(tmp_path, f"cora/gcn/{family}/{bits}", drop, 0.1 * (9 - bits))
    (path,) = plots.write(tmp_path, tmp_path / "plots")
    assert path.name == "some-cpu-2-threads-threshold.png"
    assert path.read_bytes().startswith(b"\x89PNG")
