"""From a call of a launcher to facts about the machine code of each kernel that it launches."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from qgnn.kernels import tuning
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, type_canonicalisation_dict

from . import machine_code
from .work import WORK

WARP = 32


def _record_launches(case: Callable[[], object], arch: int) -> list[tuple[JITFunction, dict[str, Any]]]:
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
            aligned &= not parameter.do_not_specialize_on_alignment
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in signature}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _inspect(cubin: bytes) -> tuple[int, int, machine_code.Code]:
    """Registers of a thread, bytes of its stack, and the code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
        listing = _output(knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2]), machine_code.parse(listing)


def compile_case(name: str, case: Callable[[], object], arch: int) -> Iterator[dict[str, Any]]:
    """One record per kernel that the case launches."""
    for kernel, kwargs in _record_launches(case, arch):
        source, options = _source(kernel, kwargs)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=options)
        registers, stack, code = _inspect(compiled.asm["cubin"])
        loop = code.hottest()
        if kernel.__name__ not in WORK:
            raise KeyError(f"{kernel.__name__} has no line in WORK of bench/sass/work.py: what is an element of it?")
        work = WORK[kernel.__name__]
        elements, threads = work.elements(kwargs), WARP * kwargs["num_warps"]
        instructions = machine_code.count(code.instructions)
        in_loop = None if loop is None else machine_code.count(loop)
        counts = in_loop if work.in_loop and in_loop is not None else instructions
        if work.trips is not None and in_loop is not None:
            counts = {kind: n + (work.trips(kwargs) - 1) * in_loop.get(kind, 0) for kind, n in instructions.items()}
        yield {
            "case": f"{name}/sm_{arch}",
            "kernel": kernel.__name__,
            "registers": registers,
            "stack": stack,
            "shared": compiled.metadata.shared,
            "threads": threads,
            "instructions": instructions,
            "loop": in_loop,
            "unit": work.unit,
            "elements": elements,
            "per_element": {kind: round(n * threads / elements, 4) for kind, n in counts.items()},
            "tiles": {key: value for key, value in kwargs.items() if key.isupper() or key.startswith("num_")},
        }
