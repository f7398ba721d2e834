"""``python -m bench SUITE... [--device cpu|cuda] [--quick] [--json FILE]``, and what needs no timing: ``python -m bench
report`` (tables from records), ``sass`` (the kernels' machine code), ``roofline`` (floors of bytes and operations)."""

import argparse
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from . import pages, plots, report
from .records import RESULTS, Record, append, finished, is_of_a_commit, until
from .suites import SUITES, cases

ALONE = ("report", "sass", "roofline")  # commands that measure nothing


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "suites", nargs="+", choices=[*SUITES, *ALONE], metavar="SUITE", help=", ".join((*SUITES, *ALONE))
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    quick_help = "tiny shapes and few rounds, recorded only where --results is given; sass: sm_90 alone for variants"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write this run's records there too")
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"where records are (default: {RESULTS})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further case after this time")
    parser.add_argument("--since", metavar="UTC", help="report: a text table of the records made since then")
    pages_help = "report: rewrite what is between the markers of FILE (of README and the pages of results)"
    parser.add_argument("--pages", type=Path, nargs="*", metavar="FILE", help=pages_help)
    root_help = (
        "accuracy, distributed, distribution, blocksize, memory, threshold: where the data sets are, as in qgnn train"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help=root_help)
    parser.add_argument(
        "--case", nargs="+", default=[""], metavar="PREFIX", help="only cases whose name starts so; behind SUITE"
    )
    resume_help = "leave out the cases that have records of this commit"
    parser.add_argument("--resume", action="store_true", help=resume_help)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="report: write PNG files there")
    options = parser.parse_args(arguments)
    for command in ALONE:
        if command in options.suites and len(options.suites) > 1:
            parser.error(f"'{command}' stands alone: it measures nothing")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device here; use --device cpu")
    return options


def make_report(options: argparse.Namespace) -> int:
    results = options.results or RESULTS
    if options.pages is not None:
        from qgnn.cli.errors import UsageError

        try:
            for page in options.pages or pages.PAGES:
                pages.rewrite(page, results)
        except (OSError, ValueError, UsageError) as error:
            print(f"--pages: {error}", file=sys.stderr)
            return 1
    if options.plots:
        print(*plots.write(results, options.plots), sep="\n")
    if options.since:
        print(report.compact(results, options.since))
    elif options.pages is None and not options.plots:
        print(report.markdown(results))
    return 0


def read_machine_code(options: argparse.Namespace) -> int:
    from . import sass

    return sass.run(options)


def model(options: argparse.Namespace) -> int:
    from . import roofline

    return roofline.run(options)


def measure(options: argparse.Namespace) -> int:
    """Measure the suites, appending the records of each case as soon as they are there."""
    from qgnn.cli.measure import device_is_lost
    from qgnn.cli.provenance import make_stamp

    from . import harness
    from .clock import make_clock
    from .suites.inputs import Setting

    started = time.monotonic()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    stamp, clock = make_stamp(device), make_clock(device)
    effort = harness.QUICK if options.quick else harness.Effort()
    results = options.results or (None if options.quick else RESULTS)
    if options.resume and (results is None or not is_of_a_commit(stamp)):
        reason = "--quick without --results keeps no records" if results is None else "the code is not that of a commit"
        print(f"--resume: {reason}, so that every case is measured", file=sys.stderr, flush=True)
    prefixes = tuple(options.case)
    records: list[Record] = []
    broken = []
    for suite in options.suites:
        done = finished(results, suite, stamp) if options.resume and results is not None else set()
        declared = cases(suite, Setting(device, options.quick, options.root, prefixes))
        measured = harness.measure_all(
            suite,
            (case for case in declared if case.name.startswith(prefixes) and (case.name, case.pass_) not in done),
            deadline=started + options.seconds,
            stamp=stamp,
            clock=clock,
            effort=effort,
            device=device,
            whole=options.resume,  # which takes a case that was cut for a measured one
        )
        try:
            for group in measured:
                group = until(group, stamp, make_stamp(device))  # an edit or a commit during a long run shows
                records += group
                if results is not None and group:  # none where no provider was available
                    append(results / stamp.machine / f"{suite}.jsonl", group)
        except Exception as error:  # its inputs could not be made; the other suites still can, but on a lost device
            traceback.print_exc()
            lost = list(getattr(error, "records", ()))
            records += lost
            if results is not None and lost:
                append(results / stamp.machine / f"{suite}.jsonl", lost)
            if device_is_lost():
                broken += options.suites[options.suites.index(suite) :]
                break
            broken.append(suite)
    if options.json:
        options.json.unlink(missing_ok=True)
        append(options.json, records)
    report.show(records)
    failed = [record for record in records if not record["ok"]]
    if failed:
        print(f"{len(failed)} of {len(records)} measurements failed their check", file=sys.stderr)
    if broken:
        print(f"broken suites: {', '.join(broken)}", file=sys.stderr)
    return 1 if failed or broken else 0


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    commands = {"report": make_report, "sass": read_machine_code, "roofline": model}
    return commands.get(options.suites[0], measure)(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
