"""The pages of docs/ name all that is public and nothing that does not exist, and public docstrings tell of every
parameter. Building the site, which .ci/run does, finds broken markup and references; nothing is built here."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import qgnn
from house import PRIMITIVES, ROOT
from qgnn.cli.args import build_parser

DOCS = ROOT / "docs"
# Modules whose names are not for users: the command, which has options for names, the device code, and the operators
# behind qgnn.functional.
INTERNAL = ("qgnn.__main__", "qgnn.cli", "qgnn.kernels", "qgnn.ops")

SECTIONS = ["What it computes", "Numerics", "Cost", "Shapes", "Backends", "Bad input", "Source", "Definition"]

_DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: (\S+)$")
_NAME = re.compile(r"`~?(qgnn(?:\.\w+)+)")
_PATH = re.compile(r"`((?:qgnn|kernels|bench|tests|examples|notebooks)/[\w./*]*)`")
_IMAGE = re.compile(r"^!\[.+\]\((?:\.\./|docs/)images/(\S+)\)$", re.MULTILINE)
_INCLUDE = re.compile(r"^:(?:start-after|end-before): (.+)$", re.MULTILINE)


def pages(docs: Path) -> dict[str, str]:
    return {
        path.relative_to(docs).as_posix(): path.read_text()
        for path in sorted(docs.rglob("*"))
        if path.suffix in (".md", ".rst")
    }


def directives(text: str) -> Iterator[tuple[str, str]]:
    """Each autodoc directive of a page, and the whole name of what it documents."""
    module = ""
    for line in text.splitlines():
        found = _DIRECTIVE.match(line)
        if found is None:
            continue
        kind, name = found.groups()
        if kind == "currentmodule":
            module = name
        else:
            yield kind, name if name.startswith("qgnn") else f"{module}.{name}"


def resolve(name: str, *, module: bool = False) -> Any:
    """What a dotted name stands for: the module, or what a module has of this name (``qgnn.trace`` is both)."""
    if module:
        return importlib.import_module(name)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def exists(name: str) -> bool:
    try:
        resolve(name)
    except AttributeError:
        return False
    return True


def documented(docs: Path) -> list[Any]:
    """Everything that has a directive."""
    found = (directive for text in pages(docs).values() for directive in directives(text))
    return [resolve(name, module=kind == "automodule") for kind, name in found]


def public_modules() -> list[ModuleType]:
    names = ["qgnn", *(f"qgnn.{module.name}" for module in pkgutil.iter_modules(qgnn.__path__))]
    modules = [importlib.import_module(name) for name in names if name not in INTERNAL]
    return [module for module in modules if hasattr(module, "__all__")]


def missing(docs: Path) -> list[str]:
    """Public names without a directive. A constant needs none."""
    known = {id(value) for value in documented(docs)}
    names = ((module, name, getattr(module, name)) for module in public_modules() for name in module.__all__)
    return [f"{m.__name__}.{name}" for m, name, value in names if not isinstance(value, str) and id(value) not in known]


def strangers(docs: Path) -> list[str]:
    """Names of the package, and files of the repository, that pages name and that do not exist."""
    wrong = []
    for page, text in pages(docs).items():
        names = [name for kind, name in directives(text) if kind != "automodule"] + _NAME.findall(text)
        wrong += [f"{page}: {name}" for name in dict.fromkeys(names) if not exists(name)]
        wrong += [f"{page}: {path}" for path in dict.fromkeys(_PATH.findall(text)) if not list(ROOT.glob(path))]
    return wrong


def broken_includes(docs: Path) -> list[str]:
    """Lines between which pages include README, that README does not have exactly once."""
    readme = (ROOT / "README.md").read_text().splitlines()
    found = ((page, marker) for page, text in pages(docs).items() for marker in _INCLUDE.findall(text))
    return [f"{page}: {marker}" for page, marker in found if readme.count(marker.strip('"')) != 1]


def incomplete_primitives(docs: Path) -> list[str]:
    """Pages of primitives without all sections, in this order."""
    headings = {
        name: re.findall(r"^## (.+)$", pages(docs).get(f"primitives/{name}.md", ""), re.MULTILINE)
        for name in PRIMITIVES
    }
    return [f"primitives/{name}.md: {found}" for name, found in headings.items() if found != SECTIONS]


def told_of(doc: str) -> set[str]:
    """The parameters that a docstring tells of."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", doc, re.MULTILINE)
    return set(re.findall(r"^ {4}\*{0,2}(\w+):", section[1], re.MULTILINE)) if section else set()


