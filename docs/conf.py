"""Sphinx's settings: the site is made of the docstrings of the installed package, without a network."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

import qgnn

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "qgnn"
author = "the qgnn authors"
project_copyright = author
release = qgnn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_parser",
    "command_options",
]
exclude_patterns = ["extensions"]
nitpicky = True
smartquotes = False  # options begin with two dashes
# Names of other packages stay text, as their inventories would have to be fetched.
nitpick_ignore_regex = [
    ("py:.*", r"(abc|collections|contextlib|os|pathlib|torch|torch_geometric|torch_sparse|typing)\..*"),
    ("py:class", r"Tensor"),  # of fields of a NamedTuple, whose annotations are not resolved
    ("py:class", r"qgnn\.convert\.convert\.Model"),  # a type variable
]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # config=QConfig(), not its repr
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"qgnn {release}"


def without_private_parameters(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """A signature as users write it: parameters with an underscore in front are not theirs."""
    if arguments is None or ", _" not in arguments:
        return None
    known = signature(obj.__init__ if inspect.isclass(obj) else obj, bound_method=inspect.isclass(obj))
    public = [parameter for parameter in known.parameters.values() if not parameter.name.startswith("_")]
    shown = known.replace(parameters=public)
    return stringify_signature(shown, show_return_annotation=False, unqualified_typehints=True), returns


def links_from_docs(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Links of the repository's pages to its files and to each other, and of README's beginning to the rest of it."""

    def place(link: re.Match[str]) -> str:
        if link[1].startswith("#"):
            return f"](guide.md{link[1]})" if page == "index" else link[0]
        return f"]({link[1].lower()})" if link[1].endswith(".md") else f"](../{link[1]})"

    content[0] = re.sub(r"\]\((?!https?:)([^)]+)\)", place, content[0])


def setup(app: Sphinx) -> None:
    app.connect("include-read", links_from_docs)
    app.connect("autodoc-process-signature", without_private_parameters)
