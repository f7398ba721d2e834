"""Machine code as nvdisasm prints it: classes of instructions, and the loop in which a kernel spends its time."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LINE = re.compile(
    r"^(?P<label>\.L\w+):"
    r"|/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);",
    re.MULTILINE,
)
_TARGET = re.compile(r"`\((\.L\w+)\)")

# Instructions whose class is that of their first part.
_CLASSES = {
    "LDS": "shared_load",
    **dict.fromkeys(("STS", "STSM"), "shared_store"),
    **dict.fromkeys(("LDSM", "MOVM"), "ldmatrix"),
    **dict.fromkeys(("IMMA", "IGMMA", "UTCIMMA"), "mma_int8"),
    **dict.fromkeys(("QMMA", "QGMMA", "UTCQMMA"), "mma_fp8"),
    **dict.fromkeys(("LDL", "STL"), "local"),
    **dict.fromkeys(("SHFL", "REDUX", "CREDUX"), "shuffle"),
    **dict.fromkeys(("BAR", "WARPSYNC", "SYNCS", "DEPBAR", "MEMBAR", "FENCE"), "barrier"),
    **dict.fromkeys(("FADD", "FADD2"), "fadd"),
    **dict.fromkeys(("FMUL", "FMUL2"), "fmul"),
    **dict.fromkeys(("FFMA", "FFMA2"), "ffma"),
    **dict.fromkeys(("HADD2", "HMUL2", "HFMA2"), "half2"),
    **{name: name.lower() for name in ("I2F", "F2I", "I2FP", "PRMT", "LOP3")},
}
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_NO_PRODUCT = {"MOV", "SHL", "IADD", "X"}  # forms of IMAD that only move, shift or add


class Instruction(NamedTuple):
    name: str
    operands: str

    @property
    def kind(self) -> str:
        """Its class; ``other`` for addresses, predicates, branches and whatever else."""
        base, *parts = self.name.split(".")
        if base in ("LDG", "LDGSTS", "STG"):
            width = next((_WIDTHS[part] for part in parts if part in _WIDTHS), 32)
            return f"global_{'store' if base == 'STG' else 'load'}_b{width}"
        if base.startswith("UTMA"):
            return "global_load_bulk" if base == "UTMALDG" else "global_store_bulk"
        if base in ("HMMA", "HGMMA", "UTCHMMA"):
            return "mma_tf32" if "TF32" in parts else "mma_fp16"
        if base == "IMAD":
            is_move = not _NO_PRODUCT.isdisjoint(parts) or "RZ" in _factors(self.operands)
            return "other" if is_move else "imul"
        return _CLASSES.get(base, "other")


def _factors(operands: str) -> list[str]:
    """Both factors of an IMAD: what stands after its result, and the predicate or second register that may follow."""
    found = [operand.strip().removesuffix(".reuse") for operand in operands.split(",")]
    return [operand for operand in found[1:] if not re.fullmatch(r"!?U?P(T|\d)", operand)][:2]


class Code(NamedTuple):
    """The instructions of a kernel, and the first and last one of each loop."""

    instructions: list[Instruction]
    loops: list[tuple[int, int]]

    def hottest(self) -> Sequence[Instruction] | None:
        """The longest of the innermost loops, or ``None``. Loops that touch no global memory only wait."""
        working = [loop for loop in self.loops if any("global" in i.kind for i in self._body(loop))]

        def holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
            return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]

        innermost = [loop for loop in working if not any(holds(loop, other) for other in working)]
        return max(map(self._body, innermost), key=len, default=None)

    def _body(self, loop: tuple[int, int]) -> Sequence[Instruction]:
        return self.instructions[loop[0] : loop[1] + 1]


def parse(listing: str) -> Code:
    """Read what ``nvdisasm --print-code --no-dataflow`` prints. A loop is a branch to an earlier label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    loops: dict[int, int] = {}
    for match in _LINE.finditer(listing):
        if match["label"]:
            labels[match["label"]] = len(instructions)
            continue
        instruction = Instruction(match["name"], match["operands"])
        target = _TARGET.search(instruction.operands)
        if instruction.name.split(".")[0] == "BRA" and target and target[1] in labels:
            loops[labels[target[1]]] = len(instructions)
        instructions.append(instruction)
    return Code(instructions, sorted(loops.items()))


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by class, and their ``total`` without the fillers behind the code's end."""
    counts = Counter(instruction.kind for instruction in instructions if instruction.name != "NOP")
    return {"total": counts.total(), **dict(sorted(counts.items()))}
