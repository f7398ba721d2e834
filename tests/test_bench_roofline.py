"""The roofline model: bytes counted by hand, bytes that a trace reports, and an order that no sum may break."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import qgnn
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
main = importlib.import_module("bench.__main__")
roofline = importlib.import_module("bench.roofline")
steps = importlib.import_module("bench.steps")

N, E, K, M = 40, 160, 24, 12


# Names of the model's passes that a trace shows as others: a product that rounds its operand first is two primitives.
PRODUCT = {"quantize_matmul.forward": "matmul.forward", "quantize_grad.backward": "quantize.backward"}


def traced(needs_dx: bool) -> dict[str, int]:
    """Bytes of a layer's primitives, forward and backward, as the ops reported them."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(N, (2, E), generator=generator)
    graph = qgnn.Graph.from_edge_index(edge_index, N, torch.rand(E, generator=generator))
    x = torch.randn(N, K, generator=generator, requires_grad=needs_dx)
    weight, bias = torch.randn(M, K, requires_grad=True), torch.randn(M, requires_grad=True)
    config = qgnn.QConfig()
    features = x if needs_dx else qgnn.functional.quantize(x, config)
    epilogue = {"activation": "relu", "dropout": 0.5}
    with qgnn.trace(error=False) as record:
        qgnn.functional.graph_linear(graph, features, weight, bias, config=config, **epilogue).sum().backward()
    return {name: op["bytes"] for name, op in record.ops.items()}


@pytest.mark.parametrize("needs_dx", [True, False], ids=["inner", "first"])
def test_bytes_of_primitives_are_those_of_a_trace(needs_dx: bool) -> None:
    modeled: dict[str, int] = {}
    for step in steps.gcn_fused(N, E, K, M, needs_dx=needs_dx):
        name = PRODUCT.get(step.name, step.name)
        modeled[name] = modeled.get(name, 0) + step.traffic.bytes
    seen = traced(needs_dx)
    if needs_dx:  # in the model the product holds what the trace shows of the rounding of its rows
        rounding = roofline.quantize(N, K).bytes
        seen["quantize.forward"] -= rounding
        seen["matmul.forward"] += rounding
    assert modeled == seen


def test_bytes_of_other_primitives_are_those_of_a_trace() -> None:
    edge_index = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(1))
    x, config = torch.randn(N, K), qgnn.QConfig()
    codes = qgnn.functional.quantize(x, config)
    with qgnn.trace(error=False) as record:
        qgnn.functional.sddmm(qgnn.Graph.from_edge_index(edge_index, N), codes, codes, config=config)
        qgnn.functional.linear(codes, torch.randn(M, K), torch.randn(M), config=config)
    assert record.ops["sddmm.forward"]["bytes"] == roofline.sddmm(N, E, K).bytes
    assert record.ops["matmul.forward"]["bytes"] == roofline.matmul(N, K, M).bytes