def untold(owner: str, value: Any) -> list[str]:
    """What is wrong with the docstring of a function, or of a class."""
    doc = inspect.cleandoc(value.__doc__ or "")
    if not doc:
        return [f"{owner} has no docstring"]
    names = {name for name in inspect.signature(value).parameters if name not in ("self", "cls") and name[0] != "_"}
    wrong = [f"{owner} does not tell of '{name}'" for name in sorted(names - told_of(doc))]
    return wrong + [f"{owner} tells of '{name}', which it has not" for name in sorted(told_of(doc) - names)]


def documented_functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in public_modules():
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, FunctionType):
                found[f"{module.__name__}.{name}"] = value
            elif isinstance(value, type) and not issubclass(value, Exception):
                found[f"{module.__name__}.{name}"] = value
                # PyG gives the class of a layer methods of other modules with its first instance.
                methods = {key: getattr(member, "__func__", member) for key, member in vars(value).items()}
                found |= {
                    f"{module.__name__}.{name}.{key}": method
                    for key, method in methods.items()
                    if key[0] != "_" and isinstance(method, FunctionType) and method.__module__ == value.__module__
                }
    return found


def test_every_public_name_is_on_a_page() -> None:
    assert missing(DOCS) == []


def test_pages_name_nothing_that_does_not_exist() -> None:
    assert strangers(DOCS) == []


def test_pages_include_parts_of_readme_that_exist() -> None:
    assert any(_INCLUDE.findall(text) for text in pages(DOCS).values())
    assert broken_includes(DOCS) == []


def test_pages_show_the_plots_that_there_are() -> None:
    texts = [*pages(DOCS).values(), (ROOT / "README.md").read_text()]
    shown = {name for text in texts for name in _IMAGE.findall(text)}
    assert shown == {path.name for path in (DOCS / "images").iterdir()}


def test_every_primitive_has_a_page_with_all_sections() -> None:
    assert incomplete_primitives(DOCS) == []


def test_public_docstrings_tell_of_every_parameter() -> None:
    functions = documented_functions()
    assert {"qgnn.functional.spmm", "qgnn.Graph.update", "qgnn.nn.QGCNConv.forward"} <= functions.keys()
    assert [problem for name, value in functions.items() for problem in untold(name, value)] == []


def _options(parser: ArgumentParser) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        else:
            yield f"{parser.prog} {', '.join(action.option_strings) or action.dest}", action


def test_every_option_of_the_command_says_what_it_is() -> None:
    options = dict(_options(build_parser()))
    assert "qgnn train --precision" in options
    assert [name for name, action in options.items() if not action.help] == []


def test_page_of_the_command_has_every_option() -> None:
    pytest.importorskip("sphinx", reason="the directive is Sphinx's")
    spec = importlib.util.spec_from_file_location("command_options", DOCS / "extensions" / "command_options.py")
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    text = "\n".join(extension.lines(build_parser()))
    for name, action in _options(build_parser()):
        option = action.option_strings[-1] if action.option_strings else action.metavar
        assert re.search(rf"^\.\. option:: .*{re.escape(option)}\b", text, re.MULTILINE), name


WITHOUT_COST = [section for section in SECTIONS if section != "Cost"]


@pytest.mark.parametrize(
    ("page", "old", "new", "check", "found"),
    [
        ("api/functional.rst", ".. autofunction:: spmm\n", "", missing, "qgnn.functional.spmm"),
        ("api/metrics.rst", ".. automodule:: qgnn.metrics", "", missing, "qgnn.metrics"),
        ("api/layers.rst", ":: QLinear", ":: QLinaer", strangers, "api/layers.rst: qgnn.nn.QLinaer"),
        ("index.md", "# qgnn\n", "# qgnn\n`qgnn.functional.spm(x)`\n", strangers, "index.md: qgnn.functional.spm"),
        ("index.md", "# qgnn\n", "# qgnn\n`kernels/cpu/spm.c`\n", strangers, "index.md: kernels/cpu/spm.c"),
        ("primitives/spmm.md", "## Cost\n", "", incomplete_primitives, f"primitives/spmm.md: {WITHOUT_COST}"),
        ("index.md", 'before: "## License"', 'before: "## Licence"', broken_includes, 'index.md: "## Licence"'),
    ],
)
def test_checks_find_what_was_planted(
    tmp_path: Path, page: str, old: str, new: str, check: Callable[[Path], list[str]], found: str
) -> None:
    for name, text in pages(DOCS).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace(old, new, 1) if name == page else text)
    assert found in check(tmp_path)


def test_untold_parameters_are_found() -> None:
    def told(x: int, y: int = 0) -> None:
        """Nothing.

        Args:
            x: A number.
            z: Another.
        """

    assert untold("told", told) == ["told does not tell of 'y'", "told tells of 'z', which it has not"]
