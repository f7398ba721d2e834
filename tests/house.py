"""The rules of the house, read from the source: who may import whom, how long a file gets, which rooms a primitive has.

Nothing here imports the code it reads, so every rule can be tried on a copy with a planted violation.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PRIMITIVES = (
    *("quantize", "matmul", "spmm", "sddmm", "softmax", "attention", "activation", "blocks", "codes", "adjacency"),
)
# Primitives of two directions, each a function.
PAIRS = {
    "blocks": {"blocks_pack", "blocks_unpack"},
    "codes": {"codes_pack", "codes_unpack"},
    "adjacency": {"adjacency_filter", "adjacency_merge"},
}
FUSED = ("graph_linear",)  # ops of several primitives

# Lowest first. A module imports from its own floor or a lower one.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("kernels",),
    (
        "activation",
        "adjacency",
        "autocast",
        "bins",
        "memory",
        "packing",
        "rng",
        "rounding",
        "tables",
        "trace",
        "weak_cache",
    ),
    ("edge_checks",),
    ("reference",),
    ("ops",),
    ("compressed_tensor", "config", "edge_updates", "formats", "graph", "halo_graph", "layout", "qtensor"),
    ("functional",),
    ("nn", "compress", "schedule", "metrics"),
    ("convert", "data", "distributed", "cli"),
    ("", "__main__"),  # qgnn/__init__.py: the public names
)

# What a floor may import from outside, besides the standard library and torch.
OUTSIDE: dict[str, frozenset[str]] = {
    "kernels": frozenset({"triton"}),
    "tables": frozenset({"rich"}),
    "trace": frozenset({"rich"}),
    "edge_checks": frozenset({"torch_geometric"}),
    "graph": frozenset({"torch_geometric", "torch_sparse"}),
    "nn": frozenset({"torch_geometric", "torch_sparse"}),
    "compress": frozenset({"torch_geometric", "rich"}),
    "schedule": frozenset({"torch_geometric"}),
    "metrics": frozenset({"torch_geometric"}),
    "convert": frozenset({"torch_geometric", "rich"}),
    "data": frozenset({"torch_geometric", "numpy", "ogb"}),
    "distributed": frozenset({"torch_geometric", "pymetis"}),
    "cli": frozenset({"torch_geometric", "numpy", "ogb", "rich", "matplotlib", "triton", "pyarrow", "tomli"}),
}

# Heavy or optional: imported where they are used, never when a module is loaded. The kernels themselves need Triton.
LATE = frozenset({"triton", "matplotlib", "ogb", "pyarrow", "pymetis", "torch_sparse"})

MAX_LINES = 400


class Import(NamedTuple):
    """One imported module: the importer, the imported, the line, and whether it runs as the importer is loaded."""

    source: str
    target: str
    line: int
    at_load: bool
    for_typing: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Every module by its import name; the folder kernels/ is imported as qgnn.kernels."""
    found = {}
    for top, package in ((root / "qgnn", "qgnn"), (root / "kernels", "qgnn.kernels")):
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            # A folder without __init__.py holds data; a script in it (how the data was built) is nobody's import.
            if all((folder / "__init__.py").exists() for folder in path.parents if top in (folder, *folder.parents)):
                found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def room(module: str) -> str:
    """``qgnn.nn.gcn_conv`` -> ``nn``; the package itself -> ``""``."""
    return module.removeprefix("qgnn").removeprefix(".").split(".")[0]


def floor(module: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return number
    raise KeyError(f"{module} is on no floor: add it to FLOORS in tests/house.py and to CONTRIBUTING.md")


def _is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def _imports_of(name: str, path: Path, names: dict[str, Path]) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parent, base] if base else parent)
        for alias in node.names:  # a submodule, or a name of the package's own
            full = f"{base}.{alias.name}"
            yield full if full in names else base

    def walk(node: ast.AST, at_load: bool, for_typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in dict.fromkeys(targets(child)):
                    yield Import(name, target, child.lineno, at_load, for_typing)
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_load and not in_function, for_typing or _is_typing_guard(child))

    yield from walk(ast.parse(path.read_text()), at_load=True, for_typing=False)


def imports(root: Path) -> list[Import]:
    names = modules(root)
    return [found for name, path in names.items() for found in _imports_of(name, path, names)]


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "qgnn"


def upward_imports(root: Path) -> list[str]:
    """Imports from a higher floor, and imports of the kernels from anywhere but inside a function of an op."""
    wrong = []
    for found in imports(root):
        if not _is_ours(found.target):
            continue
        if floor(found.target) > floor(found.source):
            wrong.append(f"{found}, which is on a higher floor")
        elif room(found.target) == "kernels" and room(found.source) != "kernels":
            if room(found.source) != "ops":
                wrong.append(f"{found}: only ops reach the kernels")
            elif found.at_load and not found.for_typing:
                wrong.append(f"{found} at load: import kernels inside the function that launches them")
    return wrong