@pytest.mark.parametrize("config", [None, qgnn.QConfig()])
def test_bytes_of_attention_are_those_of_a_trace(config: qgnn.QConfig | None) -> None:
    """What the two passes backward hand to each other is no operand of the primitive; the rows, both scores and their
    scales are read by both of them, and a trace, which has them once, shows the transposed graph and its order."""
    H, itemsize = 3, 4 if config is None else 1
    edge_index = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(1))
    x, source, target = (torch.randn(N, *s, requires_grad=True) for s in ((H, M // H), (H,), (H,)))
    with qgnn.trace(error=False) as record:
        qgnn.functional.attention(edge_index, x, source, target, config=config).sum().backward()
    assert record.ops["attention.forward"]["bytes"] == roofline.attention(N, E, M, H, itemsize).bytes
    passes = (make(N, E, M, H, itemsize).bytes for make in (roofline.attention_targets, roofline.attention_sources))
    heads = 4 * N * H
    between = 2 * (N * M + 4 * heads if config else 3 * heads) + (0 if config else 4 * N * M)
    twice = N * M * itemsize + heads + (heads if config else 0)
    assert record.ops["attention.backward"]["bytes"] == sum(passes) - between - twice + 4 * E


def test_bytes_counted_by_hand() -> None:
    """10 nodes, 30 edges, 8 inputs, 16 outputs, in bytes."""
    assert roofline.quantize(10, 8) == (320 + 80 + 40 + 8, 0, 0, "tf32")
    assert roofline.quantize_grad(10, 16) == (640 + 160 + 40 + 8 + 20 + 64, 0, 0, "tf32")
    assert roofline.linear(10, 8, 16) == (320 + 512 + 640 + 64, 0, 2560, "tf32")
    assert roofline.matmul_requantize(10, 8, 16) == (80 + 40 + 128 + 64 + 160 + 40 + 8, 0, 2560, "int8")
    assert roofline.quantize_matmul(10, 8, 16) == (320 + 80 + 40 + 128 + 64 + 160 + 40 + 8, 0, 2560, "int8")
    assert roofline.matmul_dw(10, 8, 16) == (160 + 40 + 80 + 40 + 512, 0, 2560, "fp16")
    structure = 4 * 11 + 30 * 4 + 30 * 4
    # An edge: a sector for the row, one for its scale, index and weight. Rows of 48 codes take two sectors.
    assert roofline.spmm(10, 30, 16) == (structure + 160 + 40 + 640, 30 * (32 + 32 + 8) + 640, 0, "tf32")
    assert roofline.spmm(10, 30, 48, bias=True, mask=True).bytes == structure + 480 + 40 + 1920 + 192 + 60
    assert roofline.spmm(10, 30, 48).gathered == 30 * (64 + 32 + 8) + 1920
    assert roofline.spmm(10, 30, 16, 4) == (structure + 640 + 640, 30 * (64 + 8) + 640, 0, "tf32")
    assert roofline.spmm(10, 30, 16, requantize=True).bytes == structure + 160 + 40 + 160 + 40 + 8


def test_a_floor_is_the_longest_of_its_times() -> None:
    machine = roofline.Machine(1e12 / roofline.MEMORY_SHARE, 2e12, {"int8": 1e12 / roofline.PRODUCT_SHARE})
    assert roofline.Traffic(3_000_000, 1_000_000, 1_000_000, "int8").floor_us(machine) == pytest.approx(3)
    assert roofline.Traffic(1_000_000, 8_000_000, 1_000_000, "int8").floor_us(machine) == pytest.approx(4)
    assert roofline.Traffic(1_000_000, 1_000_000, 5_000_000, "int8").floor_us(machine) == pytest.approx(5)


def test_fusing_moves_fewer_bytes_and_has_a_lower_floor() -> None:
    cases = dict(steps.cases())
    compared = [case.removesuffix("/fused") for case in cases if case.endswith("/fused")]
    assert len(compared) == 20  # a layer and a model of both kinds on each of five graphs
    for case in compared:
        eager, unfused, fused = (cases[f"{case}/{way}"] for way in steps.WAYS)
        assert steps.total_bytes(fused) < steps.total_bytes(unfused) < steps.total_bytes(eager), case
        for machine in roofline.MACHINES:
            floors = [steps.floors_us(way)[machine] for way in (fused, unfused, eager)]
            assert floors == sorted(floors), case


def test_the_table_of_a_layer_counts_every_pass_once() -> None:
    cases = dict(steps.cases())
    header, *rows, last = steps.by_purpose(cases)
    assert header[1:4] == ("eager MB", "unfused MB", "fused MB")
    for column, way in enumerate(steps.WAYS, 1):
        layer = cases[f"{steps.LAYER}/{way}"]
        assert float(last[column]) == pytest.approx(steps.total_bytes(layer) / 1e6, abs=0.05)
        assert float(last[column + 3]) == pytest.approx(steps.floors_us(layer)["H100"], abs=0.05)
        assert sum(float(row[column]) for row in rows) == pytest.approx(float(last[column]), abs=0.05 * len(rows))


def test_the_command_prints_and_writes_what_the_model_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main.main(["roofline", "--json", str(tmp_path / "roofline.jsonl")]) == 0
    printed = capsys.readouterr().out
    written = [json.loads(line) for line in (tmp_path / "roofline.jsonl").read_text().splitlines()]
    for way in steps.WAYS:
        case = f"arxiv/gcn-layer/256/{way}"
        found = [record for record in written if record["case"] == case]
        assert [record["step"] for record in found] == [step.name for step in dict(steps.cases())[case]]
        total_us = sum(record["floor_us"]["H100"] for record in found)
        line = next(line for line in printed.splitlines() if line.startswith(f"{case} ") and len(line) > len(case) + 2)
        assert float(line.split()[4]) == pytest.approx(total_us, rel=1e-3)  # four digits
