"""Entry point: parse, run, and turn what went wrong into one line and an exit code."""

import shlex
import sys
from collections.abc import Sequence

from qgnn.cli.args import build_parser
from qgnn.cli.errors import UsageError

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments after the program's name. (default: those of the process)

    Returns:
        0 on success, 1 if a run of a sweep failed, 2 if the user has to change something (one line on standard error
        says what), 130 after Ctrl-C.
    """
    command = ""
    try:
        options = build_parser().parse_args(argv)
        options.command_line = shlex.join(["qgnn", *(sys.argv[1:] if argv is None else argv)])
        command = f" {options.command}"
        if options.command == "train":
            from qgnn.cli.train import train

            train(options)
        elif options.command == "sweep":
            from qgnn.cli.sweep.command import sweep

            return sweep(options)
        else:
            from qgnn.cli.info import info

            info(options)
    except UsageError as error:
        print(f"qgnn{command}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"qgnn{command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # argparse, after --help, --version or a usage error
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    return EXIT_OK
