"""Bytes and the gradient's variance under the compressor, other ways to keep an operand, and the tables of both."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qgnn
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
blocksize = importlib.import_module("bench.suites.blocksize")
compression = importlib.import_module("bench.compression")
harness = importlib.import_module("bench.harness")
inputs = importlib.import_module("bench.suites.inputs")
masks = importlib.import_module("bench.suites.masks")
provenance = importlib.import_module("qgnn.cli.provenance")
pages = importlib.import_module("bench.pages")
records = importlib.import_module("bench.records")
rivals = importlib.import_module("bench.suites.rivals")
sage = importlib.import_module("bench.suites.sage")
summary = importlib.import_module("bench.summary")

QUICK = inputs.Setting(torch.device("cpu"), quick=True)


@pytest.fixture(scope="module")
def problem() -> Any:
    return sage.Problem(QUICK)


def work(problem: Any, name: str) -> Any:
    (provider,) = (p for p in problem.providers() if p.name == name)
    return provider.setup()


def test_bytes_are_those_of_the_format(problem: Any) -> None:
    """Five operands of 16 columns, two inputs of batch norm, two means and deviations each, four masks; a pair of bf16
    numbers a row and tensor, and a seed a projection."""
    N = problem.num_nodes
    found = work(problem, "qgnn pyg csr int2-rp8 rows1").metrics()
    one_bit = {"relu": N * 128 // 8, "dropout": -(-N * 128 // 65536) * (8192 + 8)}
    expected = 5 * (N * (16 // 4 + 4) + 8) + 2 * (N * (128 // 4 + 4) + 2 * 128 * 4) + 2 * sum(one_bit.values())
    assert found["published_mib"] * 2**20 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["qgnn pyg csr int2-rp8 rows1", "qgnn pyg coo int1-rp4 G192 redrawn"])
def test_kept_bytes_are_counted_twice(problem: Any, name: str) -> None:
    """By the report, and by what lives after a forward pass and did not before."""
    found = work(problem, name)
    assert found.kept_mib() == pytest.approx(found.metrics()["report_mib"], rel=2e-3)


def test_the_gate_sees_a_forward_pass_or_a_gradient_that_is_off(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qgnn pyg csr int2"
    reference = problem.exact()
    (provider,) = (p for p in problem.providers() if p.name == name)
    assert harness.relative_error(provider.setup().check(), reference) <= provider.tolerance
    real = qgnn.functional.decompress
    monkeypatch.setattr("qgnn.compress.recorder.decompress", lambda c: 0.5 * real(c))
    assert harness.relative_error(provider.setup().check(), reference) > provider.tolerance
    with pytest.raises(ValueError, match="the forward pass is off by a relative"):
        sage.check_equal(torch.ones(3), torch.tensor([1.0, 1.0, 1.0 + 2**-23]))


def test_the_variance_is_that_of_the_projection(problem: Any) -> None:
    """Errors of rows are independent, and that of a row x is (F - 1) / R' |x|^2: of the gradient of a weight behind a
    projection it is (F - 1) / R' times the sum over rows of |x|^2 |g|^2. 8 bits add nothing."""
    variance = sage.Variance(
        problem,
        problem.model,
        qgnn.compress_activations(bits=8, projection=8, exclude=("batch_norm", "cross_entropy")),
        problem.csr(),
        is_exact=True,
        num_seeds=12,
    )
    variance.check()
    model, rows = masks.same_masks(problem.model()), []

    def note(_: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        rows.append((args[0].detach(), out))

    for name, module in model.named_modules():
        if name.endswith(("lin_l", "lin_r")) and name != "convs.0.lin_r":
            module.register_forward_hook(note)
    problem.loss(model(problem.x, problem.csr())).backward()
    errors = sum(float((x.square().sum(1) * out.grad.square().sum(1)).sum()) for x, out in rows)
    norm = sum(float(p.grad.square().sum()) for p in model.parameters())
    found = variance.metrics()
    assert len(rows) == 5
    assert found["variance"] == pytest.approx(127 / 16 * errors / norm, abs=5 * found["variance_error"])


def test_checkpoints_compute_the_same_and_keep_less(problem: Any) -> None:
    plain, checkpointed = (work(problem, f"pyg csr {name}fp32") for name in ("", "checkpoint "))
    for a, b in zip(plain.check(), checkpointed.check(), strict=True):
        assert harness.relative_error([a], [b]) < 1e-5
    assert checkpointed.kept_mib() < plain.kept_mib() / 3


def test_masks_that_keep_too_many_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(200, 200)
    drawn = masks.Masks()
    y = drawn(x)
    assert torch.equal(masks.Given(drawn.kept)(x), y)
    monkeypatch.setattr(masks.F, "dropout", lambda x, p: x)
    with pytest.raises(ValueError, match=r"dropout keeps 1\.0000"):
        drawn(x)


def test_codecs_keep_as_much_as_they_may() -> None:
    x = torch.randn(300, 64)
    bits = 2.125
    budget = bits * x.numel() / 8
    pruned, factors, narrow = rivals.top_k(x, bits), rivals.low_rank(x, bits), rivals.bf16(x)
    assert 0.95 * budget < pruned.num_bytes <= budget
    assert 0.8 * budget < factors.num_bytes <= budget
    assert narrow.num_bytes == 2 * x.numel()
    restored = pruned.restore()
    kept = restored != 0
    assert x.abs()[kept].min() >= x.abs()[~kept].max()
    assert torch.equal(restored[kept], x.bfloat16().float()[kept])
    assert rivals.top_k(x, 0.3).num_bytes <= 0.3 * x.numel() / 8  # without room for a bit a value
    flat = torch.randn(300, 3) @ torch.randn(3, 64)
    assert float((rivals.low_rank(flat, 2.0).restore() - flat).norm() / flat.norm()) < 0.01
    assert torch.equal(narrow.restore(), x.bfloat16().float())


def test_a_codec_stands_for_operands_of_products_alone() -> None:
    x, w = torch.randn(100, 32), torch.randn(48, 32, requires_grad=True)
    hidden, mean = (x.requires_grad_() * 1).relu(), torch.ones(64, 100) @ x.detach()

    def codec(t: Tensor) -> Any:
        return rivals.Coded(7, lambda: torch.zeros_like(t))

    with rivals.operands_in(codec, x) as sizes:
        loss = F.linear(hidden, w).tanh().sum() + hidden.square().sum()
        F.linear(mean, w), F.linear(x.detach(), w)
    found = torch.autograd.grad(loss, (w, x), retain_graph=True)
    assert sizes == [7, 7]
    assert not found[0].any()
    exact = torch.autograd.grad(F.linear(hidden, w).tanh().sum() + hidden.square().sum(), x)
    assert torch.equal(found[1], exact[0])


def test_variance_and_bias_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4000, generator=generator)
    noise = torch.randn(16, 4000, generator=generator)
    passes = blocksize.Passes(exact, list(exact + 0.5 * noise), [1.0], 0.0).metrics(exact)
    assert passes["variance"] == pytest.approx(0.25, rel=0.05)
    assert passes["bias"] < 0.003
    shifted = blocksize.Passes(exact, list(1.2 * exact + 0.5 * noise), [1.0], 0.0).metrics(exact)
    assert shifted["variance"] == pytest.approx(0.25, rel=0.05)
    assert shifted["bias"] == pytest.approx(0.04, rel=0.2)
    assert blocksize.Passes(exact, [0 * exact], [1.0], 0.0).metrics(exact) == {"variance": 0.0, "bias": 1.0}


