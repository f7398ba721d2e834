"""``python -m bench.sass --shard INDEX/COUNT [--quick] [--case PREFIX...]``: one process of ``python -m bench sass``.

Prints a JSON line a kernel. It needs a process without TRITON_INTERPRET.
"""

import argparse
import json
import sys
import traceback

import torch

from . import ARCHES
from .cases import MAIN, make_cases
from .compiler import compile_case

QUICK_ARCH = 90
NUM_NODES = 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sass", description=__doc__)
    parser.add_argument("--shard", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", nargs="+", default=[""])
    options = parser.parse_args()
    index, count = map(int, options.shard.split("/"))
    cases = make_cases(torch.device("cpu"), NUM_NODES)
    jobs = [
        (name, arch)
        for name in cases
        if name.startswith(tuple(options.case))
        for arch in ((QUICK_ARCH,) if options.quick and name not in MAIN else ARCHES)
    ]
    failed = False
    for name, arch in jobs[index::count]:
        try:
            for record in compile_case(name, cases[name], arch):
                print(json.dumps(record), flush=True)
        except Exception:  # the others still compile
            print(f"sass: {name} for sm_{arch}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
