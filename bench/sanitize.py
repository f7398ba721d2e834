"""``python -m bench.sanitize``: every kernel once on small inputs, for a tool such as compute-sanitizer to watch.

On a machine without a GPU the same calls run in Triton's interpreter: it needs TRITON_INTERPRET=1.
"""

import torch

from .sass.cases import MAIN, make_cases

NUM_ROWS = 1003  # enough for partial results and a hub, and no whole number of tiles


def main() -> None:
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda else "cpu")
    cases = make_cases(device, NUM_ROWS if has_cuda else 11)  # the interpreter walks every edge
    for name in sorted(MAIN):
        print(name, flush=True)
        cases[name]()
        if has_cuda:
            torch.cuda.synchronize()
    print(f"{len(MAIN)} cases ran")


if __name__ == "__main__":
    main()
