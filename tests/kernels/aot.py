"""Compile the kernels for several GPUs without having one, and report what the machine code looks like.

    python aot.py [--arch 80 90 100] [--case PREFIX] [--shard 0/2]

Prints one JSON line per kernel and architecture: registers, bytes of stack, shared memory and instruction counts.
What is compiled is what the launchers launch: they run here on CPU tensors while launches are recorded in place of
being executed, so the constants, types and alignments are the real ones. Needs a process of its own, without
TRITON_INTERPRET."""

import argparse
import collections
import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from qgnn.kernels import tuning
from qgnn.kernels.matmul import matmul, matmul_dw, matmul_requantize
from qgnn.kernels.memory import empty_codes
from qgnn.kernels.quantize import quantize
from qgnn.kernels.sddmm import sddmm
from qgnn.kernels.spmm import spmm, spmm_extremum, spmm_requantize
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, type_canonicalisation_dict

from qgnn.activation import Activation, mask_width

NUM_NODES = 4096
MEAN_DEGREE = 14

SEED = torch.zeros(1, dtype=torch.int64)
INDPTR = torch.empty(NUM_NODES + 1, dtype=torch.int32)
INDEX = torch.empty(NUM_NODES * MEAN_DEGREE, dtype=torch.int32)
WEIGHT = torch.empty(NUM_NODES * MEAN_DEGREE)
HEAD_WEIGHT = torch.empty(NUM_NODES * MEAN_DEGREE, 4)
SCALE = torch.empty(NUM_NODES)


def _codes(width: int, rows: int = NUM_NODES) -> torch.Tensor:
    return empty_codes(rows, width, torch.device("cpu"))


