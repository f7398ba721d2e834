"""``python -m bench sass``: compile the kernels for several GPUs without having one, and count their instructions.

One record a case, kernel and architecture. What is compiled is what the launchers launch: they run on CPU tensors while
launches are recorded in place of being executed, so the constants, types and alignments are the real ones.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..records import ROOT
from ..report import aligned

ARCHES = (80, 90, 100)
NUM_PROCESSES = 2
TIMEOUT_SECONDS = 1800

_OF_A_KERNEL = ("case", "kernel", "regs", "stack", "shared", "instr", "loop")
_OF_AN_ELEMENT = ("element", "instr", "imul", "i2f+f2i", "lop3+prmt")


def _worker(options: Namespace, shard: str) -> tuple[list[dict[str, Any]], int]:
    """The records of every so-manieth job, made where Triton compiles: its interpreter is chosen for a process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    isolated = ["-P"] if sys.flags.safe_path else []
    chosen = ["--case", *options.case, *(["--quick"] if options.quick else [])]
    command = [sys.executable, *isolated, "-m", "bench.sass", "--shard", shard, *chosen]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS
    )
    return [json.loads(line) for line in result.stdout.splitlines()], result.returncode


def _rows(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for record in records:
        each = record["per_element"]
        loop = record["loop"]
        figures = [record["registers"], record["stack"], record["shared"], record["instructions"]["total"]]
        pairs = [("total",), ("imul",), ("i2f", "f2i"), ("lop3", "prmt")]
        yield (
            record["case"],
            record["kernel"],
            *map(str, figures),
            "" if loop is None else str(loop["total"]),
            f"per {record['unit']}",
            *(f"{sum(each.get(name, 0) for name in names):.2f}" for names in pairs),
        )


def run(options: Namespace) -> int:
    """Compile, print a table and write the records to ``options.json``. The status is 1 if a case does not compile."""
    from qgnn.cli.provenance import make_stamp, now

    stamp, utc = make_stamp(torch.device("cpu")), now()
    origin = {"commit": stamp.commit, "dirty": stamp.dirty, "versions": stamp.versions, "utc": utc}
    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        shards = [f"{index}/{NUM_PROCESSES}" for index in range(NUM_PROCESSES)]
        results = list(threads.map(lambda shard: _worker(options, shard), shards))
    records = [{"suite": "sass", **record, **origin} for found, _ in results for record in found]
    records.sort(key=lambda record: record["case"])
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(aligned([(*_OF_A_KERNEL, *_OF_AN_ELEMENT), *_rows(records)]))
    return 1 if any(status for _, status in results) else 0
