"""``qgnn info``: versions, devices, and which backend serves each op and why."""

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qgnn import functional, ops
from qgnn.cli.provenance import cpu_name, versions
from qgnn.cli.train import check_writable, write_json
from qgnn.config import QConfig
from qgnn.ops._backends import c_kernels
from qgnn.trace import trace


def info(options: argparse.Namespace) -> None:
    """Run the command.

    Args:
        options: The parsed arguments.
    """
    if options.json is not None:
        check_writable("--json", Path(options.json))
    result: dict[str, Any] = {"versions": versions(), "devices": devices()}
    result |= {"c_kernels": c_kernels()[1], "ops": backends()}
    if options.json is not None:
        write_json(Path(options.json), result)

    console = Console(highlight=False)
    console.print("versions", style="bold")
    for package, version in result["versions"].items():
        console.print(f"  {package}: {version or 'not installed'}")
    console.print("devices", style="bold")
    for device in result["devices"]:
        console.print(f"  {device['device']}: {device['name']}")
    console.print("C kernels", style="bold")
    for line in describe(result["c_kernels"]):
        console.print(f"  {escape(line)}", soft_wrap=True)
    table = Table("op", "device", "backend", title="which backend serves each op", title_justify="left")
    table.add_column("why", overflow="fold")  # paths are whole
    for op, served in result["ops"].items():
        for device, entry in served.items():
            table.add_row(op, device, entry["backend"] or "none", escape(entry["why"]))
    console.print(table)


def describe(library: dict[str, Any]) -> list[str]:
    """The lines about the library of the C kernels."""
    if library["path"] is None:
        return [f"none: {library['missing']}"]
    lines = [
        f"library: {library['path']}",
        f"OpenMP: {'yes' if library['openmp'] else 'no, each call runs on one thread'}",
        f"compiled for: {'this CPU (-march=native)' if library['native'] else 'the baseline of its architecture'}",
    ]
    if library["not_kept"] is not None:
        lines.append(f"compiled anew by each process: {library['not_kept']}")
    return lines


def devices() -> list[dict[str, Any]]:
    """The CPU and every GPU that torch can use."""
    found = [{"device": "cpu", "name": f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        found.append({"device": f"cuda:{index}", "name": f"{properties.name}, {capability}, {size}"})
    return found


def backends() -> dict[str, dict[str, dict[str, Any]]]:
    """For each op and device type, the backend that serves it and why: ``{op: {device: {"backend", "why"}}}``.

    Found by running a tiny layer forward and backward on each device, not by looking at settings.
    """
    served: dict[str, dict[str, dict[str, Any]]] = {}
    compiled, library = c_kernels()
    reason = "C kernels, compiled at the first call" if compiled else "plain PyTorch"
    detail = library["path"] or library["missing"]
    for op, backend in probe("cpu").items():
        served[op] = {"cpu": {"backend": backend, "why": f"{reason}: {' '.join(detail.split())[:300]}"}}
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        for op in served:
            served[op]["cuda"] = {"backend": None, "why": why}
        return served
    why, found = "kernels compiled by Triton at the first call", {}
    if importlib.util.find_spec("triton") is None:
        why = "Triton is not installed: pip install triton"
    else:
        try:
            found = probe("cuda")
        except Exception as error:
            why = f"the probe failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    for op in served:
        served[op]["cuda"] = {"backend": found.get(op), "why": why}
    return served


def probe(device: str) -> dict[str, str]:
    """Run each op once on a graph of four nodes, and see from the trace which backend served it."""
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device=device)
    x = torch.ones(4, 16, dtype=torch.float32, device=device, requires_grad=True)
    weight = torch.ones(16, 16, dtype=torch.float32, device=device, requires_grad=True)
    edge_weight = torch.ones(4, dtype=torch.float32, device=device, requires_grad=True)
    with trace(error=False) as record:
        functional.quantize(x.detach(), QConfig())
        functional.graph_linear(edge_index, x, weight, edge_weight=edge_weight, config=QConfig()).sum().backward()
        functional.edge_softmax(edge_index, edge_weight.detach())
        rows, scores = x.detach().unsqueeze(1), torch.ones(4, 1, dtype=torch.float32, device=device)
        functional.attention(edge_index, rows, scores, scores, config=QConfig())
        ops.blocks_pack(x.detach(), None, 2, 64, torch.float32, None, 0, None)
    return {name.partition(".")[0]: op["backend"] for name, op in record.ops.items()}
