"""``python -m bench.sanitize``: every kernel once on small inputs, for a tool such as compute-sanitizer to watch.

On a machine without a GPU the same calls run in Triton's interpreter: it needs TRITON_INTERPRET=1.
"""

import torch

from .sass.cases import MAIN, make_cases


def main() -> None:
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda else "cpu")
    # Enough rows for partial results, and no whole number of tiles of them; the interpreter walks every edge.
    cases = make_cases(device, 1003 if has_cuda else 11)
    for name in sorted(MAIN):
        print(name, flush=True)
        cases[name]()
        if has_cuda:
            torch.cuda.synchronize()
    print(f"{len(MAIN)} cases ran")


if __name__ == "__main__":
    main()
