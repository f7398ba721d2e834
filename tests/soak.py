"""A soak test: random graphs, layers, functions, models, formats and damaged files, for as long as it is given.

    python tests/soak.py --seconds 3600 --seed 0     # cases 0, 1, 2, ... of the seed; exit status 1 if any fails
    python tests/soak.py --case 1000000017           # one case, which a seed determines, with its traceback
    python tests/soak.py --leak --steps 10000        # memory of as many training steps (tests/soak_leak.py)

It runs as a script, as the tests import each other's helpers by their folder, and needs qgnn to be installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_geometric

import qgnn
import soak_cases
import soak_files
from soak_draw import Draw

KINDS: dict[str, Callable[[Draw], None]] = soak_cases.KINDS | soak_files.KINDS
OF_A_SEED = 1_000_000_000  # cases
PROGRESS_S = 30.0


def kind_of(case: int, kinds: Sequence[str] = tuple(KINDS)) -> str:
    """What the case is of."""
    return Draw(case).any_of(kinds)


def run_case(case: int, kind: str | None = None) -> None:
    """One case, under errors in place of warnings."""
    draw = Draw(case)
    chosen = draw.any_of(tuple(KINDS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".torch.jit.*is deprecated", DeprecationWarning)  # of PyG
        KINDS[kind or chosen](draw)


def soak(
    seed: int, seconds: float, *, most_failures: int | None = None, kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run cases until the time is over, or so many have failed; one line for each that fails.

    Returns:
        What ran: numbers of cases, by kind too, seeds of failures, seconds, versions.
    """
    start, said = time.monotonic(), time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    case = seed * OF_A_SEED
    while len(failures) != most_failures and time.monotonic() - start < seconds:
        kind = kind_of(case)
        if kinds is None or kind in kinds:
            counts[kind] += 1
            try:
                run_case(case)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                failures.append({"case": case, "kind": kind, "reason": reason})
                print(f"FAILED {kind}: {reason[:300]}; again with: python tests/soak.py --case {case}", flush=True)
        case += 1
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            print(f"{said - start:.0f} s: {sum(counts.values())} cases, {len(failures)} failed", flush=True)
    return {
        "seed": seed,
        "cases": sum(counts.values()),
        "kinds": dict(sorted(counts.items())),
        "failures": failures,
        "seconds": round(time.monotonic() - start, 1),
        "versions": {
            "qgnn": qgnn.__version__,
            "torch": torch.__version__,
            "torch_geometric": torch_geometric.__version__,
            "python": platform.python_version(),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="which cases (default: 0)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), help="only these (default: all)")
    parser.add_argument("--case", type=int, metavar="SEED", help="run this case alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what ran to a file")
    parser.add_argument("--leak", action="store_true", help="run training steps, and look at the memory")
    parser.add_argument("--steps", type=int, default=10_000, help="of --leak (default: 10000)")
    args = parser.parse_args(argv)
    if args.case is not None:
        print(f"case {args.case}: {kind_of(args.case)}")
        try:
            run_case(args.case)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if args.leak:
        import soak_leak

        result = soak_leak.main(args.steps, args.seed)
    else:
        result = soak(args.seed, args.seconds, kinds=args.kinds)
        print(f"{result['cases']} cases in {result['seconds']} s, {len(result['failures'])} failed")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
