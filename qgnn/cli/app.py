"""Entry point: parse, run, and turn what went wrong into one line and an exit code."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from qgnn.cli.args import COMMANDS, build_parser
from qgnn.cli.errors import UsageError
from qgnn.cli.processes import ALONE, TIMEOUT_S, Processes, ProcessLostError, is_launched, joined, leave

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments after the program's name. (default: those of the process)

    Returns:
        0 on success, 1 if a run of a sweep failed or one of several processes was lost, 2 if the user has to change
        something, 130 after Ctrl-C. One line on standard error says what was wrong, of several processes together.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = " ".join(["qgnn", *(name for name in arguments[:1] if name in COMMANDS)])
    processes, options = ALONE, argparse.Namespace(timeout=None, checkpoint=None)
    try:
        with contextlib.ExitStack() as stack:
            error = _parse(arguments, options)
            if command == "qgnn train" and is_launched():
                processes = stack.enter_context(joined(options.timeout or TIMEOUT_S))
            processes.agree(lambda: _raise(error))
            return _run(options, processes)
    except UsageError as raised:
        processes.say(f"{command}: error: {' '.join(str(raised).splitlines())}")
        return leave(processes, EXIT_USAGE)
    except ProcessLostError as lost:
        processes.say(f"{command}: error: the process group lost a process: {lost}; {_advice(options.checkpoint)}")
        return leave(processes, EXIT_FAILED)
    except KeyboardInterrupt:
        processes.say(f"{command}: interrupted")
        return leave(processes, EXIT_INTERRUPTED)
    except SystemExit as stop:  # argparse, after --help or --version; a sweep that was told to end
        return stop.code if isinstance(stop.code, int) else EXIT_OK


def _parse(arguments: list[str], options: argparse.Namespace) -> UsageError | None:
    """Fill ``options``, or return what is wrong with the arguments, of which several processes have to speak first."""
    try:
        build_parser().parse_args(arguments, options)
    except UsageError as error:
        return error
    options.command_line = shlex.join(["qgnn", *arguments])
    return None


def _raise(error: UsageError | None) -> None:
    if error is not None:
        raise error


def _run(options: argparse.Namespace, processes: Processes) -> int:
    if options.command == "train":
        from qgnn.cli.train import train

        train(options, processes)
    elif options.command == "sweep":
        from qgnn.cli.sweep.command import sweep

        return sweep(options)
    else:
        from qgnn.cli.info import info

        info(options)
    return EXIT_OK


def _advice(checkpoint: str | None) -> str:
    """How to go on behind the loss of a process."""
    if checkpoint is None:
        return "start again, with --checkpoint FILE to be able to go on from there"
    if not Path(checkpoint).exists():
        return f"start again: {checkpoint!r} was not written yet"
    return f"the same command with --resume goes on from {checkpoint!r}"
