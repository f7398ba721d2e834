"""The directive ``command-options``: every option of an argparse parser and of its commands, from the parser itself."""

import argparse
import importlib
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_WIDTH = 88


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for group in groups for name, command in group.choices.items()}


def _usage(parser: argparse.ArgumentParser) -> list[str]:
    formatter = parser.formatter_class(prog=parser.prog, width=_WIDTH)  # whatever the terminal's
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    return [".. code-block:: text", "", *(f"   {line}" for line in formatter.format_help().splitlines()), ""]


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    formatter = parser._get_formatter()
    value = "" if action.nargs == 0 else " " + formatter._format_args(action, (action.metavar or action.dest).upper())
    names = [f"{name}{value}" for name in action.option_strings] or [action.metavar or action.dest]
    text = formatter._expand_help(action) if action.help else ""
    return [f".. option:: {', '.join(names)}", "", f"   {_literal(text)}", ""]


def _literal(text: str) -> str:
    """Help texts are plain: what reStructuredText would take for markup is escaped."""
    return "".join(f"\\{char}" if char in "*`|_\\" else char for char in text)


def lines(parser: argparse.ArgumentParser) -> list[str]:
    """reStructuredText of a parser: usage and options, then those of its commands."""
    text = [f".. program:: {parser.prog}", "", _literal(parser.description or ""), "", *_usage(parser)]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._SubParsersAction)]
        if actions:
            text += [f".. rubric:: {str(group.title).capitalize()}", "", _literal(group.description or ""), ""]
            text += [line for action in actions for line in _option(parser, action)]
    text += [_literal(parser.epilog or ""), ""]
    for name, command in _subparsers(parser).items():
        title = f"{parser.prog} {name}"
        text += ["", title, "-" * len(title), "", *lines(command)]
    return text


class CommandOptions(SphinxDirective):
    """``.. command-options:: module:function``; the function makes the parser."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, function = self.arguments[0].partition(":")
        parser = getattr(importlib.import_module(module), function)()
        return self.parse_text_to_nodes("\n".join(lines(parser)), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-options", CommandOptions)
    return {"parallel_read_safe": True}
