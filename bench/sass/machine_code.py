"""Machine code as nvdisasm prints it: classes of instructions, and the loop in which a kernel spends its time."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_LINE = re.compile(
    r"^(?P<label>\.L\w+):"
    r"|/\*[0-9a-f]{4,5}\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);",
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
    is_predicated: bool = False

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


class Code:
    """The instructions of a kernel that a usual run comes by, and its loops.

    Left out are what only a diverged warp executes, and the subroutines of divisions with a subnormal operand.
    """

    def __init__(self, instructions: Sequence[Instruction], labels: dict[str, int]) -> None:
        self._instructions = instructions
        self._successors = [list(_successors(i, instruction, labels)) for i, instruction in enumerate(instructions)]
        self._reached, self._back_edges = self._walk()
        if not any(instruction.name.startswith("EXIT") for instruction in self.instructions):
            raise ValueError("no path leads to the end of the kernel: its control flow was misread")

    @property
    def instructions(self) -> list[Instruction]:
        return [self._instructions[i] for i in sorted(self._reached)]

    def hottest(self) -> list[Instruction] | None:
        """The longest of the innermost loops, or ``None``. Loops that touch no global memory only wait."""
        loops = [self._loop(header, sources) for header, sources in self._back_edges.items()]
        working = [loop for loop in loops if any("global" in self._instructions[i].kind for i in loop)]
        innermost = [loop for loop in working if not any(other < loop for other in working)]
        longest = max(innermost, key=lambda loop: len(loop), default=None)
        return None if longest is None else [self._instructions[i] for i in sorted(longest)]

    def _walk(self) -> tuple[set[int], dict[int, list[int]]]:
        """What can be reached, and the edges that lead back to where the walk came from: {first of a loop: lasts}."""
        reached, path, back_edges = {0}, {0}, defaultdict(list)
        stack = [(0, iter(self._successors[0]))]
        while stack:
            i, successors = stack[-1]
            following = next(successors, None)
            if following is None:
                path.discard(i)
                stack.pop()
            elif following in path:
                back_edges[following].append(i)
            elif following not in reached:
                reached.add(following)
                path.add(following)
                stack.append((following, iter(self._successors[following])))
        return reached, dict(back_edges)

    def _loop(self, header: int, sources: Sequence[int]) -> set[int]:
        """The natural loop: whatever leads to one of ``sources`` without passing ``header``."""
        predecessors = defaultdict(list)
        for i in self._reached:
            for following in self._successors[i]:
                predecessors[following].append(i)
        loop, pending = {header}, list(sources)
        while pending:
            i = pending.pop()
            if i not in loop:
                loop.add(i)
                pending += predecessors[i]
        return loop


def _successors(i: int, instruction: Instruction, labels: dict[str, int]) -> Iterator[int]:
    base, *parts = instruction.name.split(".")
    target = _TARGET.search(instruction.operands)
    ends = base in ("EXIT", "RET") or (base == "BRA" and instruction.operands.strip().startswith("`"))
    if instruction.is_predicated or not ends:
        yield i + 1
    if base in ("BRA", "CALL") and target and "DIV" not in parts:  # a call of a local label is a far jump
        yield labels[target[1]]


def parse(listing: str) -> Code:
    """Read what ``nvdisasm --print-code --no-dataflow`` prints."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for match in _LINE.finditer(listing):
        if match["label"]:
            labels[match["label"]] = len(instructions)
        else:
            instructions.append(Instruction(match["name"], match["operands"], match["predicate"] is not None))
    return Code(instructions, labels)


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by class, and their ``total``."""
    counts = Counter(instruction.kind for instruction in instructions)
    return {"total": counts.total(), **dict(sorted(counts.items()))}