@pytest.mark.parametrize("kind", blocksize.KINDS)
def test_operands_are_kept_at_equal_bytes(kind: str) -> None:
    problem = blocksize.Problem("wordnet", kind, QUICK)
    how = blocksize.OPERANDS["int2"]
    ours, pruned = problem.measure_operands(how), problem.measure_rival(rivals.top_k, how)
    assert pruned.saved_mib == pytest.approx(ours.saved_mib, rel=0.1)
    assert ours.metrics["bias"] < ours.metrics["variance"] / 4
    assert pruned.metrics["variance"] == 0 < pruned.metrics["bias"]
    nothing = problem.measure_checkpoint()
    assert nothing.saved_mib == 0
    assert nothing.metrics["bias"] < 1e-9


def record(suite: str, case: str, provider: str, saved: float, **metrics: Any) -> dict[str, Any]:
    stamp = provenance.Stamp("Some CPU", "0123456789abcdef", False, {"torch": "2.0"})
    values = {"suite": suite, "case": case, "provider": provider, "pass": "step", "bytes": None, "error": 0.0}
    values |= dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), 5.0)
    utc = "2026-01-02T00:00:00+00:00"
    return records.make_record(stamp, utc, **values, ok=True, peak_mib=100.0, saved_mib=saved, metrics=metrics)