def _rows(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros((NUM_NODES, width), dtype=dtype)


def _product(function: Callable[..., Any], num_inputs: int, num_outputs: int, **kwargs: Any) -> Callable[[], Any]:
    weight = _codes(num_inputs, num_outputs)
    return lambda: function(_codes(num_inputs), SCALE, weight, torch.empty(num_outputs), **kwargs)


def _activation(width: int) -> Activation:
    mask = torch.empty(NUM_NODES, mask_width(width), dtype=torch.uint8)
    return Activation(relu=True, threshold=1 << 15, seed=SEED, stream=1, mask=mask)


_int8_spmm = functools.partial(spmm, INDPTR, INDEX, weight=WEIGHT, x_scale=SCALE)

CASES: dict[str, Callable[[], Any]] = {
    "quantize/fp32/F128": lambda: quantize(_rows(128), seed=SEED),
    "quantize/fp32/F128/column_major": lambda: quantize(torch.zeros(128, NUM_NODES).t(), seed=SEED),
    "quantize/bf16/F256/nearest": lambda: quantize(_rows(256, torch.bfloat16)),
    "quantize/fp32/F100": lambda: quantize(_rows(100), seed=SEED),
    "quantize/fp32/F1433/two_passes": lambda: quantize(_rows(1433), seed=SEED),
    "quantize/fp32/F256/block": lambda: quantize(_rows(256), granularity="block", seed=SEED),
    "quantize/fp32/F256/tensor": lambda: quantize(_rows(256), granularity="tensor", seed=SEED),
    "matmul/fp32/K128/M256": _product(matmul, 128, 256),
    "matmul/bf16/K256/M128/bias": _product(matmul, 256, 128, bias=torch.empty(128), out_dtype=torch.bfloat16),
    "matmul/fp32/K100/M47": _product(matmul, 100, 47),
    "matmul_requantize/K128/M256": _product(matmul_requantize, 128, 256, seed=SEED),
    "matmul_requantize/K256/M64": _product(matmul_requantize, 256, 64, seed=SEED),
    "matmul_dw/K128/M256": lambda: matmul_dw(_codes(256), SCALE, _codes(128), SCALE),
    "matmul_dw/K100/M47": lambda: matmul_dw(_codes(47), SCALE, _codes(100), SCALE),
    "spmm/int8/F16": lambda: _int8_spmm(_codes(16)),
    "spmm/int8/F64": lambda: _int8_spmm(_codes(64)),
    "spmm/int8/F128": lambda: _int8_spmm(_codes(128)),
    "spmm/int8/F256/epilogue": lambda: _int8_spmm(
        _codes(256), row_factor=SCALE, bias=torch.empty(256), activation=_activation(256)
    ),
    "spmm/int8/F100": lambda: _int8_spmm(_codes(100)),
    "spmm/int8/F602": lambda: _int8_spmm(_codes(602)),
    "spmm/int8/F256/H4": lambda: spmm(INDPTR, INDEX, _codes(256), weight=HEAD_WEIGHT, x_scale=SCALE),
    "spmm/int8/F256/int64": lambda: spmm(INDPTR.long(), INDEX.long(), _codes(256), x_scale=SCALE),
    "spmm/fp32/F128": lambda: spmm(INDPTR, INDEX, _rows(128), weight=WEIGHT),
    "spmm/fp32/F128/H4": lambda: spmm(INDPTR, INDEX, _rows(128), weight=HEAD_WEIGHT),
    "spmm/bf16/F128/epilogue": lambda: spmm(
        INDPTR, INDEX, _rows(128, torch.bfloat16), weight=WEIGHT, bias=torch.empty(128), activation=_activation(128)
    ),
    "spmm_requantize/F256": lambda: spmm_requantize(
        INDPTR, INDEX, _codes(256), weight=WEIGHT, x_scale=SCALE, row_factor=SCALE, seed=SEED
    ),
    "spmm_requantize/F512": lambda: spmm_requantize(INDPTR, INDEX, _codes(512), x_scale=SCALE, seed=SEED),
    "spmm_requantize/fp32/F256": lambda: spmm_requantize(INDPTR, INDEX, _rows(256), weight=WEIGHT, seed=SEED),
    "spmm_extremum/fp32/F128": lambda: spmm_extremum(INDPTR, INDEX, _rows(128), weight=WEIGHT),
    "spmm_extremum/int8/F64": lambda: spmm_extremum(INDPTR, INDEX, _codes(64), x_scale=SCALE, largest=False),
    "sddmm/int8/F128": lambda: sddmm(INDPTR, INDEX, _codes(128), _codes(128), target_scale=SCALE, source_scale=SCALE),
    "sddmm/int8/F602": lambda: sddmm(INDPTR, INDEX, _codes(602), _codes(602), target_scale=SCALE, source_scale=SCALE),
    "sddmm/fp32/F128": lambda: sddmm(INDPTR, INDEX, _rows(128), _rows(128)),
}

ARCHES = (80, 90, 100)
# What most models spend their time in is compiled for every architecture, the variants of it for one.
MAIN_CASES = {
    "quantize/fp32/F128",
    "matmul/fp32/K128/M256",
    "matmul_requantize/K128/M256",
    "matmul_dw/K128/M256",
    "spmm/int8/F256/epilogue",
    "spmm_requantize/F256",
    "spmm_extremum/fp32/F128",
    "sddmm/int8/F128",
}


def _record_launches(case: Callable[[], Any], arch: int) -> list[tuple[JITFunction, dict[str, Any]]]:
    """The kernels that a launcher starts for ``arch``, with their keyword arguments."""
    launches: list[tuple[JITFunction, dict[str, Any]]] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not args, "launchers pass every argument by keyword"
        launches.append((kernel, kwargs))

    run, architecture = JITFunction.run, tuning.architecture
    JITFunction.run, tuning.architecture = record, lambda device: arch
    try:
        case()
    finally:
        JITFunction.run, tuning.architecture = run, architecture
    return launches


def _source(kernel: JITFunction, kwargs: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """The specialization that Triton derives from these arguments, and the launch options among them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, parameter in enumerate(kernel.params):
        name, value = parameter.name, kwargs[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in signature}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _inspect(cubin: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
        sass = _output(knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", path)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    instructions = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass)
    return {"registers": int(registers), "stack": int(stack), "instructions": collections.Counter(instructions)}


def compile_case(name: str, arch: int) -> Iterator[dict[str, Any]]:
    """One record per kernel that the case launches."""
    for kernel, kwargs in _record_launches(CASES[name], arch):
        source, options = _source(kernel, kwargs)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        facts = {"kernel": kernel.__name__, "shared": compiled.metadata.shared, **_inspect(compiled.asm["cubin"])}
        yield {"case": name, "arch": arch, **facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", help="default: all for the main cases, 90 for the others")
    parser.add_argument("--shard", default="0/1", help="compile every n-th case only: INDEX/COUNT")
    parser.add_argument("--case", default="", help="compile only cases whose name starts so")
    arguments = parser.parse_args()
    index, count = map(int, arguments.shard.split("/"))
    jobs = [
        (name, arch)
        for name in CASES
        if name.startswith(arguments.case)
        for arch in arguments.arch or (ARCHES if name in MAIN_CASES else (90,))
    ]
    for name, arch in jobs[index::count]:
        for record in compile_case(name, arch):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
