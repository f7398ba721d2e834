"""``python -m bench SUITE... [--device cpu|cuda] [--quick] [--json FILE]`` and ``python -m bench report``."""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

from . import harness, report
from .clock import make_clock
from .records import RESULTS, Record, append, make_stamp
from .suites import SUITES, cases


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suites", nargs="+", choices=[*SUITES, "report"], metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    quick_help = "tiny shapes and few rounds, which show that a suite works; recorded only where --results is given"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write this run's records there too")
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"where records are (default: {RESULTS})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further case after this time")
    parser.add_argument("--since", metavar="UTC", help="report: a text table of the records made since then")
    options = parser.parse_args(arguments)
    if "report" in options.suites and len(options.suites) > 1:
        parser.error("'report' stands alone: it reads records and measures nothing")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device here; use --device cpu")
    return options


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    options = parse(arguments)
    if options.suites == ["report"]:
        since = options.since
        results = options.results or RESULTS
        print(report.markdown(results) if since is None else report.compact(results, since))
        return 0

    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    from .suites.inputs import Setting

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    stamp, clock = make_stamp(device), make_clock(device)
    effort = harness.QUICK if options.quick else harness.Effort()
    results = options.results or (None if options.quick else RESULTS)
    records: list[Record] = []
    for suite in options.suites:
        measured = harness.measure_all(
            suite,
            cases(suite, Setting(device, options.quick)),
            deadline=started + options.seconds,
            stamp=stamp,
            clock=clock,
            effort=effort,
            device=device,
        )
        for group in measured:
            records += group
            if results is not None:
                append(results / stamp.machine / f"{suite}.jsonl", group)
    if options.json:
        options.json.unlink(missing_ok=True)
        append(options.json, records)
    report.show(records)
    failed = [record for record in records if not record["ok"]]
    if failed:
        print(f"{len(failed)} of {len(records)} measurements failed their check", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
