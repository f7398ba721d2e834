"""The C functions that the native kernels export, as their sources declare them, and what a call may pass to them."""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_EXPORT = re.compile(r"^EXPORT\s+([^(]*?)(\w+)\s*\(([^)]*)\)", re.MULTILINE)
_ELEMENTS = {
    "float": torch.float32,
    "int8_t": torch.int8,
    "uint8_t": torch.uint8,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
}


class Prototype(NamedTuple):
    """An exported function: its file, name, result, and the type and name of each parameter."""

    file: str
    name: str
    result: str
    parameters: list[tuple[str, str]]


def _parameter(text: str) -> tuple[str, str]:
    words = re.findall(r"\w+|\*", text)
    return " ".join(word for word in words[:-1] if word not in ("const", "restrict")), words[-1]


def prototypes(folder: Path) -> dict[str, Prototype]:
    """Every exported function of the C files of a folder, by name."""
    found = [
        Prototype(path.stem, name, result.strip(), [_parameter(text) for text in parameters.split(",")])
        for path in sorted(folder.glob("*.c"))
        for result, name, parameters in _EXPORT.findall(path.read_text())
    ]
    return {prototype.name: prototype for prototype in found}


def broken_rules(prototype: Prototype) -> list[str]:
    """What keeps library.py from calling a function: it passes pointers, int64_t and float, and expects no result."""
    file, name, result, parameters = prototype
    wrong = []
    if not re.fullmatch(rf"qgnn_{file}(_\w+)?", name):
        wrong.append(f"{name} is not named after {file}.c")
    if result != "void":
        wrong.append(f"{name} returns {result}")
    for kind, parameter in parameters:
        if not kind.endswith("*") and kind not in ("int64_t", "float"):
            wrong.append(f"{name} takes the {kind} {parameter}")
    if parameters[-1] != ("int64_t", "threads"):
        wrong.append(f"{name} does not end with 'int64_t threads'")
    return wrong


def _fits(kind: str, value: Tensor | float | None) -> bool:
    if kind == "float":
        return isinstance(value, float)
    if kind == "int64_t":
        return isinstance(value, int)
    if value is None:
        return True
    element = _ELEMENTS.get(kind.removesuffix(" *"))  # void and char stand for several types
    return isinstance(value, Tensor) and value.device.type == "cpu" and element in (None, value.dtype)


def misfits(prototype: Prototype, args: tuple[Tensor | float | None, ...]) -> list[str]:
    """Arguments of a call, without the number of threads, that the function would misread."""
    parameters = prototype.parameters[:-1]
    if len(args) != len(parameters):
        return [f"{prototype.name} takes {len(parameters)} arguments (got {len(args)})"]
    return [
        f"{prototype.name} takes {name} as {kind} (got {value.dtype if isinstance(value, Tensor) else value!r})"
        for (kind, name), value in zip(parameters, args, strict=True)
        if not _fits(kind, value)
    ]