def cells(text: str, word: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if word in line]


def test_tables_say_what_records_say(tmp_path: Path) -> None:
    case = "arxiv/synthetic/sage/128-128-128-40"
    step = [
        record(
            "memory", case, "qgnn pyg csr int2-rp8 rows4", 30.0, published_mib=25.0, variance=7.5, variance_error=0.25
        ),
        record("memory", case, "pyg csr fp32", 900.0),
    ]
    path = tmp_path / "results" / "some-cpu"
    records.append(path / "memory.jsonl", step)
    timed = [record("overhead", case, name, 0.0) for name in ("qgnn pyg csr int2", "pyg csr fp32")]
    timed[0]["median_ms"] = 6.0
    records.append(path / "overhead.jsonl", timed)
    how = {"variance_error": 0.1, "values": 1 << 20, "predicted_block": 128, "measured_block": 512}
    lengths = {8: (4.0, 4.0), 128: (2.0, 5.0), 2048: (1.9, 9.0)}
    for name, factor in (("int2-rp8", 1.0), ("int1", 0.125)):
        made = [
            record(
                "blocksize", f"g/gcn/{name}", f"qgnn G{size}", mib, block_size=size, variance=factor * variance, **how
            )
            for size, (mib, variance) in lengths.items()
        ]
        records.append(path / "blocksize.jsonl", made)
    row = record("blocksize", "g/gcn/int2-rp8", "qgnn rows1", 4.5, block_rows=1, variance=4.0, **how)
    records.append(path / "blocksize.jsonl", [row])
    rivals_of = {"qgnn int2": (0.5, 0.0), **dict.fromkeys(compression.RIVALS, (0.0, 0.25))}
    operands = [
        record("blocksize", "g/gcn/operands/int2", name, 0.5, variance=variance, bias=bias)
        for name, (variance, bias) in rivals_of.items()
    ]
    records.append(path / "blocksize.jsonl", operands)
    found = dict(pages.regions(tmp_path / "results"))
    assert cells(found["compress"], "26.60") == [["4", "26.60", "25.00", "30.00", "7.5 ± 0.2"]]
    plain, times = cells(found["compress"], "| pyg csr fp32 |")
    assert plain == ["pyg csr fp32", "900.0", "943.7", "100", "0"]
    assert [times, *cells(found["compress"], "| qgnn pyg csr int2 |")] == [
        ["pyg csr fp32", "5", "1.00"],
        ["qgnn pyg csr int2", "6", "1.20"],
    ]
    by_length = ["4", "5", "9", "", "4.00", "", "128", "128", "512"]
    assert cells(found["blocksize"], "| g/gcn | int2-rp8 |") == [["g/gcn", "int2-rp8", *by_length]]
    (line,) = cells(found["blocksize"], "| 4.50 |")
    assert line == ["g/gcn", "4.50", "4 ± 0.1", "int1", "8", "4.00", "0.5 ± 0.1", "8"]
    assert cells(found["blocksize"], "| g/gcn | int2 | 512 |") == [
        ["g/gcn", "int2", "512", "0.5", *["0.25"] * 3, *["5"] * 5]
    ]
    assert "/sage/" not in summary.region(tmp_path / "results")


def test_rows_are_those_of_what_is_coded() -> None:
    x, w = torch.randn(100, 64), torch.randn(32, 64, requires_grad=True)

    def formats(**how: Any) -> list[str]:
        with qgnn.compress_activations(2, min_size=1, **how) as report:
            hidden: Tensor = F.linear(x.clone().requires_grad_() * 1, w)
            (hidden * (hidden + 1)).sum().backward()
        return [t.format for t in report.by_tensor if "int2" in t.format]

    assert formats(block_rows=3) == ["int2-g192", "int2-g96", "int2-g96"]
    assert formats(block_rows=3, projection=8) == ["int2-rp8-g24", "int2-g96", "int2-g96"]
    assert formats(block_rows=1 << 20) == ["int2-g65536"] * 3
    for how in ({"block_rows": 0}, {"block_rows": 1, "block_size": 64}):
        with pytest.raises(ValueError, match="expects 'block_rows' of at least 1, and no 'block_size' beside it"):
            qgnn.compress_activations(**how)