def outside_imports(root: Path, standard_library: frozenset[str]) -> list[str]:
    """Imports of packages that a room has no business with, or of heavy ones when a module is loaded."""
    wrong = []
    for found in imports(root):
        package, where = found.target.split(".")[0], room(found.source)
        if _is_ours(found.target) or package in standard_library or package == "torch":
            continue
        if package not in OUTSIDE.get(where, frozenset()):
            wrong.append(f"{found}: not among the packages of {where or 'qgnn/__init__.py'}")
        elif package in LATE and where != "kernels" and found.at_load and not found.for_typing:
            wrong.append(f"{found} at load: import it where it is used")
    return wrong


def cycles(root: Path) -> list[str]:
    """Import cycles between modules, imports inside functions included: a late import only hides a cycle."""
    graph: dict[str, list[str]] = {}
    for found in imports(root):
        if _is_ours(found.target) and not found.for_typing:
            graph.setdefault(found.source, []).append(found.target)
    found_cycles: list[str] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found_cycles.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in graph.get(module, ()):
                visit(target, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found_cycles


# Their results have torch's default type, which is whatever the program around has set it to ...
_OF_DEFAULT_TYPE = frozenset({"empty", "zeros", "ones", "rand", "randn", "normal", "eye", "linspace", "logspace"})
# ... and theirs if a number behind so many arguments is a fraction, or may be.
_OF_NUMBERS = {"tensor": 0, "full": 1, "where": 1}


def _written(node: ast.AST) -> Any:
    """The value that is written out there; ``None`` for a name or a call."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _is_whole(value: Any) -> bool:
    return bool(value) and all(map(_is_whole, value)) if isinstance(value, list | tuple) else isinstance(value, int)


def _has_default_type(call: ast.Call, name: str) -> bool:
    if any(keyword.arg == "dtype" for keyword in call.keywords):
        return False
    if name not in _OF_NUMBERS:
        return name in _OF_DEFAULT_TYPE
    numbers = list(map(_written, call.args[_OF_NUMBERS[name] :]))
    if name == "where" and (not numbers or None in numbers):  # a tensor decides for a number beside it
        return False
    return not all(map(_is_whole, numbers))


def default_types(root: Path) -> list[str]:
    """Calls of torch whose result has the default type. Only parameters have it, which PyG's modules make."""
    wrong = []
    for path in modules(root).values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                package, _, name = ast.unparse(node.func).rpartition(".")
                if package == "torch" and _has_default_type(node, name):
                    wrong.append(f"{path.relative_to(root)}:{node.lineno} {ast.unparse(node)}: give it a 'dtype'")
    return wrong


def long_files(root: Path) -> list[str]:
    tops = ("qgnn", "kernels", "tests", "bench")
    files = (path for top in tops for path in (root / top).rglob("*.*") if path.suffix in (".py", ".c", ".h"))
    lines = {path: path.read_text().count("\n") for path in files}
    return [f"{path.relative_to(root)} has {n} lines" for path, n in sorted(lines.items()) if n > MAX_LINES]


def _primitive(stem: str) -> str:
    """``matmul_dw`` -> ``matmul``: a large primitive may have more than one file. Fused ops keep their name."""
    return stem if stem in FUSED else stem.split("_")[0]


_SHARED_C = ("epilogue", "info")


def missing_rooms(root: Path) -> list[str]:
    """A primitive has one name everywhere: its kernel, reference function, op and tests are found by it.

    A kernel is written in Triton (``kernels/<name>.py``), in C (``kernels/cpu/<name>.c``) or in both. It may do without
    an op of its own (another op launches it), an op not without a kernel. ``epilogue.c`` serves
    several of them, and ``info.c`` tells how the rest was compiled.
    """
    in_triton = [path for path in (root / "kernels").glob("*.py") if re.search(r"def _\w+_kernel\(", path.read_text())]
    files = {
        "kernels": in_triton,
        "kernels/cpu": [
            path for path in (root / "kernels" / "cpu").glob("*.c") if path.stem not in ("epilogue", "info")
        ],
        "ops": list((root / "qgnn" / "ops").glob("[!_]*.py")),
    }
    sources = "\n".join(path.read_text() for path in (root / "qgnn" / "reference").glob("*.py"))
    definitions = set(re.findall(r"^def (\w+)\(", sources, flags=re.MULTILINE))
    names: dict[str, set[str]] = {place: set() for place in files}
    wrong = []
    for place, paths in files.items():
        for path in sorted(paths):
            name = _primitive(path.stem)
            if name in ((*PRIMITIVES, *FUSED) if place == "ops" else PRIMITIVES):
                names[place].add(name)
            else:
                wrong.append(f"{path.relative_to(root)} is named after no primitive")
        for name in sorted(names[place]):
            if not any((root / "tests" / place).glob(f"test_{name}*.py")):
                wrong.append(f"'{name}' has no tests/{place}/test_{name}.py")
    with_kernel = names["kernels"] | names["kernels/cpu"]
    wrong += [
        f"'{name}' has no function in qgnn/reference"
        for name in sorted(with_kernel)
        if not PAIRS.get(name, {name}) <= definitions
    ]
    wrong += [
        f"'{name}' has no kernels/{name}.py and no kernels/cpu/{name}.c"
        for name in sorted(names["ops"] - with_kernel - set(FUSED))
    ]
    return wrong
