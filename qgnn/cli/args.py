"""The arguments of the command line, checked before anything slow is imported or run."""

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from qgnn.cli import values
from qgnn.cli.compression import parse_compression
from qgnn.cli.errors import UsageError
from qgnn.cli.scheme import parse_scheme

MODELS = ("gcn", "sage", "gat", "gin", "gcn2")
COMMANDS = ("train", "sweep", "info")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def argument(check: Callable[[Any], Any], convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """An argument type: text that is converted where it can be, and checked; a ``ValueError`` says what is wrong."""

    def parse(text: str) -> Any:
        with suppress(ValueError):  # then the text itself is what was given
            return _checked(check, convert(text))
        return _checked(check, text)

    return parse


def _checked(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least(minimum: int, maximum: int = values.MOST) -> Callable[[str], int]:
    """An argument type: a whole number not below ``minimum``, nor above ``maximum``."""
    return argument(values.whole(minimum, maximum), int)


def number_in(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Callable[[str], float]:
    """An argument type: a number between ``low`` and ``high``, each included unless open."""
    return argument(values.number(low, high, low_open=low_open, high_open=high_open), float)


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argument type: items between commas that are not in brackets, each parsed by ``parse``, without repetition."""

    def parse_list(text: str) -> list[Any]:
        return list(dict.fromkeys(parse(item.strip()) for item in re.split(r",(?![^\[]*\])", text)))

    return parse_list


def fanout(text: str) -> tuple[int, ...]:
    """An argument type: whole numbers from 1 on, or ``all``, between commas."""
    check = argument(values.fanout, int)
    return tuple(check(item.strip()) for item in text.split(","))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="qgnn", description="Train PyTorch Geometric models in int8, and see what that brings.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar=f"{{{','.join(COMMANDS)}}}", parser_class=Parser
    )
    _add_train(commands)
    _add_sweep(commands)
    _add_info(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"qgnn {version('qgnn')}")
        parser.exit(0)


class _Example(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from qgnn.cli.sweep.example import TEXT

        print(TEXT, end="")
        parser.exit(0)


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, devices, and which backend serves each op",
        description="Print versions, devices, and which backend serves each op and why.",
    )
    parser.add_argument("--json", metavar="FILE", help="also write it to FILE as JSON")


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model at several precisions, side by side",
        description="Train one model at several precisions on one data set, and print accuracy, time and memory side "
        "by side. Without arguments: PyG in fp32 against int8 on the WordNet graph inside the package.",
        epilog="Options without a default of their own take the usual values of the data set. In place of accuracy "
        "stands what its literature reports: micro-F1 of several labels a node, ROC-AUC of Minesweeper, Tolokers, "
        "Questions and genius, RMSE of ESOL and FreeSolv, which are molecules. Kept for backward is what autograd "
        "holds between the two passes, without parameters and the graph. The features of the data set count if the "
        "first layer holds them; no compression touches them, so that beside one the rest stands apart.",
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--dataset", default="wordnet", metavar="NAME", help="data set (default: %(default)s, embedded)")
    what.add_argument(
        "--root", metavar="DIR", help="folder of the data sets, in PyG's layout (default: qgnn in the cache folder)"
    )
    what.add_argument("--model", default="gcn", choices=MODELS, help="model (default: %(default)s)")
    what.add_argument(
        "--precision",
        type=list_of(argument(parse_scheme)),
        default="fp32,int8",
        metavar="LIST",
        help="of fp32 (PyG's own layers), bf16 (the same under autocast), and number formats such as int8, int4, "
        "fixed8, msfp12, mxfp4 or fp8-e4m3 (the same model converted, all layers but the last); append :weights or "
        "another component to quantize it alone, :sdq[2,4,8], :adq[2,8] or :plateau[2,8] for widths that grow with the "
        "epochs or where the loss stands still; default: %(default)s",
    )
    what.add_argument(
        "--compress",
        type=list_of(argument(parse_compression)),
        default="none",
        metavar="LIST",
        help="of none, and int1, int2, int4 or int8 codes in place of what autograd keeps for the backward pass; "
        "append -rp8 to project columns 8 to 1, -vm for bins of least variance (2 and 4 bits), -g1024 for blocks of "
        "1024 values, in this order; each with each precision; default: %(default)s",
    )
    what.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")

    how = parser.add_argument_group("how to train")
    how.add_argument("--epochs", type=at_least(1), metavar="N", help="passes over the nodes to train on")
    how.add_argument(
        "--seeds",
        type=at_least(1, values.MOST_SEEDS),
        default=3,
        metavar="K",
        help="number of runs (default: %(default)s)",
    )
    how.add_argument(
        "--seed", type=argument(values.SEED, int), default=0, metavar="N", help="the first seed (default: %(default)s)"
    )
    how.add_argument("--hidden", type=at_least(1), metavar="N", help="width of the hidden layers")
    how.add_argument("--layers", type=at_least(1, values.MOST_LAYERS), metavar="N", help="number of layers")
    how.add_argument(
        "--dropout", type=number_in(0, 1, high_open=True), metavar="P", help="probability of dropping a value"
    )
    how.add_argument("--lr", type=number_in(0, 100, low_open=True), metavar="RATE", help="learning rate of Adam")
    how.add_argument(
        "--weight-decay",
        type=number_in(0, 100),
        metavar="W",
        help="of the first layer (GCN2's convolutions have their own)",
    )

    batches = parser.add_argument_group("what a step sees")
    batches.add_argument(
        "--sampler",
        choices=("full", "neighbor"),
        default="full",
        help="the whole graph, or some of its nodes and sampled neighborhoods, whose features are gathered in the "
        "host's memory, as int8 rows where the first layer takes them so; scores are those of a pass over the whole "
        "graph (default: %(default)s)",
    )
    batches.add_argument(
        "--fanout",
        type=fanout,
        metavar="LIST",
        help="edges into each node at most, or all, hop by hop (default: 15, and 10 for further hops)",
    )
    batches.add_argument(
        "--batch-size",
        type=at_least(1),
        metavar="N",
        help="nodes to train on in a step, all processes together (default: 1024)",
    )
    batches.add_argument(
        "--workers",
        type=at_least(0),
        metavar="N",
        help="processes that make batches, for each that trains (default: 0, the training one)",
    )

    group = parser.add_argument_group(
        "several processes",
        "torchrun --nproc-per-node 2 -m qgnn train --sampler neighbor ... trains in two, each on its share of every "
        "batch, and on a GPU of its own where there are some. The same seed gives the same batches in any number of "
        "processes, and gradients are those of the mean over a batch; dropout, sampled neighbors and the noise of "
        "rounding are each process's own. The first one evaluates, reports, and writes files.",
    )
    group.add_argument(
        "--gradients",
        choices=("fp32", "int8"),
        help="what processes send each other: int8 codes take a quarter of the bytes (default: fp32)",
    )
    group.add_argument(
        "--timeout",
        type=number_in(0, 86400, low_open=True),
        metavar="SECONDS",
        help="how long a process waits for the others, be it for data that the first one loads or for a step, before "
        "it takes one for lost, and ends (default: 600)",
    )

    saved = parser.add_argument_group("going on from where a training was")
    saved.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="write all there is to know, behind an epoch, to FILE, which is replaced as a whole, and is this "
        "command's alone while FILE.lock is locked",
    )
    saved.add_argument(
        "--checkpoint-every", type=at_least(1), metavar="N", help="epochs from one to the next (default: 1)"
    )
    saved.add_argument(
        "--resume",
        action="store_true",
        help="go on from FILE, if it exists: runs that have ended are not repeated, and the others end as if nothing "
        "had happened, bit for bit; needs the arguments and the number of processes of before",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write every run to FILE")
    output.add_argument("--plot", metavar="FILE", help="draw the table to FILE (.png, .svg, .pdf)")


def _add_sweep(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="train many combinations of data sets, models, formats, components, schedules and seeds",
        description="Run every combination that a TOML file names, over processes, and compare the accuracy, or what "
        "stands in its place (see qgnn train), with that of the same model unquantized, seed by seed. Each "
        "run is recorded when it ends: after Ctrl-C, a kill or a change of the file, the same command runs what is "
        "missing. A run whose process dies is tried once more; runs that a changed file no longer names stay in the "
        "journal and out of the table.",
    )
    parser.add_argument("spec", metavar="SPEC", help="the file; --example prints one")
    parser.add_argument("--example", action=_Example, nargs=0, help="print a short file to start from, and end")
    parser.add_argument("--results", metavar="DIR", help="folder of the journal and the table (default: sweeps/NAME)")
    parser.add_argument(
        "--table",
        metavar="FILE",
        help="the table, .csv or .parquet, which needs pyarrow (default: results.csv in the folder of results)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw what each format costs to FILE (.png, .svg, .pdf)")
    parser.add_argument("--root", metavar="DIR", help="folder of the data sets, in place of the file's")
    parser.add_argument(
        "--processes",
        type=at_least(1),
        metavar="N",
        help="runs at a time, in place of the file's number (default: one a core, one on a GPU)",
    )
    parser.add_argument(
        "--limit", type=at_least(0), metavar="N", help="end after N runs; with 0, write table and summary anew"
    )
    parser.add_argument("--retry-failed", action="store_true", help="run again what failed")
    parser.add_argument(
        "--dry-run", action="store_true", help="count the runs of each grid, and end; nothing is written"
    )
